"""What the next look should show beside the caches, and when it should be."""

from __future__ import annotations

from antiphon_operator.plan.picture import Picture
from antiphon_operator.plan.planned import Wants
from antiphon_operator.plan.rollout import Stage
from antiphon_operator.plan.serving import Reach
from antiphon_operator.plan.transfer import next_turn_at, wanted_pages

_CALM_S = 30.0
_STEPPING_S = 5.0
_GATEWAYS_S = 2.0
_SOONEST_S = 0.5


def wants(picture: Picture) -> Wants:
    """Draining workers are asked whether they are idle; pods in trouble are looked into; gateways are always asked."""
    draining = {
        replica.worker
        for replica in picture.kept
        if replica.alive and replica.draining_since is not None and replica.has_requests
    }
    return Wants(
        events_of=frozenset[str]().union(*(found.events_of for found in picture.findings.values())),
        log_of=frozenset[str]().union(*(found.log_of for found in picture.findings.values())),
        workers=frozenset(draining).union(
            wanted_pages(picture.state, picture.kept), *(found.pages_of for found in picture.findings.values())
        ),
        gateways=picture.state.context.gateway_configured,
    )


def check_after_s(picture: Picture) -> float:
    """The soonest of all that passes by itself. Gateways' answers wake by themselves when they change; that they grow
    stale does not."""
    state, times = picture.state, []
    calm_s = _CALM_S
    if picture.decision.stage in (Stage.STEPPING, Stage.FAILED):
        calm_s = _STEPPING_S
    if state.context.gateway_configured and picture.serving.reach in (Reach.UNKNOWN, Reach.NONE_ANSWERS):
        calm_s = _GATEWAYS_S
    if wanted_pages(state, picture.kept):
        calm_s = min(calm_s, _STEPPING_S)
    if picture.completes_now:
        # It is told complete once that stands noted, which nothing else wakes for.
        calm_s = _SOONEST_S
    times += [picture.fleet.next_at, picture.gangs.next_deadline, picture.decision.deadline_at, picture.source.retry_at]
    times += [memory.retry_at(state.model.uid, role) for role, memory in picture.fleet.memories.items()]
    if not state.model.aggregated and picture.ready("decode"):
        times.append(next_turn_at(state))
    ahead = [(at - state.now).total_seconds() for at in times if at is not None and at > state.now]
    return max(_SOONEST_S, min([calm_s, *ahead]))
