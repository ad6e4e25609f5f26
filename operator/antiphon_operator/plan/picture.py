"""Everything that was found and decided in one look: what conditions, status and events are told from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from antiphon_operator.names import Role
from antiphon_operator.plan.fleet import Fleet
from antiphon_operator.plan.gangs import GangVerdict
from antiphon_operator.plan.naming import NameVerdict
from antiphon_operator.plan.planned import Announce
from antiphon_operator.plan.replicas import Replica
from antiphon_operator.plan.revisions import Revision
from antiphon_operator.plan.rollout import Decision
from antiphon_operator.plan.scaling import Scaling
from antiphon_operator.plan.serving import Serving
from antiphon_operator.plan.source import SourceLook
from antiphon_operator.plan.state import State
from antiphon_operator.plan.target import Target
from antiphon_operator.plan.trouble import Findings


@dataclass(frozen=True, slots=True)
class Picture:
    """See the module's docstring."""

    state: State
    refused: str
    """Why the spec is refused; what runs is kept meanwhile. Empty: it is not."""
    naming: NameVerdict
    source: SourceLook
    target: Target | None
    """With the notes that it has after this look."""
    base: Revision | None
    scaling: Scaling
    decision: Decision
    gangs: GangVerdict
    fleet: Fleet
    closed: frozenset[tuple[str, Role]]
    findings: Mapping[Role, Findings]
    serving: Serving

    @property
    def kept(self) -> tuple[Replica, ...]:
        return self.fleet.kept

    @property
    def failed(self) -> str:
        """`<reason>: <message>` of a target that was given up."""
        return self.target.revision.failed if self.target is not None else ""

    @property
    def completes_now(self) -> bool:
        """The target is all there is, and this look notes it."""
        name = self.target.revision.name if self.target is not None else ""
        return self.decision.completes and not self.state.stands_completed(name)

    def ready(self, role: Role) -> int:
        return sum(replica.live and replica.ready for replica in self.kept if replica.role == role)

    def draining(self, role: Role) -> int:
        return sum(
            replica.alive and replica.draining_since is not None for replica in self.kept if replica.role == role
        )

    @property
    def others_alive(self) -> tuple[str, ...]:
        """Revisions beside the target that still have replicas."""
        own = self.target.revision.name if self.target is not None else ""
        return tuple(sorted({replica.revision for replica in self.kept if replica.alive and replica.revision != own}))


def condition_before(state: State, kind: str) -> Mapping[str, object] | None:
    """The condition as the Model's status has it."""
    status = state.observed.model.get("status") or {}
    return next((c for c in status.get("conditions") or () if c.get("type") == kind), None)


def first_time(state: State, kind: str, reason: str) -> bool:
    """The condition does not say so yet: an Event about it is news."""
    before = condition_before(state, kind)
    return before is None or before.get("reason") != reason


Events = tuple[Announce, ...]
