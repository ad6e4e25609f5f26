"""How one revision takes over from another: a machine of sets, without history.

    S sets are wanted; the new revision has been asked for `asked` of them, `proven` were ready once.

    new    asked <= S + surge - (sets that other replicas still take up), raised only when all asked for are ready
    old    kept   = S - min(proven, ready now) - (sets that may be missing)
           refilled up to S - proven - (sets that may be missing), should one be lost meanwhile

Between `kept` and `refilled` nothing happens, so that a replica which is unready for a moment moves nothing. What must
be remembered (`Step`) stands on the new revision's ControllerRevision. A step that is not ready by its deadline fails
the revision: what is ready of it in whole sets stays, the rest goes, and the protected revision fills up what is
missing. A revision that fails is not tried again until it is no longer the wanted one.

*Base* is the revision to fall back to: the last one that was all there was, else the one with most ready sets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import Enum, auto

from antiphon_operator.names import Role
from antiphon_operator.plan.clock import moment, stamp
from antiphon_operator.plan.memory import Step
from antiphon_operator.plan.scaling import Sizes

Counts = Mapping[Role, int]


@dataclass(frozen=True, slots=True)
class Strength:
    """Replicas of one revision, by role."""

    live: Counts = field(default_factory=dict)
    """Not going, not on lost nodes, not draining."""
    ready: Counts = field(default_factory=dict)
    """Of those, with all pods ready."""
    seen: Counts = field(default_factory=dict)
    """Of those, as many as every reachable gateway has a stream with."""
    alive: Counts = field(default_factory=dict)
    """The live ones and those that drain: they take up room."""
    returning: Counts = field(default_factory=dict)
    """Of those that drain, the ready ones: they can be taken back."""
    known: bool = False
    """There are replicas of it at all, even lost ones."""


@dataclass(frozen=True, slots=True)
class RolloutInput:
    """See the module's docstring. `strengths` by revision; `base` is never the target."""

    target: str | None
    base: str | None
    base_roles: tuple[Role, ...]
    base_completed: bool
    sizes: Sizes
    strengths: Mapping[str, Strength]
    step: Step | None
    failed: bool
    paused: bool
    surge: int
    max_unavailable: int
    deadline_s: float
    gateways_answer: bool
    """Some gateway answered, or none is configured: what is not seen then is really not there."""
    now: datetime


class Stage(Enum):
    """Where the rollout stands."""

    SETTLED = auto()
    """Nothing rolls out: there is one revision, or none yet."""
    HELD = auto()
    """There is no target yet: what runs is kept."""
    STEPPING = auto()
    PAUSED = auto()
    FAILED = auto()


@dataclass(frozen=True, slots=True)
class Decision:
    """What should be: replicas by revision and role. A revision that is not named gets none."""

    stage: Stage
    wanted: Mapping[str, Mapping[Role, int]]
    step: Step | None = None
    fails_now: bool = False
    completes: bool = False
    """The target is all there is, and ready."""
    deadline_at: datetime | None = None
    sacrificed: int = 0
    """Sets of the old revision that go before new ones come."""
    asked_sets: int = 0
    ready_sets: int = 0


