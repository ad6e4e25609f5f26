"""Room in the pool: what requests have of it and what they were promised.

The scheduler decides who gets room; this keeps the books: a request's blocks, the promise that covers them, and the
sum of what is promised and not yet taken. Blocks that requests refer to and those outstanding never exceed the pool.
"""

from __future__ import annotations

from collections.abc import Sequence

from antiphon_engine._request import Phase, Request
from antiphon_engine.pool import NO_BLOCK, BlockPool


class KvRoom:
    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.outstanding_blocks = 0
        """Promised and not yet taken."""

    @property
    def unpromised_blocks(self) -> int:
        """What nobody uses and nobody was promised. (Peers may pin cached blocks that back a promise for a while.)"""
        return max(0, self._pool.available_blocks - self.outstanding_blocks)

    @property
    def empty_blocks(self) -> int:
        """Of those, what holds nothing: promises are taken from what is empty first."""
        return max(0, self._pool.empty_blocks - self.outstanding_blocks)

    @property
    def is_covered(self) -> bool:
        """Whether there is a block for every promise right now."""
        return self._pool.available_blocks >= self.outstanding_blocks

    def fits(self, request: Request, spare_blocks: int) -> bool:
        """Whether its room can be promised. Blocks that it can share with others in use cost nothing."""
        shared = 0
        for number in range(min(len(request.tokens) - 1, request.findable_tokens) // request.block_tokens):
            block = self._pool.find(request.hash_of(number))
            if block is None or not self._pool.is_used(block):
                break
            shared += 1
        return self.unpromised_blocks - spare_blocks >= request.wanted_blocks - shared

    def promise(self, request: Request) -> None:
        """Set aside what `fits` has found to be there."""
        request.promised_blocks = request.wanted_blocks
        self.outstanding_blocks += request.outstanding_blocks

    def extend_from_cache(self, request: Request) -> bool:
        """Go on from indexed blocks for as long as they continue what the request has. True if there were any.

        None continue a request in flight: the blocks that its step fills are behind what it has computed.
        """
        if request.computed_tokens != len(request.blocks) * request.block_tokens:
            return False
        # Held requests get their next token from elsewhere, so they can use everything; others compute the last token.
        usable_tokens = min(len(request.tokens) - (request.phase is not Phase.HELD), request.findable_tokens)
        first = len(request.blocks)
        found = self._pool.leading(request.hash_of(n) for n in range(first, usable_tokens // request.block_tokens))
        if not found:
            return False
        for block in found:
            self._pool.acquire(block)
        self._attach(request, found)
        request.computed_tokens = len(request.blocks) * request.block_tokens
        request.indexed_blocks = len(request.blocks)
        if not request.preempted:
            cached = request.cached_tokens + len(found) * request.block_tokens
            request.cached_tokens = min(cached, len(request.source.prompt))
        return True

    def secure(self, request: Request, count: int) -> bool:
        """Give the request `count` blocks in all, from what it was promised and from what is promised to nobody."""
        missing = count - len(request.blocks)
        if missing <= 0:
            return True
        unpromised = max(0, missing - request.outstanding_blocks)
        if unpromised and self.unpromised_blocks < unpromised:
            return False
        blocks = self._pool.allocate(missing)
        if blocks is None:
            return False
        self._attach(request, blocks)
        return True

    def _attach(self, request: Request, blocks: Sequence[int]) -> None:
        before = request.outstanding_blocks
        request.blocks.extend(blocks)
        self.outstanding_blocks += request.outstanding_blocks - before

    def detach(self, request: Request, keep: int) -> None:
        """Take back all but the leading `keep` blocks."""
        before = request.outstanding_blocks
        self._pool.drop(request.blocks[keep:])
        del request.blocks[keep:]
        self.outstanding_blocks += request.outstanding_blocks - before

    def free(self, request: Request) -> None:
        """Take back all blocks and what was promised."""
        self.detach(request, 0)
        self.outstanding_blocks -= request.outstanding_blocks
        request.promised_blocks = 0

    def index(self, request: Request) -> None:
        """Index the blocks that have become full.

        Where the same content is indexed already, the request exchanges its own block for that one; but not while a
        step in flight uses its own. Then this and the blocks behind it are left for when the last step has landed.
        """
        for number in range(request.indexed_blocks, request.computed_tokens // request.block_tokens):
            if request.flights and self._pool.find(request.hash_of(number)) not in (None, request.blocks[number]):
                return
            parent = request.blocks[number - 1] if number else NO_BLOCK
            request.blocks[number] = self._pool.index(request.blocks[number], request.hash_of(number), parent)
            request.indexed_blocks = number + 1
