"""Tells gateways of the load when it has changed, also those that got nothing of the steps that changed it.

A gateway hears the load with each of its requests' tokens. What it does not see that way: prompts that a prefill worker
computes for decode workers, and what other gateways have sent here. Between two heartbeats a prefill worker may have
computed all that it had to, and would look full.

So after a step that changed the load, whoever was not told of it meanwhile gets a StepBatch without steps: at once if
nobody was told for `EVERY_S`, else when that is over. While there is work, it is looked every `EVERY_S` whether the
load has changed without a step too (what came in during a long one, what was let go after the last one). One message is
made for all. A gateway that has not read what it got before gets no more of them until it has. From an idle worker
nothing comes.

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

    def __init__(self, report: LoadReport, hearers: Collection[Hearer]) -> None:
        """`hearers`: read when there is news; the owner adds to it and takes from it."""
        self._report = report
        self._hearers = hearers
        self._loop = asyncio.get_running_loop()
        self._seen: Load | None = None
        self._told_at = float("-inf")
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._closed = False

    def observe(self, result: StepResult) -> None:
        """A step has ended. To be called before requests hear what it brought them."""
        if self._hearers and self._is_news(result.load):
            self._look_at(max(self._loop.time(), self._told_at + EVERY_S))

    def changed(self) -> None:
        """Something of the load that is not the engine's."""
        for hearer in self._hearers:
            hearer.owed_load = True
        if self._hearers and not self._closed:
            self._look_at(max(self._loop.time(), self._told_at + EVERY_S))

    def close(self) -> None:
        """Tell nobody any more."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _is_news(self, load: Load) -> bool:
        if load == self._seen:
            return False
        self._seen = load
        for hearer in self._hearers:
            hearer.owed_load = True
        return True

    def _look_at(self, when: float) -> None:
        """If not before."""
        if self._timer is not None:
            if self._timer_at <= when:
                return
            self._timer.cancel()
        self._timer_at = when
        self._timer = self._loop.call_at(when, self._look)

    def _look(self) -> None:
        """In a turn of its own, so that streams know by now what the step brought them."""
        self._timer = None
        load = self._report.load()
        self._is_news(load)
        owed = [hearer for hearer in self._hearers if hearer.owed_load]
        ready = [hearer for hearer in owed if hearer.takes_load]
        if ready:
            message = wire.WorkerMessage(step=wire.StepBatch(queue=self._report.state_of(load)))
            for hearer in ready:
                hearer.tell_load(message)
            self._told_at = self._loop.time()
        if len(ready) < len(owed) or (self._hearers and not _is_idle(load)):
            self._look_at(self._loop.time() + EVERY_S)


def _is_idle(load: Load) -> bool:
    return load.free_blocks == load.total_blocks and not (load.running or load.waiting or load.retained_blocks)
