"""The block pool: which physical KV block holds what, and who keeps it.

Owned by the scheduler, guarded by the engine's lock; no I/O, no threads, no KV content (that is the executor's).

A block is *used* (requests refer to it, or it is retained for a peer), *cached* (nobody uses it, but it is indexed,
so a prompt with the same beginning finds it) or *free*. The index maps a block's identity (a hash of all tokens up
to its end, `antiphon_kvtransfer.identity`) to the one physical block that stands for it.

The one idea: *chains stay prefix-closed*. A block is indexed only after its parent, and only leaves are evicted
(a cached block without indexed children, least recently used first), so whoever finds a block finds all before it.
A block's parent therefore outlives its place in the index, and parents are plain block numbers. A cached block whose
descendants are in use cannot be evicted: each block counts its *holds*, which are its references, its retentions and
its children that are held themselves.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from copy import copy

from antiphon_kvtransfer.identity import BlockHash

from antiphon_engine.interface import BlocksChanged, IntegrityError

NO_BLOCK = -1
"""The parent of a chain's first block."""


class BlockPool:
    """Reference counts, index and eviction of `num_blocks` physical blocks. Amortised O(log n) a block and call."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._retained = [0] * num_blocks
        self._hashes: list[BlockHash | None] = [None] * num_blocks
        self._parents = [NO_BLOCK] * num_blocks
        self._children = [0] * num_blocks
        self._holds = [0] * num_blocks
        self._last_used = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._index: dict[BlockHash, int] = {}
        self._leaves: list[tuple[int, int]] = []  # heap of (last used, block); entries may be stale
        self._clock = 0
        self._evictable_blocks = 0
        self._retained_blocks = 0
        self._sequence = 0
        self._stored: dict[BlockHash, None] = {}
        self._removed: dict[BlockHash, None] = {}

    # -- what is there

    @property
    def available_blocks(self) -> int:
        """What `allocate` can give: free, or cached and evictable (after the blocks below it)."""
        return len(self._free) + self._evictable_blocks

    @property
    def empty_blocks(self) -> int:
        """What `allocate` can give without evicting anything."""
        return len(self._free)

    @property
    def retained_blocks(self) -> int:
        return self._retained_blocks

    def find(self, block_hash: BlockHash) -> int | None:
        return self._index.get(block_hash)

    def leading(self, hashes: Iterable[BlockHash]) -> list[int]:
        """Physical blocks of the leading hashes that are indexed."""
        blocks = []
        for block_hash in hashes:
            block = self._index.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def is_used(self, block: int) -> bool:
        return bool(self._references[block] or self._retained[block])

    def indexed(self) -> tuple[int, frozenset[BlockHash]]:
        """(sequence of the last change taken, what was indexed then)."""
        return self._sequence, frozenset(self._index)

    # -- references of requests

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks with one reference each, their content void; None (and nothing taken) if there are too few."""
        if count > self.available_blocks:
            return None
        blocks = [self._free.pop() if self._free else self._evict_leaf() for _ in range(count)]
        for block in blocks:
            self._references[block] = self._holds[block] = 1
        return blocks

    def acquire(self, block: int) -> None:
        """One more reference to an indexed or used block."""
        self._references[block] += 1
        self._hold(block)

    def drop(self, blocks: Sequence[int]) -> None:
        """One reference less to each. Deepest blocks last: they will be the first to be evicted."""
        for block in reversed(blocks):
            if not self._references[block]:
                raise IntegrityError(f"block {block} is dropped, but no request refers to it")
            self._references[block] -= 1
            self._let_go(block)

    # -- retained blocks: pins of peers, targets of reads

    def retain(self, blocks: Sequence[int]) -> None:
        """Keep blocks that are used or indexed. Raises ValueError, and keeps none, if one is neither."""
        for block in blocks:
            if not (self.is_used(block) or self._hashes[block]):
                raise ValueError(f"block {block} holds nothing that could be retained: its request is gone")
        for block in blocks:
            self._retained_blocks += not self._retained[block]
            self._retained[block] += 1
            self._hold(block)

    def release(self, blocks: Sequence[int]) -> None:
        """Undo one `retain` of each block. Raises ValueError at a block that is not retained."""
        for block in reversed(blocks):
            if not self._retained[block]:
                raise ValueError(f"block {block} is released more often than it was retained")
            self._retained[block] -= 1
            self._retained_blocks -= not self._retained[block]
            self._let_go(block)

    # -- the index

    def index(self, block: int, block_hash: BlockHash, parent: int) -> int:
        """Index a used block whose content is complete, and return the block to refer to from now on.

        That is another one where the same content is indexed already (two requests computed it at the same time):
        the caller's reference moves there, so equal content is kept once and all blocks of a chain are indexed.
        `parent` must be indexed, or NO_BLOCK.
        """
        existing = self._index.get(block_hash)
        if existing is not None and existing != block:
            self.acquire(existing)
            self.drop((block,))
            return existing
        if existing is None:
            if parent != NO_BLOCK and self._hashes[parent] is None:
                raise IntegrityError(f"block {block} would be indexed under block {parent}, which is not indexed")
            self._index[block_hash] = block
            self._hashes[block] = block_hash
            self._parents[block] = parent
            if parent != NO_BLOCK:
                self._children[parent] += 1
                self._hold(parent)
            self._note(block_hash, self._stored, self._removed)
        return block

    def take_change(self) -> BlocksChanged | None:
        """What the index gained and lost since the last call: the net of it, None if nothing."""
        if not self._stored and not self._removed:
            return None
        self._sequence += 1
        change = BlocksChanged(self._sequence, tuple(self._stored), tuple(self._removed))
        self._stored.clear()
        self._removed.clear()
        return change

    # -- integrity

    def copy(self) -> BlockPool:
        """The books as they are now, to be checked while this pool goes on."""
        books = copy(self)
        for name, value in vars(self).items():
            if isinstance(value, list | dict):
                setattr(books, name, value.copy())
        return books

    def check(self, references: Mapping[int, int]) -> tuple[int, int, int]:
        """Compare all books with each other and with `references` (block -> how many requests refer to it).

        Returns (free, cached, used) blocks. Raises IntegrityError.
        """
        free = set(self._free)
        if len(free) != len(self._free):
            raise IntegrityError("a block is in the free list twice")
        children, holds = [0] * self.num_blocks, [0] * self.num_blocks
        offered = {block for used_at, block in self._leaves if self._is_current(used_at, block)}
        cached = used = 0
        for block, block_hash in enumerate(self._hashes):
            counted, held_by_requests = self._references[block], references.get(block, 0)
            if counted != held_by_requests:
                raise IntegrityError(f"block {block} counts {counted} references, requests hold {held_by_requests}")
            used += self.is_used(block)
            cached += block_hash is not None and not self.is_used(block)
            if (self.is_used(block) or block_hash is not None) == (block in free):
                raise IntegrityError(f"block {block} must be exactly one of free, cached and used")
            if block_hash is not None and self._index.get(block_hash) != block:
                raise IntegrityError(f"block {block} has a hash that the index does not lead from")
            if not self._holds[block] and not self._children[block] and block not in (free | offered):
                raise IntegrityError(f"block {block} is a cached leaf that could never be evicted")
            parent = self._parents[block]
            if parent != NO_BLOCK:
                children[parent] += 1
                holds[parent] += self._holds[block] > 0
                if self._hashes[parent] is None:
                    raise IntegrityError(f"block {block} is indexed, its parent {parent} is not")
        for block in range(self.num_blocks):
            expected = (children[block], holds[block] + self._references[block] + self._retained[block])
            if (self._children[block], self._holds[block]) != expected:
                counts = (self._children[block], self._holds[block])
                raise IntegrityError(f"block {block} counts (children, holds) {counts}, it has {expected}")
        if len(self._index) != sum(block_hash is not None for block_hash in self._hashes):
            raise IntegrityError("the index leads to blocks that do not know of it")
        evictable = self._holds.count(0) - len(free)
        if evictable != self._evictable_blocks or self._retained_blocks != sum(map(bool, self._retained)):
            raise IntegrityError("the counts of evictable or retained blocks are wrong")
        return len(free), cached, used

    # -- inside

    def _hold(self, block: int) -> None:
        """One hold more; the first hold of a cached block holds its parent too."""
        while block != NO_BLOCK:
            self._holds[block] += 1
            if self._holds[block] > 1:
                return
            self._evictable_blocks -= 1
            block = self._parents[block]

    def _let_go(self, block: int) -> None:
        """One hold less; after the last one the block is free or evictable, and lets its parent go."""
        while block != NO_BLOCK:
            self._holds[block] -= 1
            if self._holds[block]:
                return
            if self._hashes[block] is None:
                self._free.append(block)
                return
            self._evictable_blocks += 1
            self._clock += 1
            self._last_used[block] = self._clock
            self._offer(block)
            block = self._parents[block]

    def _offer(self, block: int) -> None:
        """Put a cached leaf up for eviction."""
        if self._children[block]:
            return
        if len(self._leaves) > 2 * self.num_blocks:
            self._leaves = [entry for entry in self._leaves if self._is_current(*entry)]
            heapq.heapify(self._leaves)
        heapq.heappush(self._leaves, (self._last_used[block], block))

    def _is_current(self, used_at: int, block: int) -> bool:
        return (
            self._last_used[block] == used_at
            and self._hashes[block] is not None
            and not self._children[block]
            and not self._holds[block]
        )

    def _evict_leaf(self) -> int:
        while self._leaves:
            used_at, block = heapq.heappop(self._leaves)
            block_hash = self._hashes[block]
            if block_hash is None or not self._is_current(used_at, block):
                continue
            del self._index[block_hash]
            self._note(block_hash, self._removed, self._stored)
            self._hashes[block] = None
            self._evictable_blocks -= 1
            parent, self._parents[block] = self._parents[block], NO_BLOCK
            if parent != NO_BLOCK:
                self._children[parent] -= 1
                if not self._holds[parent]:
                    self._offer(parent)
            return block
        raise IntegrityError("no block can be evicted, although some are counted as evictable")

    @staticmethod
    def _note(block_hash: BlockHash, happened: dict[BlockHash, None], undone: dict[BlockHash, None]) -> None:
        if block_hash in undone:
            del undone[block_hash]
        else:
            happened[block_hash] = None
