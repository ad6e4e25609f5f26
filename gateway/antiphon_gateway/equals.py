"""By which step model each worker is priced: its own, or while it has measured little, with help of its equals.

Equals have one model card, one hardware (what the worker says of it in `Welcome`) and one role: a prefill worker knows
little of decode batches. The formula is `antiphon_policy.equals`; this keeps who is whose equal.

It is done here and not in Redis: every gateway hears every worker's fit anyway, twice a second, and needs no more than
that. A worker needs nothing of it: only gateways predict.

Owned by the fleet. Plain calls on the event loop; what a gateway hears most often (a worker that has measured enough)
costs two look-ups.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from antiphon_policy.equals import Fitted, pooled, shared
from antiphon_policy.latency import StepModel
from antiphon_policy.routing import WorkerRole

from antiphon_gateway.worker_client import WorkerClient

POOLED_FOR_S = 1.0
"""The fit that stands for all is chosen anew after that: fits that have settled change slowly."""


class _Kind(NamedTuple):
    card_digest: str
    hardware: str
    role: WorkerRole


@dataclass(slots=True)
class _Equals:
    """The workers of one kind."""

    fits: dict[WorkerClient, Fitted] = field(default_factory=dict)
    pooled: StepModel | None = None
    pooled_at: float = float("-inf")

    def stands_for_all(self, now: float) -> StepModel | None:
        if now - self.pooled_at >= POOLED_FOR_S:
            self.pooled_at = now
            self.pooled = pooled((fitted.model, fitted.samples) for fitted in self.fits.values())
        return self.pooled


class EqualWorkers:
    """See the module."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kinds: dict[_Kind, _Equals] = {}
        self._of: dict[WorkerClient, _Equals] = {}

    def heard(self, client: WorkerClient) -> None:
        """An attached worker has said its load: set what it is priced by."""
        equals = self._of.get(client)
        if equals is None:
            attachment = client.attachment
            if attachment is None or not attachment.hardware:
                return
            kind = _Kind(attachment.group.card_digest, attachment.hardware, attachment.role)
            equals = self._of[client] = self._kinds.setdefault(kind, _Equals())
            equals.pooled_at = float("-inf")
        fitted = equals.fits[client] = client.fitted
        if not fitted.is_trusted:
            priced_by = shared(fitted, equals.stands_for_all(self._clock()))
            # The same object for as long as it says the same: what was computed from it is kept by others.
            if priced_by != client.step_model:
                client.step_model = priced_by

    def forget(self, client: WorkerClient) -> None:
        """It is attached no more."""
        equals = self._of.pop(client, None)
        if equals is None:
            return
        del equals.fits[client]
        equals.pooled_at = float("-inf")
        if not equals.fits:
            self._kinds = {kind: others for kind, others in self._kinds.items() if others is not equals}
