"""How fast the double's cluster lives: one factor for every wait that a real cluster counts in seconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timing:
    """Waits that Kubernetes counts in seconds are multiplied by `scale`: back-off, tolerations, deadlines, probe
    periods. What a real process needs (its grace, a probe's time-out) is never scaled."""

    scale: float = 0.02
    """30 s of toleration pass in 0.6 s."""
    reaction_s: float = 0.005
    """Between a change and the controller that answers it, so that a watcher sees the states in between."""

    def seconds(self, seconds: float) -> float:
        return seconds * self.scale
