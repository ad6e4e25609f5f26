"""How the steps of one request are told to its gateway: each by itself, or those in between together.

A stream's client waits for each token. Of an answer that its client gets whole, only the first step (the time to first
token) and the last one are waited for, and each message more costs this process and the gateway a wake-up. What is not
told when this worker is lost is generated again elsewhere. No timer: while steps come, they are told at most
`every_ms` apart; while none comes, there is nothing to say that cannot wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from antiphon_proto import worker_pb2 as wire
from antiphon_worker.attach import RequestSink


class Teller:
    """See the module. Used from one thread."""

    def __init__(self, sink: RequestSink, every_ms: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._sink = sink
        self._every_s = every_ms / 1000.0
        self._clock = clock
        self._told_at = float("-inf")
        self._untold: wire.RequestStep | None = None

    def tell(self, step: wire.RequestStep) -> None:
        """Send it, with what was not told before; or keep it. What has a finish or usage goes at once."""
        if not self._every_s:
            self._sink.step(step)
            return
        untold = self._untold
        if untold is not None:
            text = untold.text + step.text
            untold.MergeFrom(step)
            untold.text = text
            step = untold
        now = self._clock()
        if step.finish or step.HasField("usage") or now - self._told_at >= self._every_s:
            self._untold, self._told_at = None, now
            self._sink.step(step)
        else:
            self._untold = step
