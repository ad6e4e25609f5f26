"""Where a pod fits, and the scheduler's words where it does not."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest

from tests.support.kube.controllers.fitting import Candidate, choose, requests
from tests.support.kube.controllers.quantity import quantity
from tests.support.kube.kubelets.node import NodeShape


def candidate(name: str, *, gpus: int = 0, used: dict[str, str] | None = None, **changes: Any) -> Candidate:
    shape = NodeShape(name, cpu="4", memory="8Gi", extended={"nvidia.com/gpu": gpus} if gpus else {})
    node = shape.manifest()
    node["metadata"]["labels"] |= changes.pop("labels", {})
    node["spec"] |= changes
    return Candidate(node, {key: quantity(value) for key, value in (used or {}).items()})


def pod(**spec: Any) -> dict[str, Any]:
    asked = spec.pop("asked", {})
    return {"spec": {"containers": [{"name": "c", "resources": {"requests": asked}}], **spec}}


@pytest.mark.parametrize(
    ("text", "value"),
    [("250m", "0.25"), ("4", "4"), ("1Gi", "1073741824"), ("1.5k", "1500"), (8, "8"), ("2T", "2000000000000")],
)
def test_quantities_are_exact(text: str | int, value: str) -> None:
    assert quantity(text) == Decimal(value)


def test_a_word_is_no_quantity() -> None:
    with pytest.raises(ValueError, match="no quantity"):
        quantity("4GB")


def test_a_pod_asks_for_the_sum_or_for_its_largest_init_container() -> None:
    asked = pod(asked={"cpu": "1"}, initContainers=[{"resources": {"limits": {"cpu": "3"}}}])
    asked["spec"]["containers"].append({"resources": {"limits": {"nvidia.com/gpu": "2"}}})
    assert requests(asked) == {"cpu": 3, "nvidia.com/gpu": 2, "pods": 1}


def test_the_emptiest_node_that_fits_is_taken() -> None:
    nodes = [
        candidate("a", gpus=8, used={"nvidia.com/gpu": "7", "pods": "1"}),
        candidate("b", gpus=8, used={"pods": "2"}),
    ]
    assert choose(pod(asked={"nvidia.com/gpu": "2"}), nodes).node == "b"
    assert choose(pod(asked={"nvidia.com/gpu": "1"}), nodes).node == "a"


def test_the_words_where_devices_are_short() -> None:
    nodes = [candidate(name, gpus=1) for name in "abc"]
    fit = choose(pod(asked={"nvidia.com/gpu": "2"}), nodes)
    assert fit.node is None
    assert fit.message == (
        "0/3 nodes are available: 3 Insufficient nvidia.com/gpu. "
        "preemption: 0/3 nodes are available: 3 No preemption victims found for incoming pod."
    )


def test_each_reason_is_counted() -> None:
    nodes = [
        candidate("a"),
        candidate("b", unschedulable=True),
        candidate("c", labels={"zone": "two"}),
        candidate("d", labels={"zone": "one"}, taints=[{"key": "k", "value": "v", "effect": "NoSchedule"}]),
        candidate("e", labels={"zone": "one"}, used={"cpu": "3"}),
    ]
    fit = choose(pod(asked={"cpu": "2"}, nodeSelector={"zone": "one"}), nodes)
    assert fit.message.startswith(
        "0/5 nodes are available: 1 Insufficient cpu, 1 node(s) had untolerated taint {k: v}, "
        "1 node(s) were unschedulable, 2 node(s) didn't match Pod's node affinity/selector. preemption: "
    )


def test_no_nodes_at_all() -> None:
    assert choose(pod(), []).message == "no nodes available to schedule pods"


@pytest.mark.parametrize(
    ("operator", "values", "fits"),
    [
        ("In", ["one"], True),
        ("NotIn", ["one"], False),
        ("Exists", [], True),
        ("DoesNotExist", [], False),
    ],
)
def test_node_affinity(operator: str, values: list[str], fits: bool) -> None:
    terms = [{"matchExpressions": [{"key": "zone", "operator": operator, "values": values}]}]
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}
    found = choose(pod(affinity=affinity), [candidate("a", labels={"zone": "one"})]).node
    assert found == ("a" if fits else None)


def test_a_tolerated_taint_keeps_nobody_out() -> None:
    node = candidate("a", taints=[{"key": "k", "value": "v", "effect": "NoSchedule"}])
    assert choose(pod(tolerations=[{"key": "k", "value": "v"}]), [node]).node == "a"
    assert choose(pod(tolerations=[{"operator": "Exists"}]), [node]).node == "a"
    assert choose(pod(tolerations=[{"key": "k", "value": "w"}]), [node]).node is None
