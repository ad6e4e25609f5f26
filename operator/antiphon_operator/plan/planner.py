"""`plan(observed, context, now)`: what should be, from what is. Pure, level-triggered, the same at every call.

    names ▸ source ▸ target revision ▸ sizes ▸ gangs ▸ rollout ▸ fleet ▸ objects, record, status, what to look at next

Each step is a module of its own and tells the next one a record. Nothing is remembered here: see `memory`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime

from antiphon_operator import names
from antiphon_operator.names import ROLES, Role
from antiphon_operator.options import OperatorContext
from antiphon_operator.plan import objects
from antiphon_operator.plan.conditions import with_times
from antiphon_operator.plan.events import announcements
from antiphon_operator.plan.fleet import FleetInput, arrange
from antiphon_operator.plan.gangs import GangVerdict, judge_gangs
from antiphon_operator.plan.looking import check_after_s, wants
from antiphon_operator.plan.naming import NameVerdict, judge_names
from antiphon_operator.plan.observed import Observed
from antiphon_operator.plan.picture import Picture, first_time
from antiphon_operator.plan.planned import Announce, Apply, Delete, Plan, RedisAccess
from antiphon_operator.plan.record import Coming, make_record
from antiphon_operator.plan.refusal import Admission, admit
from antiphon_operator.plan.revisions import Revision, by_completion
from antiphon_operator.plan.rollout import Decision, RolloutInput, Stage, Strength, decide
from antiphon_operator.plan.scaled import scaled_model
from antiphon_operator.plan.scaling import Scaling, scale
from antiphon_operator.plan.serving import judge_serving
from antiphon_operator.plan.source import SourceLook, look_at_source
from antiphon_operator.plan.state import State, read_state, strengths
from antiphon_operator.plan.status import model_status, pool_statuses, refused_status
from antiphon_operator.plan.target import Target, find_base, find_target
from antiphon_operator.plan.trouble import Trouble, find_trouble
from antiphon_operator.plan.verdict import Verdict
from antiphon_operator.resource.durations import parse_duration_s
from antiphon_operator.resource.reasons import ConditionType, Reason

_KEPT_COMPLETED = 2
"""The revision that was all there was last, and the one before it, for going back."""


def plan(observed: Observed, context: OperatorContext, now: datetime) -> Plan:
    """See the module's docstring. Raises nothing for what a person may have written."""
    now = now.replace(microsecond=0)
    admission = admit(observed.model)
    if admission.model is None or observed.model["metadata"].get("deletionTimestamp"):
        return _nothing(observed, admission, now)
    state = read_state(admission.model, observed, context, now)
    naming = judge_names(admission.model, observed)
    if naming.lost and not state.had_workers:
        return _without_workers(state, Verdict("False", Reason.NAME_CONFLICT, naming.sentence))
    if admission.refused and not state.had_workers:
        return _without_workers(state, Verdict("False", Reason.SPEC_REFUSED, admission.refused))
    return _planned(state, admission, naming)


def _nothing(observed: Observed, admission: Admission, now: datetime) -> Plan:
    """Of a Model that cannot be read, and one that is being deleted: all stays as it is."""
    status = dict(observed.model.get("status") or {})
    if admission.refused:
        status |= admission.status(observed.model, now)
    return Plan(applies=(), deletes=(), status=status, pool_status={}, record=None, redis=None)


def _without_workers(state: State, verdict: Verdict) -> Plan:
    """The Model must not start: it gets no child at all."""
    kinds = {ConditionType.READY: verdict}
    if verdict.reason is Reason.NAME_CONFLICT:
        kinds[ConditionType.GATEWAY_READY] = verdict
    events: tuple[Announce, ...] = ()
    if first_time(state, ConditionType.READY, verdict.reason):
        word = "NameConflict" if verdict.reason is Reason.NAME_CONFLICT else "SpecRefused"
        events = (Announce("Warning", word, verdict.message),)
    status = refused_status(state, with_times(state, kinds))
    return Plan(applies=(), deletes=(), status=status, pool_status={}, record=None, redis=None, events=events)


