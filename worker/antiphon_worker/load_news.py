"""Tells gateways of the load that steps have changed, also those that got nothing of these steps.

A gateway hears the load with each of its requests' tokens. What it does not see that way: prompts that a prefill worker
computes for decode workers, and what other gateways have sent here. Between two heartbeats a prefill worker may have
computed all that it had to, and would look full.

So after a step that changed the load, whoever was not told of it meanwhile gets a StepBatch without steps: at once if
nobody was told for `EVERY_S`, else when that is over. One message is made for all. A gateway that has not read what it
got before gets no more of them, until it has. While nothing steps, nothing is sent.

Owned by the servicer of the streams. Plain calls on the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Protocol

from antiphon_engine.interface import Load, StepResult
from antiphon_proto import worker_pb2 as wire

from antiphon_worker.load import LoadReport

EVERY_S = 0.03
"""Well below what gateways give a worker to do in advance (`antiphon_policy.holding`), and some ten microseconds of
work a time and gateway."""


class Hearer(Protocol):
    """A gateway's stream."""

    owed_load: bool
    """The load has changed since it was last told. It is for the stream to clear this when it tells the load anyway."""

    @property
    def takes_load(self) -> bool:
        """Whether a message would go out at once. If not, it is tried again later."""

    def tell_load(self, message: wire.WorkerMessage) -> None:
        """Send it. Others get the same one: not to be changed."""


class LoadNews:
    """See the module."""

    def __init__(self, load: LoadReport, hearers: Collection[Hearer]) -> None:
        """`hearers`: read at each step; the owner adds to it and takes from it."""
        self._load = load
        self._hearers = hearers
        self._loop = asyncio.get_running_loop()
        self._seen: Load | None = None
        self._told_at = float("-inf")
        self._timer: asyncio.TimerHandle | None = None

    def observe(self, result: StepResult) -> None:
        """A step has ended. To be called before requests hear what it brought them."""
        if result.load == self._seen:
            return
        self._seen = result.load
        for hearer in self._hearers:
            hearer.owed_load = True
        if self._hearers and self._timer is None:
            self._tell_at(max(self._loop.time(), self._told_at + EVERY_S))

    def close(self) -> None:
        """Tell nobody any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tell_at(self, when: float) -> None:
        self._timer = self._loop.call_at(when, self._tell)

    def _tell(self) -> None:
        """In a turn of its own, so that streams know by now what the step brought them."""
        self._timer = None
        owed = [hearer for hearer in self._hearers if hearer.owed_load]
        ready = [hearer for hearer in owed if hearer.takes_load]
        if ready:
            # As it is now, not as the step left it: what was accepted since is counted in.
            message = wire.WorkerMessage(step=wire.StepBatch(queue=self._load.now()))
            for hearer in ready:
                hearer.tell_load(message)
            self._told_at = self._loop.time()
        if len(ready) < len(owed):
            self._tell_at(self._loop.time() + EVERY_S)
