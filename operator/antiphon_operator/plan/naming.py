"""Names that clients use are unique in the cluster: of two Models that claim one, the oldest has it."""

from __future__ import annotations

from dataclasses import dataclass

from antiphon_operator.plan.observed import Observed
from antiphon_operator.resource.effective import EffectiveModel


@dataclass(frozen=True, slots=True)
class NameVerdict:
    """Which names are this Model's, and who has the others (`namespace/name` by name)."""

    owned: tuple[str, ...]
    lost: dict[str, str]

    @property
    def sentence(self) -> str:
        """Which names are whose, and what to do."""
        told = ", ".join(f"{name} belongs to Model {winner}" for name, winner in sorted(self.lost.items()))
        return f"{told}, which is older: change spec.names here or there."


def judge_names(model: EffectiveModel, observed: Observed) -> NameVerdict:
    """A name of which nothing is known is this Model's."""
    lost = {name: winner for name in model.names if (winner := observed.name_owners.get(name, model.key)) != model.key}
    return NameVerdict(tuple(name for name in model.names if name not in lost), lost)