@dataclass(frozen=True, slots=True)
class _Choice:
    """Which revisions there should be, and how they stand."""

    target: Target | None
    base: Revision | None
    strengths: Mapping[str, Strength]
    decision: Decision


def _planned(state: State, admission: Admission, naming: NameVerdict) -> Plan:
    source = _source(state, admission)
    rollout = state.model.spec.rollout
    gangs = judge_gangs(state.replicas, state.memories, parse_duration_s(rollout.progress_deadline), state.now)
    live: dict[Role, int] = {
        role: sum(replica.live for replica in state.replicas if replica.role == role) for role in ROLES
    }
    scaling = scale(state.model, state.observed, live, state.memories)
    choice = _choose(state, source, gangs, scaling)
    revisions = _noted(state, choice)
    closed = _closed(state, revisions, gangs)
    fleet = arrange(
        FleetInput(
            replicas=state.replicas,
            wanted=choice.decision.wanted,
            broken=gangs.broken,
            workers=state.observed.workers,
            memories=gangs.memories,
            closed=closed,
            drain_reason="scale-down" if choice.decision.stage is Stage.SETTLED else "rollout",
            drain_timeout_s=parse_duration_s(rollout.drain_timeout),
            now=state.now,
            lost_ms=state.observed.autoscaler.lost_ms if state.observed.autoscaler is not None else {},
        )
    )
    accelerator, namespace = state.model.accelerator, state.model.namespace
    findings = {
        role: find_trouble(
            [
                replica
                for replica in (*fleet.kept, *fleet.deleted)
                if replica.role == role and (replica.lost or (replica.live and replica not in fleet.deleted))
            ],
            state.observed,
            accelerator,
            namespace,
        )
        for role in ROLES
    }
    target = choice.target
    if target is not None:
        target = dataclasses.replace(target, revision=revisions[target.revision.name])
    picture = Picture(
        state=state,
        refused=admission.refused,
        naming=naming,
        source=source,
        target=target,
        base=choice.base,
        scaling=scaling,
        decision=choice.decision,
        gangs=gangs,
        fleet=fleet,
        closed=closed,
        findings=findings,
        serving=judge_serving(state, scaling.sizes, fleet.kept),
    )
    applies, deletes = _objects(picture, revisions)
    coming = None
    if target is not None and choice.decision.stage is not Stage.SETTLED:
        coming = Coming(target.revision.name, choice.decision.ready_sets)
    return Plan(
        applies=tuple(applies),
        deletes=tuple(deletes),
        status=model_status(picture),
        pool_status=pool_statuses(picture),
        record=make_record(state, naming.owned, scaling.sizes, fleet.kept, fleet.deleted, coming=coming),
        redis=_redis(state),
        gang_secret=_gang_secret(state, revisions.values()),
        scaled=scaled_model(picture),
        events=announcements(picture),
        wants=wants(picture),
        check_after_s=check_after_s(picture),
    )


def _source(state: State, admission: Admission) -> SourceLook:
    if admission.refused:
        return SourceLook(False, None, "", Reason.WAITING, "The spec is refused, so nothing is looked for.")
    return look_at_source(state.model, state.observed, state.pods, state.revisions, state.context, state.now)


def _choose(state: State, source: SourceLook, gangs: GangVerdict, scaling: Scaling) -> _Choice:
    target = find_target(state, source)
    name = target.revision.name if target is not None else None
    strong = strengths(state, state.replicas, gangs.broken)
    base = find_base(state, name, strong)
    rollout = state.model.spec.rollout
    decision = decide(
        RolloutInput(
            target=name,
            base=base.name if base is not None else None,
            base_roles=base.roles if base is not None else (),
            base_completed=base is not None and base.completed is not None,
            sizes=scaling.sizes,
            strengths=strong,
            step=target.revision.step if target is not None else None,
            failed=target is not None and bool(target.revision.failed),
            paused=rollout.paused,
            surge=rollout.surge,
            max_unavailable=rollout.max_unavailable,
            deadline_s=parse_duration_s(rollout.progress_deadline),
            gateways_answer=state.gateways_answer,
            now=state.now,
        )
    )
    return _Choice(target, base, strong, decision)


