"""The prefix tree that a cache-aware router keeps of what it has routed, for the policy `cache_aware`.

It is told nothing by workers: where a prompt was sent, its blocks are taken to be. Each block of a prompt is a node
that knows which workers it was sent to and when each last was. A trace's block id stands for the block and all before
it, so the ids are the tree: the node of a block is found by its id, and a prompt's path is its list of ids.

Bounded as in the original: from time to time (`shrink`), each worker that has more blocks than it may loses leaves,
those first that were used longest ago. Owned by one policy object; fails never.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


class _Node:
    __slots__ = ("last", "parent", "used")

    def __init__(self, parent: int | None) -> None:
        self.parent = parent
        self.used: dict[str, int] = {}
        """Worker -> when it was last sent here, as a count of insertions."""
        self.last = ""
        """The worker that was."""


class PrefixTree:
    """See the module's docstring."""

    def __init__(self) -> None:
        self._nodes: dict[int, _Node] = {}
        self._blocks: dict[str, int] = {}
        self._now = 0

    def blocks_of(self, worker_id: str) -> int:
        """How many blocks this worker is taken to hold."""
        return self._blocks.get(worker_id, 0)

    def match(self, blocks: Sequence[int]) -> tuple[int, str]:
        """(leading blocks that were sent somewhere, the worker that the last of them was sent to most recently).
        (0, "") where there are none."""
        matched, worker_id = 0, ""
        for block in blocks:
            node = self._nodes.get(block)
            if node is None:
                break
            matched, worker_id = matched + 1, node.last
        return matched, worker_id

    def insert(self, blocks: Sequence[int], worker_id: str) -> None:
        """This prompt is sent to this worker."""
        self._now += 1
        parent: int | None = None
        for block in blocks:
            node = self._nodes.get(block)
            if node is None:
                node = self._nodes[block] = _Node(parent)
            if worker_id not in node.used:
                self._blocks[worker_id] = self.blocks_of(worker_id) + 1
            node.used[worker_id] = self._now
            node.last = worker_id
            parent = block

    def shrink(self, most_blocks: int) -> None:
        """Each worker forgets its least recently used leaves until it has at most so many blocks."""
        for worker_id, count in self._blocks.items():
            if count > most_blocks:
                self._shrink_one(worker_id, count - most_blocks)

    def _shrink_one(self, worker_id: str, too_many: int) -> None:
        children: dict[int, int] = {}
        for node in self._nodes.values():
            if worker_id in node.used and node.parent is not None:
                children[node.parent] = children.get(node.parent, 0) + 1
        leaves = [
            (node.used[worker_id], block)
            for block, node in self._nodes.items()
            if worker_id in node.used and block not in children
        ]
        heapq.heapify(leaves)
        for _ in range(too_many):
            _, block = heapq.heappop(leaves)
            parent = self._forget(block, worker_id)
            if parent is None:
                continue
            children[parent] -= 1
            if not children[parent]:
                heapq.heappush(leaves, (self._nodes[parent].used[worker_id], parent))

    def _forget(self, block: int, worker_id: str) -> int | None:
        """The block's parent."""
        node = self._nodes[block]
        del node.used[worker_id]
        self._blocks[worker_id] -= 1
        if not node.used:
            del self._nodes[block]
        elif node.last == worker_id:
            node.last = max(node.used, key=node.used.__getitem__)
        return node.parent
