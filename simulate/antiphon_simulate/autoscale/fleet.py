"""The workers of the elastic cluster: who is wanted, starting, ready, on the way out, and what that costs.

What a scaler wants is made true as a cluster's controllers would: too few, and workers start (one that drains is taken
back first, since it is the soonest); too many, and those that still start are let go first, then those with the least
to do drain. A worker that fails is replaced at once, as long as its pool wants so many.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from antiphon_policy.routing import WorkerRole

from antiphon_simulate.autoscale.measured import Measured
from antiphon_simulate.autoscale.records import POOLS, Moment, Setting, Sizes, Wish
from antiphon_simulate.autoscale.replica import Life, Replica


class Fleet:
    def __init__(
        self,
        setting: Setting,
        draws: random.Random,
        at: Callable[[float, Callable[[Any], None], Any], None],
        ready: Callable[[Replica], None],
        move_all: Callable[[Replica], None],
    ) -> None:
        self._timing = setting.timing
        self._site = setting.site
        self._draws = draws
        self._at = at
        self._tell_ready = ready
        self._move_all = move_all
        self._numbers = 0
        self._now_ms = 0.0
        self.workers: list[Replica] = []
        """All that are paid for."""
        self.wanted = Sizes(0, 0)
        self._ready: dict[WorkerRole, list[Replica]] = {role: [] for role in POOLS}
        self.moments: list[Moment] = []
        self.starts = self.switches = self.failures = 0
        self.start_times = {role: Measured(setting.site.start_ms) for role in POOLS}
        self.drain_times = {role: Measured(setting.site.drain_ms) for role in POOLS}

    def begin(self, sizes: Sizes) -> None:
        self.wanted = self._bounded(sizes)
        for role in POOLS:
            for _ in range(self.wanted.of(role)):
                replica = self._new(role, 0.0)
                replica.life = Life.READY
                self._ready[role].append(replica)
        self._note(0.0)

    def ready(self, role: WorkerRole) -> list[Replica]:
        return self._ready[role]

    def starting_ms(self, role: WorkerRole, now_ms: float) -> tuple[float, ...]:
        """Of each that starts, how long it is still expected to: by the measured time, not by what was drawn."""
        expected = (worker.expected_ms for worker in self.workers if self._becomes_ready(worker, role))
        return tuple(sorted(max(0.0, time_ms - now_ms) for time_ms in expected))

    def draining(self, role: WorkerRole) -> int:
        return sum(worker.life is Life.DRAINING and worker.role is role for worker in self.workers)

    def draw_life_ms(self) -> float | None:
        """None: workers do not fail here."""
        mean_h = self._site.mean_life_h
        return self._draws.expovariate(1.0 / (mean_h * 3_600_000.0)) if mean_h > 0.0 else None

    def want(self, wish: Wish, now_ms: float) -> None:
        self._now_ms = now_ms
        if wish.switch is not None and self._site.may_switch:
            self._switch(wish.switch.from_role, wish.switch.to_role, wish.switch.count)
        self.wanted = self._bounded(wish.sizes)
        for role in POOLS:
            self._make_true(role)
        self._note(now_ms)

    def settle(self, replica: Replica, now_ms: float) -> None:
        """It has done something: if it drains and has nothing left, it goes or takes up its other role."""
        if replica.life is not Life.DRAINING or not replica.is_idle:
            return
        self._now_ms = now_ms
        if replica.becomes is None:
            self._go(replica)
        else:
            replica.role, replica.becomes, replica.asked_ms = replica.becomes, None, None
            replica.life = Life.STARTING
            replica.ready_ms = replica.expected_ms = now_ms + self._site.switch_ms
            self.switches += 1
            self._at(replica.ready_ms, self._becomes, (replica, replica.ready_ms))
        self._note(now_ms)

    def failed(self, replica: Replica, now_ms: float) -> None:
        self._now_ms = now_ms
        self.failures += 1
        self._go(replica)
        for role in POOLS:
            self._make_true(role)
        self._note(now_ms)

    # -- making it true

    def _make_true(self, role: WorkerRole) -> None:
        serving = self._ready[role]
        starting = [worker for worker in self.workers if self._becomes_ready(worker, role)]
        missing = self.wanted.of(role) - len(serving) - len(starting)
        if missing > 0:
            for replica in [one for one in self.workers if one.life is Life.DRAINING and one.role is role][:missing]:
                if replica.becomes is None:
                    replica.life = Life.READY
                    serving.append(replica)
                    missing -= 1
            for _ in range(missing):
                self._start(role)
        while missing < 0 and starting:
            soonest = max(starting, key=lambda one: one.expected_ms)
            starting.remove(soonest)
            if soonest.life is Life.STARTING:
                self._go(soonest)
            else:
                soonest.becomes = None  # it was to switch here: it goes instead
            missing += 1
        for _ in range(min(-missing, len(serving))):
            self._drain(self._least_loaded(role), None)

    def _switch(self, from_role: WorkerRole, to_role: WorkerRole, count: int) -> None:
        for _ in range(min(count, len(self._ready[from_role]))):
            self._drain(self._least_loaded(from_role), to_role)

    def _least_loaded(self, role: WorkerRole) -> Replica:
        return min(self._ready[role], key=lambda one: (len(one.batch) + len(one.prompts), -one.number))

    def _drain(self, replica: Replica, becomes: WorkerRole | None) -> None:
        self._ready[replica.role].remove(replica)
        replica.life = Life.DRAINING
        replica.becomes = becomes
        replica.asked_ms = self._now_ms
        replica.expected_ms = self._now_ms + self._site.switch_ms
        if replica.is_idle:
            self.settle(replica, self._now_ms)
        elif replica.batch:
            replica.drains += 1
            patience_ms = 0.0 if becomes is not None else self._site.drain_ms
            self._at(self._now_ms + patience_ms, self._drained_enough, (replica, replica.drains))

    def _drained_enough(self, which: tuple[Replica, int]) -> None:
        replica, drain = which
        if replica.life is Life.DRAINING and replica.drains == drain:
            self._move_all(replica)

    def _start(self, role: WorkerRole) -> None:
        site = self._site
        delay_ms = site.start_ms * (1.0 + site.start_spread * (2.0 * self._draws.random() - 1.0))
        replica = self._new(role, self._now_ms + delay_ms)
        replica.asked_ms, replica.expected_ms = self._now_ms, self._now_ms + site.start_ms
        self.starts += 1
        self._at(replica.ready_ms, self._becomes, (replica, replica.ready_ms))

    def _new(self, role: WorkerRole, ready_ms: float) -> Replica:
        replica = Replica(self._numbers, role, self._timing, ready_ms)
        self._numbers += 1
        self.workers.append(replica)
        return replica

    def _becomes(self, which: tuple[Replica, float]) -> None:
        replica, ready_ms = which
        if replica.life is not Life.STARTING or replica.ready_ms != ready_ms:
            return
        replica.life = Life.READY
        self._ready[replica.role].append(replica)
        if replica.asked_ms is not None:
            self.start_times[replica.role].note(ready_ms - replica.asked_ms)
            replica.asked_ms = None
        self._note(ready_ms)
        self._tell_ready(replica)

    def _go(self, replica: Replica) -> None:
        if replica in self._ready[replica.role]:
            self._ready[replica.role].remove(replica)
        if replica.life is Life.DRAINING and replica.asked_ms is not None:
            self.drain_times[replica.role].note(self._now_ms - replica.asked_ms)
        replica.life = Life.GONE
        self.workers.remove(replica)

    def _becomes_ready(self, worker: Replica, role: WorkerRole) -> bool:
        if worker.life is Life.STARTING:
            return worker.role is role
        return worker.life is Life.DRAINING and worker.becomes is role

    def _bounded(self, sizes: Sizes) -> Sizes:
        least, most, budget = self._site.least, self._site.most, self._site.budget
        prefill = max(least.prefill, min(most.prefill, sizes.prefill))
        decode = max(least.decode, min(most.decode, sizes.decode))
        while budget is not None and prefill + decode > budget:
            if decode - least.decode >= prefill - least.prefill and decode > least.decode:
                decode -= 1
            elif prefill > least.prefill:
                prefill -= 1
            else:
                break
        return Sizes(prefill, decode)

    def _note(self, now_ms: float) -> None:
        moment = Moment(
            at_ms=now_ms,
            wanted=self.wanted,
            ready=Sizes(*(len(self._ready[role]) for role in POOLS)),
            alive=Sizes(*(sum(worker.role is role for worker in self.workers) for role in POOLS)),
        )
        if self.moments:
            last = self.moments[-1]
            if last.at_ms == now_ms:
                self.moments.pop()
            elif (last.wanted, last.ready, last.alive) == (moment.wanted, moment.ready, moment.alive):
                return
        self.moments.append(moment)
