"""Where a Model's pods may and should run.

Closeness (`placement.sameTopology`) is a preference, never a rule: a required pod affinity would leave the second
set of a rollout, or a pool that has grown out of its rack, Pending for ever, while KV blocks still move between racks,
only slower. A gang's own pods pull at each other twice as hard as the rest of the Model does. Who wants a rule gives
`affinity` in `podTemplate`, which replaces this one.
"""

from __future__ import annotations

from collections.abc import Sequence

from antiphon_operator import names
from antiphon_operator.render.metadata import Manifest, worker_selector
from antiphon_operator.resource.effective import EffectiveModel, EffectivePool

LOST_NODE_S = 30
"""A pod on a node that is not reachable is given up after this, not after the cluster's five minutes."""


def tolerations() -> list[Manifest]:
    return [
        {
            "key": f"node.kubernetes.io/{trouble}",
            "operator": "Exists",
            "effect": "NoExecute",
            "tolerationSeconds": LOST_NODE_S,
        }
        for trouble in ("not-ready", "unreachable")
    ]


def with_lost_node_tolerations(given: Sequence[Manifest]) -> list[Manifest]:
    """`given`, and ours for the taints that it does not speak of."""
    spoken_of = {(one.get("key"), effect) for one in given for effect in (one.get("effect") or "NoExecute",)}
    return [*given, *(one for one in tolerations() if (one["key"], one["effect"]) not in spoken_of)]


def _near(topology: str, weight: int, selector: dict[str, str]) -> Manifest:
    term = {"topologyKey": topology, "labelSelector": {"matchLabels": selector}}
    return {"weight": weight, "podAffinityTerm": term}


def affinity(model: EffectiveModel, pool: EffectivePool, revision: str) -> Manifest | None:
    """Pods of one Model together; the replica label is a slot that `replica.py` fills."""
    topology = model.spec.placement.same_topology
    if not topology:
        return None
    terms = [_near(topology, 50, worker_selector(model))]
    if pool.pods > 1:
        gang = {names.REVISION_LABEL: revision, names.REPLICA_LABEL: ""}
        terms.insert(0, _near(topology, 100, worker_selector(model, pool.role) | gang))
    return {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": terms}}
