"""What waits for one group of workers, and when it is looked at again.

The order is the waiting line's (`antiphon_policy.admission`); where something would go, and whether it had better
be held, is `placing`'s to say. What is here is when: a choice that comes while nothing waits is placed at once. While
something waits, a *look* passes over the first of it

- when a worker has room that it had not (its report, an answer, an end, another worker),
- when a held choice's worker is predicted to be done with what is before it, or has been left to other gateways for
  long enough (`holding_shared`),
- in any case every `LOOK_EVERY_S`.

A look is bounded however much waits. It ends after `MAX_HELD` that are held, or `MAX_PLANNED` that were planned anew
and held: a choice that was found to be held is not planned again for `PLAN_GOOD_FOR_S`, as long as the worker that it
waits for is there and has more than enough to do. After a look that took d and started nothing the next comes 9 d
later at the earliest (at most 10 ms later).

Looks that start something are no waste: one that started k is followed after 1 / (k + 1) of that, so an open fleet is
filled as fast as decisions are made, and where room comes in crumbs it is gathered. One that started `MAX_STARTED`
makes way for what else the event loop has to do, and goes on right after it.

Owned by the dispatcher, which closes it. Runs on the event loop as plain calls.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping

from antiphon_policy.admission import Entry, Verdict, WaitingLine
from antiphon_policy.routing import NoWorker

from antiphon_gateway.flight import Choice
from antiphon_gateway.load import WorkerLoad
from antiphon_gateway.placing import Placing, Plan

MAX_HELD = 64
MAX_PLANNED = 8
MAX_STARTED = 64
"""About 10 ms of decisions: the tokens of the streams that run wait no longer for what starts."""
PLAN_GOOD_FOR_S = 0.25
LOOK_EVERY_S = 0.25
_LOOKING_SHARE = 9.0
_MOST_APART_S = 0.01
"""Shorter than any horizon, so no worker runs dry for want of a look."""

Links = Mapping[tuple[str, str], float]


class GroupQueue:
    """See the module. `submit` sends a planned choice off; `nobody` is told of one that no worker of the group can
    serve any more: it has left the queue. `served`: whether some group of the model can serve anything now."""

    def __init__(
        self,
        placing: Placing,
        *,
        submit: Callable[[Entry[Choice], Plan], None],
        nobody: Callable[[Choice], None],
        served: Callable[[], bool],
        links: Callable[[], Links],
    ) -> None:
        self.placing = placing
        self.line: WaitingLine[Choice] = WaitingLine()
        self._submit = submit
        self._nobody = nobody
        self._served = served
        self._links = links
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        """When it is due, by the loop's clock. uvloop's handles for what is due now do not tell."""
        self._not_before = 0.0
        self._held: dict[Choice, tuple[Plan, float]] = {}
        """What is held, with the plan that it is held by and until when that is good."""
        self._planned = 0
        """Planned anew and held in this look."""
        self._started = 0
        """In this look."""
        self._held_for: set[WorkerLoad] = set()
        """Who should compute what is held in this look."""
        self._held_ms = 0.0
        """The shortest that a choice of this look is held for; 0: none is."""

    def __len__(self) -> int:
        return len(self.line)

    def offer(self, entry: Entry[Choice]) -> None:
        """Place it now, if nothing waits and it need not be held; else it waits. An answer that has begun and goes on
        elsewhere passes by all that waits: it has had its turn."""
        others_wait = bool(len(self.line))
        if others_wait and not entry.key.output:
            self._estimate(entry)
            self.line.add(entry)
            self.look_soon()
            return
        now = self._begin()
        verdict = self._consider(entry, now)
        if verdict in (Verdict.HOLD, Verdict.STOP):
            self.line.add(entry)
            if others_wait:
                self.look_soon()
                return
            self._tell(now)
            self._plan_next(now)

    def remove(self, choice: Choice) -> bool:
        """Whether it was waiting."""
        self._held.pop(choice, None)
        if self.line.remove(choice) is None:
            return False
        if not len(self.line):
            self.close()
            self._tell(time.monotonic())
        return True

    def changed(self, load: WorkerLoad) -> None:
        """A worker's figures are others."""
        placing, now = self.placing, time.monotonic()
        placing.changed(load)
        others_changed = placing.room.heard(load, now)
        if len(self.line):
            placing.room.tell_before_room(self.line, load, now)
            if others_changed or placing.became_free(load, now):
                self.look_soon()

    def predicted_ms(self, choice: Choice) -> float:
        """When the first token of one that waits would come, from now, were it the last of its tenant to go."""
        entry = self.line.entry(choice)
        rate = self.placing.tokens_per_ms(time.monotonic())
        if entry is None or rate <= 0.0:
            return 0.0
        return self.line.ahead_of(entry) / rate + entry.service_ms

    def look_soon(self) -> None:
        """Something may be placed now that could not be before."""
        if len(self.line):
            self._look_at(max(time.monotonic(), self._not_before))

    def look(self) -> None:
        """Pass over what waits."""
        self.close()
        if not len(self.line):
            return
        now = self._begin()
        if not self.placing.anybody() and not self._served():
            # A worker may come back.
            self._plan_next(now)
            return
        own_tokens = self.line.waiting_tokens
        rate = self.placing.tokens_per_ms(now) * own_tokens / max(1, own_tokens + self.placing.room.others_tokens)
        for _ in self.line.pass_over(
            now * 1e3, lambda entry: self._consider(entry, now), tokens_per_ms=rate, max_held=MAX_HELD
        ):
            pass
        ended = time.monotonic()
        self._not_before = ended + min(_MOST_APART_S, _LOOKING_SHARE * (ended - now)) / (1 + self._started)
        self._tell(ended)
        if not len(self.line):
            return
        self.placing.put_changed(ended)
        if self._started == MAX_STARTED:
            self.look_soon()
        else:
            self._plan_next(ended)

    def close(self) -> None:
        """No more looks, until something asks for one."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # -- inside

    def _begin(self) -> float:
        now = time.monotonic()
        self._held_ms = 0.0
        self._held_for.clear()
        self._planned = 0
        self._started = 0
        self.placing.refresh(self._links(), now, self.line.waiting_tokens)
        return now

    def _estimate(self, entry: Entry[Choice]) -> None:
        """What it would cost where most of it is held: its order counts before it is looked at."""
        choice = entry.key
        tokens = len(choice.prompt.token_ids) + len(choice.output)
        entry.matched_tokens = min(tokens - 1, self.placing.matched_tokens(choice))
        entry.uncached_tokens = tokens - entry.matched_tokens
        entry.due_ms = self.placing.due_ms(choice, entry.uncached_tokens)

    def _consider(self, entry: Entry[Choice], now: float) -> Verdict:
        choice, placing = entry.key, self.placing
        plan, good_until = self._held.get(choice, (None, 0.0))
        if plan is not None and now < good_until and (held_ms := placing.holds_still(plan, now)) > 0.0:
            placing.room.full(plan.prefiller, now)
            return self._hold(plan, held_ms)
        if self._planned == MAX_PLANNED or self._started == MAX_STARTED:
            return Verdict.STOP
        self._held.pop(choice, None)
        try:
            plan = placing.plan(choice, now)
        except NoWorker:
            if placing.anybody(choice.excluded):
                # All that may decode it are full: that is so for those behind it too, but where some are excluded.
                return Verdict.HOLD if choice.excluded else Verdict.STOP
            self.line.remove(choice)
            self._nobody(choice)
            return Verdict.LEAVE
        decision = plan.decision
        if decision.cost is not None:
            entry.service_ms = decision.cost.ttft_ms - decision.cost.queue_ms
        entry.matched_tokens = plan.inputs.request.prompt_tokens - plan.uncached_tokens
        self.line.estimate(entry, plan.uncached_tokens)
        entry.due_ms = placing.due_ms(choice, plan.uncached_tokens)
        if plan.hold_ms > 0.0:
            placing.room.full(plan.prefiller, now)
            self._planned += 1
            self._held[choice] = (plan, now + PLAN_GOOD_FOR_S)
            return self._hold(plan, plan.hold_ms)
        left_ms = 0.0 if choice.output else placing.room.leaves_ms(plan.prefiller, entry, now)
        if left_ms > 0.0:
            self._planned += 1
            return self._hold(plan, left_ms)
        placing.room.sent(plan.prefiller)
        self._started += 1
        self._submit(entry, plan)
        return Verdict.START

    def _hold(self, plan: Plan, held_ms: float) -> Verdict:
        self.placing.reserve(plan)
        self._held_for.add(plan.prefiller)
        self._held_ms = min(self._held_ms or held_ms, held_ms)
        return Verdict.HOLD

    def _tell(self, now: float) -> None:
        self.placing.room.tell(self.line, self._held_for, now)

    def _plan_next(self, now: float) -> None:
        wait_s = min(self._held_ms / 1e3, LOOK_EVERY_S) if self._held_ms else LOOK_EVERY_S
        self._look_at(max(now + wait_s, self._not_before))

    def _look_at(self, at: float) -> None:
        loop = asyncio.get_running_loop()
        when = loop.time() + at - time.monotonic()
        if self._timer is not None:
            if self._timer_at <= when:
                return
            self._timer.cancel()
        self._timer = loop.call_at(when, self.look)
        self._timer_at = when
