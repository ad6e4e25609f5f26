"""One look at a Model, read once: replicas, revisions, memories, what gateways see."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

import msgspec

from antiphon_operator import names
from antiphon_operator.names import ROLES, Role
from antiphon_operator.options import OperatorContext
from antiphon_operator.plan.memory import PoolMemory, read_pool_memory
from antiphon_operator.plan.observed import GatewayViews, Observed
from antiphon_operator.plan.pods import Pod, read_pod
from antiphon_operator.plan.replicas import Replica, read_replicas
from antiphon_operator.plan.revisions import Revision, by_completion, read_revisions
from antiphon_operator.plan.rollout import Strength
from antiphon_operator.resource.effective import EffectiveModel

GATEWAYS_STALE_S = 15.0
"""What gateways said longer ago than this is not known any more."""


@dataclass(frozen=True, slots=True)
class State:
    """See the module's docstring."""

    model: EffectiveModel
    observed: Observed
    context: OperatorContext
    now: datetime
    pods: tuple[Pod, ...]
    replicas: tuple[Replica, ...]
    revisions: Mapping[str, Revision]
    unreadable: tuple[str, ...]
    """Why some ControllerRevisions cannot be read."""
    memories: Mapping[Role, PoolMemory]

    @property
    def gateways(self) -> GatewayViews | None:
        """What gateways say, if that is known and not too old."""
        views = self.observed.gateways
        if views is None or self.now - views.asked_at > timedelta(seconds=GATEWAYS_STALE_S):
            return None
        return views

    @property
    def gateways_answer(self) -> bool:
        return not self.context.gateway_configured or (self.gateways is not None and bool(self.gateways.views))

    @property
    def completed(self) -> Revision | None:
        """The revision that was all there was last."""
        return next(iter(by_completion(self.revisions)), None)

    def stands_completed(self, revision: str) -> bool:
        """It stands noted that this revision was all there was last."""
        return self.completed is not None and self.completed.name == revision

    @property
    def had_workers(self) -> bool:
        return bool(self.revisions or self.replicas)

    def seen(self, revision: str, role: Role) -> int | None:
        """Workers of the revision that every reachable gateway has a stream with. None: all, as no gateway counts."""
        if not self.context.gateway_configured:
            return None
        views = self.gateways
        if views is None or not views.views:
            return 0
        return min((view.prefill if role == "prefill" else view.decode).get(revision, 0) for view in views.views)


def read_state(model: EffectiveModel, observed: Observed, context: OperatorContext, now: datetime) -> State:
    """See the module's docstring."""
    pods = tuple(read_pod(pod) for pod in observed.pods)
    revisions, unreadable = read_revisions(model, observed.children)
    sizes: dict[tuple[str, str], int] = {
        (name, role): pool.pods for name, revision in revisions.items() for role, pool in revision.data.pools.items()
    }
    replicas = read_replicas(observed.children, pods, observed.lost_nodes, sizes)
    return State(
        model=model,
        observed=observed,
        context=context,
        now=now,
        pods=pods,
        replicas=replicas,
        revisions=revisions,
        unreadable=unreadable,
        memories=_memories(model, observed, replicas),
    )


def _memories(model: EffectiveModel, observed: Observed, replicas: tuple[Replica, ...]) -> dict[Role, PoolMemory]:
    """By role. Ordinals are counted for the Model as a whole, and each Pool keeps the count: a pool may come and go."""
    found: dict[Role, PoolMemory] = {}
    pools = {child["metadata"]["name"]: child for child in observed.children if child["kind"] == "Pool"}
    for role in ROLES:
        stored = pools.get(names.pool_name(model.name, role))
        annotations = (stored["metadata"].get("annotations") or {}) if stored else {}
        found[role] = read_pool_memory(annotations.get(names.MEMORY_ANNOTATION))
    remembered = (memory.next_ordinal for memory in found.values())
    first = max([*remembered, *(replica.ordinal + 1 for replica in replicas)], default=0)
    return {role: msgspec.structs.replace(memory, next_ordinal=first) for role, memory in found.items()}


def strengths(state: State, replicas: Iterable[Replica], broken: Mapping[str, str]) -> dict[str, Strength]:
    """How strong each revision is, in the order of the revisions. `broken` replicas count for nothing."""
    replicas = tuple(replicas)
    order = [*state.revisions, *sorted({replica.revision for replica in replicas} - set(state.revisions))]
    return {name: _strength(state, name, replicas, broken) for name in order}


def _strength(state: State, name: str, replicas: tuple[Replica, ...], broken: Mapping[str, str]) -> Strength:
    own = [replica for replica in replicas if replica.revision == name]
    standing = [replica for replica in own if replica.name not in broken]
    live, ready, alive, seen, returning = {}, {}, {}, {}, {}
    for role in ROLES:
        of_role = [replica for replica in standing if replica.role == role]
        if not of_role:
            continue
        alive[role] = sum(replica.alive for replica in of_role)
        live[role] = sum(replica.live for replica in of_role)
        ready[role] = sum(replica.live and replica.ready for replica in of_role)
        returning[role] = sum(replica.alive and not replica.live and replica.ready for replica in of_role)
        by_gateways = state.seen(name, role)
        seen[role] = ready[role] if by_gateways is None else min(ready[role], by_gateways)
    return Strength(live=live, ready=ready, seen=seen, alive=alive, returning=returning, known=bool(own))
