"""What must hold at every moment of a rollout, as functions of that moment: for `Desk.always`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tests.cluster.history import World


@dataclass(frozen=True, slots=True)
class PairedRollout:
    """A Model of `sets` sets, each of `unit` replicas by role."""

    model: str
    sets: int
    unit: Mapping[str, int]
    surge: int = 1
    max_unavailable: int = 0

    def fault(self, world: World) -> str:
        """Empty where all is as promised."""
        return self._too_few(world) or self._too_many(world) or self._unequal(world)

    def serving_sets(self, world: World) -> int:
        """Whole sets that could take a request: of one revision each, ready, and not on their way out."""
        revisions = {replica.revision for replica in world.replicas(self.model)}
        return sum(self._whole(world, revision) for revision in revisions)

    def _whole(self, world: World, revision: str) -> int:
        counts = {
            role: sum(replica.ready and not replica.draining for replica in world.replicas(self.model, role, revision))
            for role in self.unit
        }
        return min(count // self.unit[role] for role, count in counts.items())

    def _too_few(self, world: World) -> str:
        serving, least = self.serving_sets(world), self.sets - self.max_unavailable
        return f"{serving} sets serve, at least {least} must" if serving < least else ""

    def _too_many(self, world: World) -> str:
        for role, size in self.unit.items():
            count, most = len(world.replicas(self.model, role)), size * (self.sets + self.surge)
            if count > most:
                return f"there are {count} {role} replicas, at most {most} may be"
        return ""

    def _unequal(self, world: World) -> str:
        """Both pools change together: neither is further ahead than the step under way."""
        step = max(self.surge, self.max_unavailable)
        for revision in {replica.revision for replica in world.replicas(self.model)}:
            sets = [-(-len(world.replicas(self.model, role, revision)) // size) for role, size in self.unit.items()]
            if max(sets) - min(sets) > step:
                return f"revision {revision} has {sets} sets in its pools ({', '.join(self.unit)})"
        return ""
