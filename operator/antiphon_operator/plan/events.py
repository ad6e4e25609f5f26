"""Kubernetes Events about the Model: told once, in the look in which something turns."""

from __future__ import annotations

from antiphon_operator.plan.picture import Picture, first_time
from antiphon_operator.plan.planned import Announce
from antiphon_operator.plan.rollout import Stage
from antiphon_operator.plan.scaling_status import scaled
from antiphon_operator.resource.reasons import ConditionType, Reason


def announcements(picture: Picture) -> tuple[Announce, ...]:
    """What is news in this look."""
    found: list[Announce] = []
    decision, target, state = picture.decision, picture.target, picture.state
    name = target.revision.name if target is not None else ""
    if picture.refused and first_time(state, ConditionType.ROLLOUT_COMPLETE, Reason.SPEC_REFUSED):
        found.append(Announce("Warning", "SpecRefused", picture.refused))
    if picture.naming.lost and first_time(state, ConditionType.GATEWAY_READY, Reason.NAME_CONFLICT):
        found.append(Announce("Warning", "NameConflict", picture.naming.sentence))
    if target is not None and target.revision.stored is None:
        found.append(Announce("Normal", "RevisionMade", f"Revision {name} was rendered from the spec."))
    before = state.revisions.get(name)
    began = decision.stage is Stage.STEPPING and (before is None or before.step is None)
    if began and picture.others_alive:
        found.append(_began(picture, name))
    if decision.fails_now:
        found.append(Announce("Warning", "RolloutFailed", f"Revision {name} is given up. {picture.failed}"))
    if picture.completes_now:
        found.append(Announce("Normal", "RolloutComplete", f"All replicas are of revision {name}."))
    found += scaled(state)
    for replica in picture.fleet.deleted:
        if replica.lost:
            found.append(
                Announce("Warning", "NodeLost", f"{replica.name} was on a lost node: another replica takes its place.")
            )
        elif replica.name in picture.gangs.broken:
            why = picture.gangs.broken[replica.name]
            found.append(Announce("Warning", "GangIncomplete", f"{replica.name} is taken down whole: {why}."))
    return tuple(found)


def _began(picture: Picture, name: str) -> Announce:
    decision, total = picture.decision, picture.scaling.sizes.sets
    if not decision.sacrificed:
        return Announce("Normal", "RolloutStarted", f"Revision {name} comes up in {total} sets beside the old.")
    share = 100 * decision.sacrificed // total
    return Announce(
        "Warning",
        "RolloutStarted",
        f"surge is 0: {decision.sacrificed} of {total} sets go before revision {name} comes up, so {share} % of the "
        "capacity is missing until the rollout is over.",
    )
