"""Can a request be served now? Judged by pods, and by what gateways say of their streams."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, auto

from antiphon_operator.names import Role
from antiphon_operator.plan.replicas import Replica
from antiphon_operator.plan.scaling import Sizes
from antiphon_operator.plan.state import State


class Reach(Enum):
    """What gateways have of the revisions that could serve."""

    NOT_CONFIGURED = auto()
    UNKNOWN = auto()
    """None was asked yet, or too long ago."""
    NONE_ANSWERS = auto()
    SOME_LACK = auto()
    """A gateway that answers has no stream with a pair."""
    ALL = auto()


@dataclass(frozen=True, slots=True)
class Serving:
    """See the module's docstring."""

    pairs_ready: bool
    """At least one complete pair (one decode replica, for aggregated serving) of one revision is ready by its pods."""
    reach: Reach
    lacking: tuple[str, ...]
    """Addresses of gateways that answer but have no pair."""

    @property
    def answered(self) -> bool:
        return self.pairs_ready and self.reach in (Reach.NOT_CONFIGURED, Reach.ALL)


def judge_serving(state: State, sizes: Sizes, replicas: Iterable[Replica]) -> Serving:
    """`replicas`: those that are kept. Draining ones get no new requests, so they count for nothing here."""
    able = [name for name, roles in _ready_roles(replicas).items() if _needed(state, name, sizes) <= roles]
    if not state.context.gateway_configured:
        return Serving(bool(able), Reach.NOT_CONFIGURED, ())
    views = state.gateways
    if views is None:
        return Serving(bool(able), Reach.UNKNOWN, ())
    if not views.views:
        return Serving(bool(able), Reach.NONE_ANSWERS, ())
    lacking = []
    for view in views.views:
        counts: Mapping[Role, Mapping[str, int]] = {"prefill": view.prefill, "decode": view.decode}
        if not any(all(counts[role].get(name, 0) for role in _needed(state, name, sizes)) for name in able):
            lacking.append(view.address)
    return Serving(bool(able), Reach.SOME_LACK if lacking else Reach.ALL, tuple(lacking))


def _ready_roles(replicas: Iterable[Replica]) -> dict[str, set[Role]]:
    found: dict[str, set[Role]] = {}
    for replica in replicas:
        if replica.live and replica.ready:
            found.setdefault(replica.revision, set()).add(replica.role)
    return found


def _needed(state: State, revision: str, sizes: Sizes) -> set[Role]:
    """Roles that a request needs: those that the revision has, but for a prefill pool that is scaled to zero, whose
    work decode workers do."""
    known = state.revisions.get(revision)
    roles: set[Role] = set(known.roles) if known is not None else {pool.role for pool in state.model.pools}
    return roles - {"prefill"} if sizes.wanted.get("prefill") == 0 else roles
