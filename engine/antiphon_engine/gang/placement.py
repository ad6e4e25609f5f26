"""Where ranks go: one Ray placement group, with one bundle for each stage.

A bundle lies on one node whatever the strategy, so the tensor ranks of a stage always share a node and their sums stay
on it; and one group for all stages means that a gang is placed whole or not at all. Stages are packed, or strictly
spread where that is asked for. Ray reports nothing about a group that finds no room: it waits. So why there is no room
is worked out here, from what Ray says of its nodes, by the same rule: a pure function with a sentence for an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

STRICT_PACK = "STRICT_PACK"
PACK = "PACK"
STRICT_SPREAD = "STRICT_SPREAD"


@dataclass(frozen=True, slots=True)
class NodeRoom:
    """A live node's devices of the kind that is wanted."""

    name: str
    total: int
    free: int


@dataclass(frozen=True, slots=True)
class Wanted:
    stages: int
    ranks_per_stage: int
    device: str
    """As Ray calls it: CPU or GPU."""
    spread: bool

    @property
    def strategy(self) -> str:
        if self.stages == 1:
            return STRICT_PACK
        return STRICT_SPREAD if self.spread else PACK

    def bundles(self) -> list[dict[str, float]]:
        return [{self.device: float(self.ranks_per_stage)} for _ in range(self.stages)]


def why_unschedulable(wanted: Wanted, nodes: Sequence[NodeRoom]) -> str | None:
    """Which bundle lacks what, on which nodes. None: there is room for all of them now."""
    need = wanted.ranks_per_stage
    what = f"{need} {wanted.device} on one node"
    if not nodes:
        return f"the Ray cluster has no live node; stage 0 needs {what}"
    # By number: nodes of one machine have one name.
    left = {number: node.free for number, node in enumerate(nodes)}
    for stage in range(wanted.stages):
        # Bundles are all equal, so taking the roomiest node first finds room whenever there is some.
        roomiest = max(left, key=lambda one: left[one], default=None)
        if roomiest is None:
            return (
                f"stage {stage} needs a node of its own with {need} {wanted.device} (stages are spread): "
                f"the cluster has {len(nodes)} nodes for {wanted.stages} stages; add nodes, or do not spread stages"
            )
        if left[roomiest] < need:
            return _lacking(stage, what, wanted, nodes, left)
        if wanted.spread and wanted.stages > 1:
            del left[roomiest]
        else:
            left[roomiest] -= need
    return None


def _lacking(stage: int, what: str, wanted: Wanted, nodes: Sequence[NodeRoom], left: dict[int, int]) -> str:
    number = max(range(len(nodes)), key=lambda one: (left.get(one, -1), nodes[one].total))
    best = nodes[number]
    largest = max(node.total for node in nodes)
    others = number in left and left[number] < best.free
    beside = f" beside the stages before it, which leave it {left[number]}" if others else ""
    sentence = (
        f"stage {stage} needs {what}; the node with most ({best.name}, one of {len(nodes)}) "
        f"has {best.free} free of {best.total}{beside}"
    )
    if largest < wanted.ranks_per_stage:
        return f"{sentence}: no node is that large; choose a smaller tensor size, or larger nodes"
    return f"{sentence}: free some, or add nodes"
