"""The model record: what gateways are told. See `antiphon_kvtransfer.model_record` for what each field means."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from antiphon_kvtransfer.model_record import ModelRecord

from antiphon_operator.names import REPLICA_LABEL, Role
from antiphon_operator.plan.clock import moment
from antiphon_operator.plan.replicas import Replica
from antiphon_operator.plan.scaling import Sizes
from antiphon_operator.plan.state import State
from antiphon_operator.resource.durations import parse_duration_ms

_RETRY_STARTING_S = 10
_RETRY_ASLEEP_S = 60


@dataclass(frozen=True, slots=True)
class Coming:
    """The revision that is rolling out: it gets requests only for its sets that are whole and known to gateways."""

    revision: str
    ready_sets: int


def make_record(
    state: State,
    names: tuple[str, ...],
    sizes: Sizes,
    replicas: Iterable[Replica],
    going: Iterable[Replica],
    *,
    coming: Coming | None,
) -> ModelRecord:
    """`names`: those that this Model owns. `going`: replicas that are being deleted."""
    replicas = tuple(replicas)
    weights = _weights(state, sizes, replicas, coming)
    draining = {replica.worker for replica in replicas if not replica.live} | {replica.worker for replica in going}
    draining |= _left_behind(state)
    spec = state.model.spec
    wanted = sum(sizes.wanted.values())
    woken = spec.autoscaling.mode in ("Enforce", "External")
    return ModelRecord(
        model=state.model.key,
        generation=state.model.generation,
        names=names,
        revisions=weights,
        draining=tuple(sorted(draining)),
        ttft_p95_ms=_ms(spec.sla.ttft.p95),
        ttft_per_thousand_tokens_ms=_ms(spec.sla.ttft.per_thousand_tokens) or 0.0,
        tpot_p95_ms=_ms(spec.sla.tpot.p95),
        max_context_tokens=spec.max_context_tokens or 0,
        isolation=spec.kv_cache.isolation,
        retry_after_s=_RETRY_STARTING_S if wanted else _RETRY_ASLEEP_S,
        waking=not any(weights.values()) and (wanted > 0 or woken),
        created_at_ms=_created_at_ms(state),
    )


def _created_at_ms(state: State) -> int:
    """So that gateways give a name that two Models claim to the older one, as the operator does."""
    created = moment(state.observed.model["metadata"].get("creationTimestamp"))
    return 0 if created is None else int(created.timestamp() * 1000)


def _left_behind(state: State) -> set[str]:
    """Workers whose StatefulSet is gone but whose pod is not: on a lost node it may stay Terminating for ever."""
    known = {replica.uid for replica in state.replicas}
    return {
        pod.name
        for pod in state.pods
        if pod.terminating
        and pod.owner_uid not in known
        and pod.name.endswith("-0")
        and REPLICA_LABEL in (pod.raw["metadata"].get("labels") or {})
    }


def _ms(duration: str | None) -> float | None:
    return None if duration is None else float(parse_duration_ms(duration))


def _weights(state: State, sizes: Sizes, replicas: tuple[Replica, ...], coming: Coming | None) -> dict[str, int]:
    """Ready capacity in thousandths of the wanted size: that of the weaker pool, as requests need both."""
    found: dict[str, int] = {}
    for revision in sorted({replica.revision for replica in replicas}):
        own = [replica for replica in replicas if replica.revision == revision]
        ready: dict[Role, int] = {}
        for replica in own:
            ready[replica.role] = ready.get(replica.role, 0) + (replica.live and replica.ready)
        known = state.revisions.get(revision)
        roles = known.roles if known is not None else tuple(ready)
        if coming is not None and revision == coming.revision:
            ready = sizes.of_sets(coming.ready_sets)
        weight = _weight(roles, ready, sizes.wanted)
        if weight or any(replica.live for replica in own):
            found[revision] = weight
    return found


def _weight(roles: tuple[Role, ...], ready: Mapping[Role, int], wanted: Mapping[Role, int]) -> int:
    shares = []
    for role in roles:
        count, size = ready.get(role, 0), wanted.get(role)
        if size is None:
            # the new sizes have no such pool: it matters only whether there is one
            shares.append(1000 if count else 0)
        elif size:
            shares.append(min(1000, max(1 if count else 0, 1000 * count // size)))
        elif role == "decode":
            shares.append(0)
    return min(shares, default=0)
