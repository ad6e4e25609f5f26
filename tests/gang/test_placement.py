"""Why ranks find no place: a sentence for each way of lacking room."""

from __future__ import annotations

import pytest
from antiphon_engine.gang import NodeRoom, Wanted, why_unschedulable

ROOMY = [NodeRoom("a", 8, 8), NodeRoom("b", 8, 8)]


@pytest.mark.parametrize(
    ("wanted", "nodes"),
    [
        (Wanted(1, 8, "GPU", False), ROOMY),
        (Wanted(2, 8, "GPU", False), ROOMY),
        (Wanted(2, 4, "GPU", False), [NodeRoom("a", 8, 8)]),
        (Wanted(2, 4, "GPU", True), ROOMY),
        (Wanted(3, 2, "GPU", False), [NodeRoom("a", 8, 2), NodeRoom("b", 8, 4)]),
        (Wanted(1, 1, "CPU", True), [NodeRoom("a", 1, 1)]),
        (Wanted(2, 2, "CPU", True), [NodeRoom("several on one machine", 2, 2)] * 2),
    ],
)
def test_where_there_is_room_nothing_is_said(wanted: Wanted, nodes: list[NodeRoom]) -> None:
    assert why_unschedulable(wanted, nodes) is None


def test_a_node_that_is_taken_by_others() -> None:
    wanted = Wanted(2, 4, "GPU", False)
    assert why_unschedulable(wanted, [NodeRoom("a", 8, 6), NodeRoom("b", 8, 1)]) == (
        "stage 1 needs 4 GPU on one node; the node with most (a, one of 2) has 6 free of 8 beside the stages before "
        "it, which leave it 2: free some, or add nodes"
    )


def test_no_node_is_large_enough_however_many_there_are() -> None:
    """Tensor ranks share a node: eight nodes of two devices do not hold a stage of four."""
    nodes = [NodeRoom(f"n{number}", 2, 2) for number in range(8)]
    assert why_unschedulable(Wanted(1, 4, "GPU", False), nodes) == (
        "stage 0 needs 4 GPU on one node; the node with most (n0, one of 8) has 2 free of 2: no node is that large; "
        "choose a smaller tensor size, or larger nodes"
    )


def test_stages_that_are_spread_need_as_many_nodes() -> None:
    sentence = why_unschedulable(Wanted(3, 1, "CPU", True), ROOMY)
    assert sentence is not None
    assert sentence.startswith(
        "stage 2 needs a node of its own with 1 CPU (stages are spread): the cluster has 2 nodes"
    )


def test_a_cluster_without_nodes() -> None:
    sentence = why_unschedulable(Wanted(1, 2, "CPU", False), [])
    assert sentence == "the Ray cluster has no live node; stage 0 needs 2 CPU on one node"


@pytest.mark.parametrize(
    ("wanted", "strategy"),
    [
        (Wanted(1, 4, "GPU", True), "STRICT_PACK"),
        (Wanted(2, 4, "GPU", False), "PACK"),
        (Wanted(2, 4, "GPU", True), "STRICT_SPREAD"),
    ],
)
def test_one_bundle_a_stage(wanted: Wanted, strategy: str) -> None:
    assert wanted.strategy == strategy
    assert wanted.bundles() == [{"GPU": 4.0}] * wanted.stages