def _noted(state: State, choice: _Choice) -> dict[str, Revision]:
    """The revisions to keep, with their notes."""
    decision = choice.decision
    if choice.target is None:
        return dict(state.revisions)
    target = choice.target.revision
    failed = ""
    if decision.fails_now:
        failed = _failure(state, target.name)
    elif target.failed and (decision.stage is Stage.FAILED or not decision.wanted):
        failed = target.failed
    completed = target.completed
    if decision.completes and not state.stands_completed(target.name):
        completed = state.now
    noted = {
        name: revision.with_notes(completed=revision.completed, failed="", step=None)
        for name, revision in state.revisions.items()
    }
    noted[target.name] = target.with_notes(completed=completed, failed=failed, step=decision.step)
    with_replicas = {replica.revision for replica in state.replicas} | set(decision.wanted)
    kept = {target.name} | {revision.name for revision in by_completion(noted)[:_KEPT_COMPLETED]} | with_replicas
    return {name: revision for name, revision in noted.items() if name in kept}


def _failure(state: State, revision: str) -> str:
    """Why the step could not be made, as it is noted on the revision."""
    own = [replica for replica in state.replicas if replica.revision == revision and replica.live]
    worst = find_trouble(own, state.observed, state.model.accelerator, state.model.namespace).worst
    if worst is None:
        worst = Trouble(
            Reason.PROGRESS_DEADLINE_EXCEEDED,
            "its replicas were ready, but not every gateway had a stream with them"
            if own
            else "its replicas could not be made",
        )
    elif worst.reason is Reason.STARTING:
        worst = Trouble(Reason.PROGRESS_DEADLINE_EXCEEDED, worst.message)
    return f"{worst.reason}: {worst.message}."


def _closed(state: State, revisions: Mapping[str, Revision], gangs: GangVerdict) -> frozenset[tuple[str, Role]]:
    """Gangs of which no new one is made before a back-off has passed."""
    found = set()
    for role, memory in gangs.memories.items():
        retry_at = memory.retry_at(state.model.uid, role)
        if retry_at is not None and retry_at > state.now:
            for name, revision in revisions.items():
                if role in revision.data.pools and revision.data.pools[role].pods > 1:
                    found.add((name, role))
    return frozenset(found)


def _objects(picture: Picture, revisions: Mapping[str, Revision]) -> tuple[list[Apply], list[Delete]]:
    state, fleet = picture.state, picture.fleet
    applies = objects.surroundings(state)
    applies += objects.pools(state, picture.scaling.applied, picture.scaling.noted(fleet.memories))
    applies += picture.source.applies
    applies += [Apply(revision.annotated(), create_only=True) for revision in revisions.values()]
    for replica in fleet.kept:
        if not replica.going:
            whole = picture.gangs.whole.get(replica.name, replica.whole)
            applies.append(objects.standing(state, replica, whole, revisions.get(replica.revision)))
    for birth in fleet.births:
        applies.append(objects.born(state, birth, revisions[birth.revision]))
    deletes = [objects.removed(replica) for replica in fleet.deleted]
    deletes += picture.source.deletes
    deletes += objects.unwanted(state, applies, revisions)
    return applies, _unique(deletes)


def _unique(deletes: Iterable[Delete]) -> list[Delete]:
    return list({delete.uid: delete for delete in deletes}.values())


def _gang_secret(state: State, revisions: Iterable[Revision]) -> str | None:
    shapes = [pool.pods for pool in state.model.pools]
    shapes += [pool.pods for revision in revisions for pool in revision.data.pools.values()]
    return names.ray_secret_name(state.model.name) if max(shapes) > 1 else None


def _redis(state: State) -> RedisAccess | None:
    if not state.context.redis_configured:
        return None
    model, annotations = state.model, state.observed.model["metadata"].get("annotations") or {}
    return RedisAccess(
        user=names.redis_user(model.namespace, model.name),
        secret_name=names.redis_secret_name(model.name),
        rotation=str(annotations.get(names.ROTATE_ANNOTATION, "")),
    )
