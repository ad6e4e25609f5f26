"""The conditions of a Model: short, true, and with the next step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from antiphon_operator import names
from antiphon_operator.names import Role
from antiphon_operator.plan.clock import moment, stamp
from antiphon_operator.plan.picture import Picture, condition_before
from antiphon_operator.plan.rollout import Stage
from antiphon_operator.plan.scaling_status import scaling_limited
from antiphon_operator.plan.serving import Reach
from antiphon_operator.plan.state import State
from antiphon_operator.plan.transfer import judge_transfer
from antiphon_operator.plan.trouble import SEVERITY, Trouble
from antiphon_operator.plan.verdict import Verdict
from antiphon_operator.resource.reasons import ConditionType, Reason
from antiphon_operator.resource.status import Condition, shortened


def conditions(picture: Picture) -> tuple[Condition, ...]:
    """All of them, in the order of the enum."""
    pools = pools_ready(picture)
    verdicts = {
        ConditionType.READY: ready(picture, pools),
        ConditionType.SOURCE_READY: source_ready(picture),
        ConditionType.POOLS_READY: pools,
        ConditionType.TRANSFER_READY: judge_transfer(
            picture.state, picture.kept, condition_before(picture.state, ConditionType.TRANSFER_READY)
        ),
        ConditionType.GATEWAY_READY: gateway_ready(picture),
        ConditionType.ROLLOUT_COMPLETE: rollout_complete(picture),
        ConditionType.UPDATE_AVAILABLE: update_available(picture),
    }
    limited = scaling_limited(picture.state)
    if limited is not None:
        verdicts[ConditionType.SCALING_LIMITED] = limited
    return with_times(picture.state, verdicts)


def with_times(state: State, verdicts: Mapping[ConditionType, Verdict]) -> tuple[Condition, ...]:
    """A condition keeps its time as long as its status is the same."""
    return tuple(_condition(state, kind, verdicts[kind]) for kind in ConditionType if kind in verdicts)


def _condition(state: State, kind: ConditionType, verdict: Verdict) -> Condition:
    before: Mapping[str, Any] = condition_before(state, kind) or {}
    since = moment(before.get("lastTransitionTime")) if before.get("status") == verdict.status else None
    return Condition(
        type=kind,
        status=verdict.status,
        reason=verdict.reason,
        message=shortened(verdict.message),
        last_transition_time=stamp(since or state.now),
        observed_generation=state.model.generation,
    )


def ready(picture: Picture, pools: Verdict) -> Verdict:
    """Whether a request is answered now."""
    serving, state = picture.serving, picture.state
    if serving.answered:
        if pools.status == "True":
            return Verdict("True", Reason.SERVING, "Requests are answered.")
        return Verdict("True", Reason.DEGRADED, f"Requests are answered. {pools.message}")
    if serving.pairs_ready:
        return _unreached(picture)
    if picture.refused:
        return Verdict("False", Reason.SPEC_REFUSED, picture.refused)
    if not picture.scaling.sizes.wanted["decode"]:
        if state.model.spec.autoscaling.mode == "Enforce":
            return Verdict("False", Reason.SCALED_TO_ZERO, "Nobody asks for it: the next request wakes the Model.")
        return Verdict(
            "False",
            Reason.SCALED_TO_ZERO,
            f"There are no decode replicas, as asked for: kubectl scale -n {state.model.namespace} "
            f"pool/{names.pool_name(state.model.name, 'decode')} --replicas=1 (autoscaling mode External), or set "
            "spec.decode.replicas.",
        )
    if not picture.source.known and not picture.kept:
        return Verdict("False", picture.source.reason, picture.source.message)
    if pools.status == "True":
        return Verdict("False", Reason.NOT_SERVING, "No revision has a ready replica in each of its pools.")
    return Verdict("False", pools.reason, pools.message)


def _unreached(picture: Picture) -> Verdict:
    """Pods are ready; gateways are in the way."""
    serving, state = picture.serving, picture.state
    if serving.reach is Reach.UNKNOWN:
        before = condition_before(state, ConditionType.READY) or {}
        if before.get("status") == "True":
            return Verdict("True", Reason.SERVING, "Requests are answered.")
        return Verdict("False", Reason.WAITING, "The replicas are ready; gateways have not been asked yet.")
    if serving.reach is Reach.NONE_ANSWERS:
        return Verdict("False", Reason.GATEWAY_UNREACHABLE, _unreachable(picture))
    return Verdict(
        "False",
        Reason.SOME_GATEWAYS,
        f"The replicas are ready, but gateways without a stream to a pair of them would refuse requests: "
        f"{', '.join(serving.lacking)}. It takes seconds after a start; else look at their logs and the NetworkPolicy "
        f"{names.network_policy_name(state.model.name)}.",
    )


def _unreachable(picture: Picture) -> str:
    views = picture.state.gateways
    told = "; ".join(views.unreachable) if views is not None else ""
    return f"No gateway answers the operator{': ' + told if told else ''}: kubectl get pods -A -l {_GATEWAY_SELECTOR}."


_GATEWAY_SELECTOR = f"{names.NAME_LABEL}={names.APP},{names.COMPONENT_LABEL}=gateway"


def source_ready(picture: Picture) -> Verdict:
    source = picture.source
    if source.known:
        return Verdict("True", source.reason, source.message)
    return Verdict("Unknown" if source.reason is Reason.WAITING else "False", source.reason, source.message)


def pool_trouble(picture: Picture, role: Role) -> Trouble:
    """Why the pool is as it is."""
    wanted, ready_count = picture.scaling.sizes.wanted.get(role, 0), picture.ready(role)
    findings = picture.findings.get(role)
    worst = findings.worst if findings is not None else None
    if not wanted and not ready_count and worst is None:
        return Trouble(Reason.SCALED_TO_ZERO, "no replicas are wanted")
    if ready_count >= wanted and worst is None:
        return Trouble(Reason.ALL_READY, f"{ready_count} of {wanted} replicas are ready")
    closed = any(closed_role == role for _, closed_role in picture.closed)
    if closed and (worst is None or SEVERITY.index(worst.reason) > SEVERITY.index(Reason.BACKING_OFF)):
        memory = picture.fleet.memories[role]
        at = memory.retry_at(picture.state.model.uid, role)
        said = f"{memory.failures} gangs failed in a row; the next is made at {stamp(at) if at else 'once'}"
        return Trouble(Reason.BACKING_OFF, said)
    if worst is not None:
        return worst
    if not picture.source.known and not picture.kept:
        return Trouble(picture.source.reason, "the weights come first")
    return Trouble(Reason.STARTING, f"{ready_count} of {wanted} replicas are ready, the others are being made")


def pools_ready(picture: Picture) -> Verdict:
    """Both pools have what they should have, of whatever revision."""
    troubles = {pool.role: pool_trouble(picture, pool.role) for pool in picture.state.model.pools}
    counts = ", ".join(f"{role} {picture.ready(role)}/{picture.scaling.sizes.wanted[role]}" for role in troubles)
    good = (Reason.ALL_READY, Reason.SCALED_TO_ZERO)
    short = {role: trouble for role, trouble in troubles.items() if trouble.reason not in good}
    if not short:
        asleep = all(trouble.reason is Reason.SCALED_TO_ZERO for trouble in troubles.values())
        return Verdict("True", Reason.SCALED_TO_ZERO if asleep else Reason.ALL_READY, f"{counts}.")
    order = {reason: index for index, reason in enumerate(SEVERITY)}
    role, worst = min(short.items(), key=lambda item: order.get(item[1].reason, len(order)))
    missing = any(picture.ready(role) < picture.scaling.sizes.wanted[role] for role in troubles)
    # more than enough are ready while a new revision has trouble: that is the rollout's to tell
    if missing:
        return Verdict("False", worst.reason, f"{counts}; {role}: {worst.message}.")
    return Verdict("True", Reason.ALL_READY, f"{counts}.")


def gateway_ready(picture: Picture) -> Verdict:
    """Every gateway knows the Model by all its names and has a stream with a pair of its workers."""
    serving, views = picture.serving, picture.state.gateways
    if picture.naming.lost:
        return Verdict("False", Reason.NAME_CONFLICT, picture.naming.sentence)
    if serving.reach is Reach.NOT_CONFIGURED:
        return Verdict("Unknown", Reason.NOT_CONFIGURED, "The operator was started without --gateway-url.")
    if serving.reach is Reach.UNKNOWN or views is None:
        before: Mapping[str, Any] = condition_before(picture.state, ConditionType.GATEWAY_READY) or {}
        if before.get("reason") == Reason.ALL_GATEWAYS:
            return Verdict(before["status"], Reason.ALL_GATEWAYS, str(before.get("message", "")))
        return Verdict("Unknown", Reason.WAITING, "Gateways have not been asked yet.")
    if serving.reach is Reach.NONE_ANSWERS:
        reason = Reason.GATEWAY_UNREACHABLE if views.unreachable else Reason.NO_GATEWAY
        return Verdict("False", reason, _unreachable(picture))
    if not serving.pairs_ready:
        return Verdict("False", Reason.WAITING, "No pair of replicas is ready, so gateways have none to know.")
    if serving.reach is Reach.SOME_LACK:
        return Verdict(
            "False",
            Reason.SOME_GATEWAYS,
            f"No stream with a pair: {', '.join(serving.lacking)}. See their logs: kubectl logs -A -l "
            f"{_GATEWAY_SELECTOR} --prefix.",
        )
    if views.unreachable:
        return Verdict(
            "False",
            Reason.GATEWAY_UNREACHABLE,
            f"{len(views.views)} gateways have the workers; not answering: {'; '.join(views.unreachable)}.",
        )
    return Verdict("True", Reason.ALL_GATEWAYS, f"{len(views.views)} gateways have a stream with the workers.")


def rollout_complete(picture: Picture) -> Verdict:
    """All replicas are of the revision that the spec asks for, and that stands noted on it: whoever reads this may
    change the spec at once, and what is not noted is not protected."""
    decision, target = picture.decision, picture.target
    if picture.refused:
        return Verdict("False", Reason.SPEC_REFUSED, f"{picture.refused} What ran before goes on running.")
    if target is None:
        return Verdict("False", Reason.WAITING, f"The revision is not known yet. {picture.source.message}")
    name = target.revision.name
    if decision.stage is Stage.FAILED:
        return _gave_up(picture, name)
    if decision.stage in (Stage.STEPPING, Stage.PAUSED):
        return _on_the_way(picture, name)
    if picture.others_alive:
        return Verdict(
            "False", Reason.DRAINING, f"Revision {', '.join(picture.others_alive)} is finishing its requests."
        )
    if picture.scaling.sizes.sets and not picture.state.stands_completed(name):
        return Verdict("False", Reason.STARTING, f"Revision {name} is coming up: {pools_ready(picture).message}")
    return Verdict("True", Reason.COMPLETE, f"All replicas are of revision {name}.{_cost_beforehand(picture)}")


def _gave_up(picture: Picture, name: str) -> Verdict:
    reason, _, message = picture.failed.partition(": ")
    known = Reason(reason) if reason in set(Reason) else Reason.PROGRESS_DEADLINE_EXCEEDED
    model = picture.state.model
    serves = f"revision {picture.base.name} serves" if picture.base is not None else "what was there before serves"
    return Verdict(
        "False",
        known,
        f"Revision {name} was given up after spec.rollout.progressDeadline; {serves}. {message} Change the spec, or "
        f"try again: kubectl annotate -n {model.namespace} controllerrevision "
        f"{names.revision_name(model.name, name)} {names.FAILED_ANNOTATION}-",
    )


def _on_the_way(picture: Picture, name: str) -> Verdict:
    decision, total = picture.decision, picture.scaling.sizes.sets
    told = f"Revision {name}: {decision.ready_sets} of {total} sets are ready, {decision.asked_sets} asked for."
    if decision.sacrificed:
        told += (
            f" surge is 0: {decision.sacrificed} of {total} sets of the old revision go first, so "
            f"{100 * decision.sacrificed // total} % of the capacity is missing meanwhile."
        )
    if decision.stage is Stage.PAUSED:
        return Verdict("False", Reason.PAUSED, f"{told} Paused by spec.rollout.paused: set it to false to go on.")
    worst = min(
        (found.worst for found in picture.findings.values() if found.worst is not None),
        key=lambda trouble: SEVERITY.index(trouble.reason),
        default=None,
    )
    if worst is not None:
        until = f" Given up at {stamp(decision.deadline_at)}." if decision.deadline_at is not None else ""
        return Verdict("False", Reason.IN_PROGRESS, f"{told} {worst.message}.{until}")
    return Verdict("False", Reason.IN_PROGRESS, told)


def _cost_beforehand(picture: Picture) -> str:
    rollout, total = picture.state.model.spec.rollout, picture.scaling.sizes.sets
    if rollout.surge or not total:
        return ""
    gone = min(rollout.max_unavailable, total)
    share = 100 * gone // total
    return f" surge is 0: the next change takes {gone} of {total} sets down first, {share} % of the capacity."


def update_available(picture: Picture) -> Verdict:
    """This operator would render the pods otherwise."""
    target, model, version = picture.target, picture.state.model, picture.state.context.version
    if target is None:
        return Verdict("Unknown", Reason.WAITING, "The revision is not known yet.")
    if not target.outdated:
        return Verdict("False", Reason.UP_TO_DATE, "The pods are as this operator renders them.")
    return Verdict(
        "True",
        Reason.NEW_TEMPLATES,
        f"Revision {target.revision.name} was rendered by version {target.revision.data.rendered_by}; {version} would "
        f"render it otherwise. Nothing was changed. To take it over: kubectl annotate -n {model.namespace} "
        f"model {model.name} {names.UPDATE_ANNOTATION}={version} --overwrite",
    )