def _sets(counts: Counts, unit: Counts) -> int:
    """Whole sets."""
    return min((counts.get(role, 0) // size for role, size in unit.items() if size), default=0)


def _sets_touched(counts: Counts, unit: Counts) -> int:
    """Sets, counting those that are not whole, and replicas of roles that no set has."""
    touched = [-(-count // unit[role]) if unit.get(role) else (1 if count else 0) for role, count in counts.items()]
    return max(touched, default=0)


def decide(rollout: RolloutInput) -> Decision:
    """See the module's docstring."""
    if rollout.target is None:
        return _hold(rollout)
    if not rollout.sizes.sets:
        return Decision(Stage.SETTLED, {})
    others = {name: s for name, s in rollout.strengths.items() if name != rollout.target}
    has_others = any(sum(strength.live.values()) for strength in others.values())
    if rollout.failed and rollout.base is not None:
        return _after_failure(rollout, others)
    if not has_others and rollout.base is None:
        return _alone(rollout)
    return _advance(rollout, others)


def _hold(rollout: RolloutInput) -> Decision:
    wanted: dict[str, dict[Role, int]] = {name: dict(s.live) for name, s in rollout.strengths.items()}
    if rollout.base is not None:
        others = [s for name, s in rollout.strengths.items() if name != rollout.base]
        wanted[rollout.base] = {
            role: max(0, count - sum(s.ready.get(role, 0) for s in others))
            for role, count in rollout.sizes.wanted.items()
            if role in rollout.base_roles
        }
    return Decision(Stage.HELD, wanted)


def _alone(rollout: RolloutInput) -> Decision:
    assert rollout.target is not None
    own = rollout.strengths.get(rollout.target, Strength())
    wanted = dict(rollout.sizes.wanted)
    complete = all(own.ready.get(role, 0) >= count for role, count in wanted.items())
    return Decision(Stage.SETTLED, {rollout.target: wanted}, completes=complete)


def _after_failure(rollout: RolloutInput, others: Mapping[str, Strength]) -> Decision:
    """Whole ready sets of the failed revision stay; the base fills up the rest."""
    assert rollout.target is not None
    own = rollout.strengths.get(rollout.target, Strength())
    kept = min(rollout.sizes.sets, _sets(own.ready, rollout.sizes.unit))
    rest = rollout.sizes.sets - kept
    wanted = _old(rollout, others, keep=rest, refill=rest, refills=True)
    wanted[rollout.target] = _kept_of_failed(rollout, own, kept)
    return Decision(Stage.FAILED, wanted, ready_sets=kept)


def _kept_of_failed(rollout: RolloutInput, own: Strength, kept: int) -> dict[Role, int]:
    """Whole sets; and where sizes have changed since, single ready ones for as long as the base lacks as many."""
    base = rollout.strengths.get(rollout.base or "", Strength())
    found = rollout.sizes.of_sets(kept)
    for role, count in rollout.sizes.wanted.items():
        lacking = count - found[role] - base.ready.get(role, 0)
        found[role] += max(0, min(own.ready.get(role, 0) - found[role], lacking))
    return found


def _advance(rollout: RolloutInput, others: Mapping[str, Strength]) -> Decision:
    assert rollout.target is not None
    total, unit, step = rollout.sizes.sets, rollout.sizes.unit, rollout.step
    own = rollout.strengths.get(rollout.target, Strength())
    remembered = 0 if step is None else _sets(_by_role(step.proven), unit)
    # what gateways have seen once needs not be seen again: one that starts anew, or is silent, takes nothing back
    ready = min(total, max(_sets(own.seen, unit), min(_sets(own.ready, unit), remembered)))
    before = 0 if step is None else _sets(_by_role(step.asked), unit)
    asked = min(total, max(before, _sets(own.live, unit)))
    proven = min(total, max(ready, remembered))
    base = None if rollout.base is None else rollout.strengths.get(rollout.base, Strength())
    protects = base is not None and (base.known or (step is not None and step.base == rollout.base))

    taken = _sets_touched(_room_taken(own, others), unit)
    if protects:
        # what the base is about to be filled up to takes up room as well
        taken = max(taken, total - proven - _missing(rollout, asked, proven))
    allowed = min(total, max(0, total + rollout.surge - taken))
    if ready >= asked and not rollout.paused:
        asked = max(asked, allowed)
    since = _since(rollout, step, before, asked, ready)
    deadline_at = since + timedelta(seconds=rollout.deadline_s) if asked > ready else None
    if (
        deadline_at is not None
        and rollout.base is not None
        and (protects or rollout.base_completed)
        and deadline_at <= rollout.now
        and (rollout.gateways_answer or _sets(own.ready, unit) < asked)
    ):
        failed = _after_failure(rollout, others)
        return Decision(Stage.FAILED, failed.wanted, fails_now=True, ready_sets=failed.ready_sets)

    missing = _missing(rollout, asked, proven)
    keep = max(0, total - min(proven, ready) - missing)
    wanted = _old(rollout, others, keep=keep, refill=max(0, total - proven - missing), refills=protects)
    # single ready ones beyond whole sets (sizes have changed on the way) serve on, but none is made to go with them
    wanted[rollout.target] = {
        role: max(count, min(own.ready.get(role, 0), rollout.sizes.wanted[role]))
        for role, count in rollout.sizes.of_sets(asked).items()
    }
    if asked >= total:
        # the last step may not be made of whole sets: the sizes may have changed on the way
        wanted[rollout.target] = dict(rollout.sizes.wanted)
    rest = any(sum(strength.live.values()) for strength in others.values())
    complete = ready >= total and not rest
    return Decision(
        Stage.SETTLED if complete else Stage.PAUSED if rollout.paused else Stage.STEPPING,
        wanted,
        step=None
        if complete
        else Step(
            asked=_by_name(rollout.sizes.of_sets(asked)),
            proven=_by_name(rollout.sizes.of_sets(proven)),
            since=stamp(since),
            ready=asked > 0 and ready >= asked,
            base=(rollout.base or "") if protects else "",
        ),
        completes=complete,
        deadline_at=deadline_at if rollout.base is not None else None,
        sacrificed=missing,
        asked_sets=asked,
        ready_sets=ready,
    )


def _missing(rollout: RolloutInput, asked: int, proven: int) -> int:
    """Old sets that may be missing where there is no surge: for sets to come; when paused, for those on their way."""
    if rollout.surge:
        return 0
    missing = min(rollout.max_unavailable, rollout.sizes.sets - proven)
    return min(missing, max(0, asked - proven)) if rollout.paused else missing


def _by_name(counts: Counts) -> dict[str, int]:
    return {str(role): count for role, count in counts.items()}


def _by_role(counts: Mapping[str, int]) -> Counts:
    return {"prefill": counts.get("prefill", 0), "decode": counts.get("decode", 0)}


def _room_taken(own: Strength, others: Mapping[str, Strength]) -> Counts:
    """Replicas of other revisions, and those of the target that drain and cannot be taken back."""
    taken: dict[Role, int] = {
        role: count - own.live.get(role, 0) - own.returning.get(role, 0) for role, count in own.alive.items()
    }
    for strength in others.values():
        for role, count in strength.alive.items():
            taken[role] = taken.get(role, 0) + count
    return taken


def _since(rollout: RolloutInput, step: Step | None, before: int, asked: int, ready: int) -> datetime:
    """When the clock of the step was started: with the step, or when what was ready ceased to be."""
    since = moment(step.since) if step is not None else None
    if step is None or since is None or asked > before or (step.ready and ready < asked):
        return rollout.now
    return since


def _old(
    rollout: RolloutInput, others: Mapping[str, Strength], *, keep: int, refill: int, refills: bool
) -> dict[str, dict[Role, int]]:
    """Replicas of the other revisions. Of those that are neither wanted nor the base, only ready ones are worth
    keeping, and they go first; the base is filled up to `refill` sets if `refills`."""
    unit = rollout.sizes.unit
    base = others.get(rollout.base or "", Strength())
    wanted: dict[str, dict[Role, int]] = {}
    roles = {role for strength in others.values() for role in strength.live} | set(rollout.base_roles) | set(unit)
    for role in sorted(roles, reverse=True):
        room = _room(role, keep, others, rollout)
        floor = unit.get(role, 0) * refill
        rest = max(0, room - min(room, base.ready.get(role, 0)))
        kept_of_others = 0
        for name, strength in reversed(list(others.items())):
            if name != rollout.base:
                kept = min(strength.ready.get(role, 0), rest)
                wanted.setdefault(name, {})[role] = kept
                rest, kept_of_others = rest - kept, kept_of_others + kept
        if rollout.base is not None and role in rollout.base_roles:
            live = base.live.get(role, 0)
            wished = max(live, floor - kept_of_others) if refills else live
            wanted.setdefault(rollout.base, {})[role] = max(0, min(wished, room))
    return wanted


def _room(role: Role, keep: int, others: Mapping[str, Strength], rollout: RolloutInput) -> int:
    """Replicas of the role that `keep` sets have. A role that the new sets lack goes in proportion, the last one with
    the last set."""
    size = rollout.sizes.unit.get(role)
    if size is not None:
        return size * keep
    live = sum(strength.live.get(role, 0) for strength in others.values())
    return -(-live * keep // rollout.sizes.sets) if keep else 0
