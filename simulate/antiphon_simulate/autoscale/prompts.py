"""The line of prompts, and how long a worker takes for what it takes from it.

The gateway keeps one line and workers take from its head, so nobody waits behind a long prompt while a worker is free.
Its order is the gateway's (`antiphon_policy.admission`) as far as a load without classes, tenants and prefixes has one:
due first, and what is too late already, even if it began now, after all that is not. While the workers cannot do all,
those that are too late get one token in `OVERTAKEN_LATE`. Answers whose worker failed have begun: they wait for nobody.

Prompts that fit into one step's chunk together share the step, so its fixed costs are paid once.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from itertools import count

from antiphon_policy.admission import OVERTAKEN_LATE

from antiphon_simulate.autoscale.records import Serving
from antiphon_simulate.records import Timing
from antiphon_simulate.worker import HOP_MS


class PromptLine:
    def __init__(self, timing: Timing) -> None:
        self._step = timing.step
        self._chunk_tokens = timing.chunk_tokens
        self._begun: deque[Serving] = deque()
        """Answers that lost their worker."""
        self._timely: list[tuple[float, int, Serving]] = []
        """By when they have to begin at the latest to be in time, looked at when a worker is free."""
        self._late: deque[Serving] = deque()
        """Those that were found too late, in that order."""
        self._order = count()
        self._overtaken = 0.0
        """Tokens that went before the first of the late ones since one of them was taken."""
        self.queued_tokens = 0
        """Uncached ones, of those that wait."""

    def __len__(self) -> int:
        return len(self._begun) + len(self._timely) + len(self._late)

    def add(self, serving: Serving) -> None:
        heapq.heappush(self._timely, (serving.arrived_ms + serving.call.ttft_limit_ms, next(self._order), serving))
        self.queued_tokens += serving.uncached_tokens

    def add_again(self, serving: Serving) -> None:
        """Its worker failed."""
        if serving.first_ms is None:
            self.add(serving)
        else:
            self._begun.append(serving)
            self.queued_tokens += serving.uncached_tokens

    def take(self, now_ms: float) -> tuple[Serving, ...]:
        """What a free worker computes next: a step's worth, one prompt at least. Empty: nobody waits."""
        taken: list[Serving] = []
        tokens, done_ms, due_ms = 0, now_ms + HOP_MS, math.inf
        while (serving := self._first(now_ms)) is not None:
            alone_ms = self._alone_ms(serving)
            more_ms = alone_ms - (self._step.base_ms if taken else 0.0)
            its_due_ms = serving.arrived_ms + serving.call.ttft_limit_ms
            if now_ms + alone_ms + HOP_MS > its_due_ms:
                its_due_ms = math.inf  # it is late anyway
            if taken and tokens + serving.uncached_tokens > self._chunk_tokens:
                break
            if taken and done_ms + more_ms > min(due_ms, its_due_ms):
                break  # together they would be late
            self._pop(serving)
            tokens += serving.uncached_tokens
            done_ms += more_ms
            due_ms = min(due_ms, its_due_ms)
            taken.append(serving)
        self.queued_tokens -= tokens
        return tuple(taken)

    def compute_ms(self, prompts: tuple[Serving, ...]) -> float:
        """Until all of them are computed: their steps, with what they share counted once."""
        together = sum([self._alone_ms(serving) for serving in prompts])
        return together - self._step.base_ms * (len(prompts) - 1)

    def _first(self, now_ms: float) -> Serving | None:
        if self._begun:
            return self._begun[0]
        timely, late = self._timely, self._late
        if late and self._overtaken >= OVERTAKEN_LATE * late[0].uncached_tokens:
            return late[0]
        while timely:
            due_ms, _, serving = timely[0]
            if now_ms + serving.call.prefill_ms + HOP_MS <= due_ms:
                return serving
            late.append(heapq.heappop(timely)[2])
        return late[0] if late else None

    def _pop(self, serving: Serving) -> None:
        if self._begun and self._begun[0] is serving:
            self._begun.popleft()
        elif self._late and self._late[0] is serving:
            self._late.popleft()
            self._overtaken = 0.0
        else:
            heapq.heappop(self._timely)
            if self._late:
                self._overtaken += serving.uncached_tokens

    def _alone_ms(self, serving: Serving) -> float:
        if serving.moves == 0:
            return serving.call.prefill_ms
        return self._step.prefill_ms(new_tokens=serving.uncached_tokens, chunk_tokens=self._chunk_tokens)
