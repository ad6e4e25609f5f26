"""A worker's KV blocks: which it holds, who uses them, which goes first.

A block is named by its trace id once it is computed (or has arrived); blocks that are being filled, partial ones and
those of answers have no name and are only counted. A job takes hold of the leading blocks that are there and reserves
the rest of what it needs (`BlockPool.hold`), so it never lacks room later.

The one idea: a job holds a chain from its root on, so a parent is in use at least as long as its child; and what
nobody uses any more is queued for eviction from the leaf to the root. So the front of that queue is the least recently
used leaf, no search is needed, and what is left of a chain is always a prefix of it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class PoolError(AssertionError):
    """The pool's books do not add up: a mistake in the simulator."""


class BlockPool:
    """See the module's docstring."""

    def __init__(self, capacity_blocks: int) -> None:
        self.capacity_blocks = capacity_blocks
        self.reserved_blocks = 0
        """Without a name: being filled, partial, or of an answer."""
        self._users: dict[int, int] = {}
        """Of each block held, how many jobs use it."""
        self._unused: OrderedDict[int, None] = OrderedDict()
        """In the order in which they are evicted."""
        self._stored: dict[int, None] = {}
        self._removed: dict[int, None] = {}

    # -- questions

    @property
    def available_blocks(self) -> int:
        """Free, or evictable."""
        return self.capacity_blocks - self.reserved_blocks - len(self._users) + len(self._unused)

    def __contains__(self, block: int) -> bool:
        return block in self._users

    def leading_blocks(self, chain: Sequence[int]) -> int:
        """How many leading blocks of `chain` are here. What is here of a chain is a prefix of it, so: bisect."""
        users = self._users
        low, high = 0, len(chain)
        while low < high:
            middle = (low + high + 1) // 2
            if chain[middle - 1] in users:
                low = middle
            else:
                high = middle - 1
        return low

    # -- holds

    def hold(self, chain: Sequence[int], blocks: int) -> Holding | None:
        """Room for `blocks` blocks that begin with `chain`, or None where there is too little.

        What is here of the chain is used; unused blocks of others are evicted for the rest.
        """
        leading = self.leading_blocks(chain)
        self._use(chain, 0, leading)
        short = blocks - leading - self.available_blocks
        if short > 0:
            self._leave(chain, leading)
            return None
        self._reserve(blocks - leading)
        return Holding(self, chain, leading, blocks - leading)

    def pin(self, chain: Sequence[int], blocks: int) -> Holding:
        """The leading `blocks` blocks, all of which are here, stay."""
        self._use(chain, 0, blocks)
        return Holding(self, chain, blocks, 0)

    # -- news for the index

    def take_changes(self) -> tuple[list[int], list[int]]:
        """(stored, removed) since the last call; what was both is in neither."""
        stored, removed = list(self._stored), list(self._removed)
        self._stored.clear()
        self._removed.clear()
        return stored, removed

    @property
    def is_changed(self) -> bool:
        return bool(self._stored or self._removed)

    def check_integrity(self, chains: Iterable[Sequence[int]] = ()) -> None:
        """Raises PoolError unless the counts fit and what is held of each of `chains` is a prefix of it."""
        if not 0 <= self.reserved_blocks <= self.capacity_blocks - len(self._users):
            raise PoolError(
                f"{self.reserved_blocks} blocks reserved and {len(self._users)} held of {self.capacity_blocks}"
            )
        unused = {block for block, users in self._users.items() if users == 0}
        if unused != set(self._unused) or any(users < 0 for users in self._users.values()):
            raise PoolError("the eviction queue is not the set of blocks that nobody uses")
        for chain in chains:
            held = [block in self._users for block in chain]
            if held != sorted(held, reverse=True):
                raise PoolError(f"what is held of chain {tuple(chain)[:8]}... is not a prefix of it")

    def check_idle(self, chains: Iterable[Sequence[int]] = ()) -> None:
        """As `check_integrity`, when nothing runs: nothing is used or reserved. Raises PoolError."""
        self.check_integrity(chains)
        if self.reserved_blocks or len(self._unused) != len(self._users):
            raise PoolError(f"nothing runs, but {self.reserved_blocks} blocks are reserved or some still in use")

    # -- for Holding

    def _use(self, chain: Sequence[int], start: int, stop: int) -> None:
        users, unused = self._users, self._unused
        for block in chain[start:stop]:
            count = users[block]
            users[block] = count + 1
            if not count:
                del unused[block]

    def _leave(self, chain: Sequence[int], stop: int) -> None:
        users, unused = self._users, self._unused
        for block in reversed(chain[:stop]):
            count = users[block] - 1
            users[block] = count
            if not count:
                unused[block] = None

    def _reserve(self, blocks: int) -> None:
        self.reserved_blocks += blocks
        for _ in range(self.reserved_blocks + len(self._users) - self.capacity_blocks):
            block, _ = self._unused.popitem(last=False)
            del self._users[block]
            if block in self._stored:
                del self._stored[block]
            else:
                self._removed[block] = None

    def _name(self, chain: Sequence[int], start: int, stop: int) -> None:
        """Reserved blocks get their names. One that has come here meanwhile is used instead, and its room freed."""
        users, unused = self._users, self._unused
        for block in chain[start:stop]:
            count = users.get(block)
            if count is None:
                users[block] = 1
                if block in self._removed:
                    del self._removed[block]
                else:
                    self._stored[block] = None
            else:
                users[block] = count + 1
                if not count:
                    del unused[block]
        self.reserved_blocks -= stop - start


class Holding:
    """What one job has of one pool: the leading `named` blocks of its chain, and `reserved` blocks without names."""

    __slots__ = ("_pool", "chain", "named", "reserved")

    def __init__(self, pool: BlockPool, chain: Sequence[int], named: int, reserved: int) -> None:
        self._pool = pool
        self.chain = chain
        self.named = named
        self.reserved = reserved

    def extend(self) -> bool:
        """Use what others have brought here since of the chain's next blocks."""
        if self.named == len(self.chain) or self.chain[self.named] not in self._pool:
            return False
        self.fill(self._pool.leading_blocks(self.chain))
        return True

    def fill(self, blocks: int) -> None:
        """The leading `blocks` blocks are there now: computed, or arrived."""
        if blocks > self.named:
            self._pool._name(self.chain, self.named, blocks)
            self.reserved -= blocks - self.named
            self.named = blocks

    def close(self) -> None:
        """The job needs none of it any more."""
        self._pool._leave(self.chain, self.named)
        self._pool.reserved_blocks -= self.reserved
        self.named = self.reserved = 0
