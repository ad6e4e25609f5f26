"""The elastic cluster: requests come, a scaler decides every few seconds, workers start, drain, move, fail and go.

`run` is the way in. Nobody is cut: a worker that is to go takes nothing new, its streams end, and those that have not
when `drain_ms` is over move to others, which pull their blocks. A worker that fails takes its KV with it: its prompts
wait in the line again, and its streams, whose contexts are computed anew, go before all that waits.
"""

from __future__ import annotations

import heapq
import random
import time
from collections import deque
from collections.abc import Callable
from itertools import count
from typing import Any

from antiphon_policy.latency import transfer_ms
from antiphon_policy.routing import WorkerRole

from antiphon_simulate.autoscale.calls import Load
from antiphon_simulate.autoscale.fleet import Fleet
from antiphon_simulate.autoscale.prompts import PromptLine
from antiphon_simulate.autoscale.records import PoolSeen, Scaler, ScaleRun, Seen, Serving, Setting, Sizes
from antiphon_simulate.autoscale.replica import Life, Replica
from antiphon_simulate.traces import BLOCK_TOKENS
from antiphon_simulate.worker import HOP_MS

_PATIENCE_MS = 24 * 3_600_000.0
"""So long after the last arrival the run is given up: then a scaler has left requests without workers."""


class StarvedError(RuntimeError):
    """Requests waited for a day without workers to serve them."""


def run(load: Load, setting: Setting, scaler: Scaler, begin: Sizes, *, seed: int = 0) -> ScaleRun:
    """One load under one scaler, from `begin` on, whose workers are ready at once. The same arguments give the same
    result. Raises StarvedError."""
    began = time.perf_counter()
    cluster = Cluster(load, setting, scaler, begin, seed)
    cluster.run()
    return cluster.result(time.perf_counter() - began)


class Cluster:
    def __init__(self, load: Load, setting: Setting, scaler: Scaler, begin: Sizes, seed: int) -> None:
        self._load = load
        self._setting = setting
        self._scaler = scaler
        self._timing = setting.timing
        self._span_ms = load.span_ms
        self._events: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._order = count()
        self._now_ms = 0.0
        self._line = PromptLine(setting.timing)
        self._streams: deque[Serving] = deque()
        """Answers that no decode worker has room for."""
        self._fleet = Fleet(setting, random.Random(f"{seed} starts"), self._at, self._ready, self._emptied)
        self._servings: list[Serving] = []
        self._unended = len(load.calls)
        self._joining = 0
        self._arrived: list[Serving] = []
        self._first_tokens: list[Serving] = []
        self._ended: list[Serving] = []
        self._decided_ms = 0.0
        self._moved_streams = 0
        self._fleet.begin(begin)

    def run(self) -> None:
        arrivals = iter(call for call in self._load.calls if not call.follows)
        following = next(arrivals, None)
        self._at(self._scaler.interval_ms, self._decide, None)
        for replica in self._fleet.workers:
            self._plan_failure(replica)
        while self._unended:
            # An arrival goes before whatever else happens at the same time.
            if following is not None and following.arrival_ms <= self._events[0][0]:
                self._now_ms = following.arrival_ms
                self._arrive(following.index)
                following = next(arrivals, None)
            else:
                self._now_ms, _, call, subject = heapq.heappop(self._events)
                call(subject)

    def result(self, took_s: float) -> ScaleRun:
        return ScaleRun(
            scaler=self._scaler.name,
            servings=sorted(self._servings, key=lambda serving: serving.call.index),
            moments=self._fleet.moments,
            span_ms=self._span_ms,
            starts=self._fleet.starts,
            switches=self._fleet.switches,
            failures=self._fleet.failures,
            moved_streams=self._moved_streams,
            took_s=took_s,
        )

    # -- requests

    def _arrive(self, index: int) -> None:
        call = self._load.calls[index]
        serving = Serving(call, call.prompt_tokens, call.output_tokens, call.uncached_tokens, self._now_ms)
        self._servings.append(serving)
        self._arrived.append(serving)
        self._line.add(serving)
        self._feed()

    def _feed(self) -> None:
        """Free prefill workers take what waits."""
        if not len(self._line):
            return
        for replica in self._fleet.ready(WorkerRole.PREFILL):
            if not replica.prompts:
                replica.prompts = self._line.take(self._now_ms)
                if not replica.prompts:
                    return
                done_ms = self._now_ms + self._line.compute_ms(replica.prompts)
                self._at(done_ms, self._computed, (replica, replica.prompts))

    def _computed(self, done: tuple[Replica, tuple[Serving, ...]]) -> None:
        replica, prompts = done
        if replica.prompts is not prompts:
            return  # it failed in between
        replica.prompts = ()
        for serving in prompts:
            if serving.first_ms is None:
                serving.first_ms = self._now_ms + HOP_MS
                self._first_tokens.append(serving)
            if serving.output_tokens == 1:
                self._end(serving, self._now_ms)
            else:
                # All but the last chunk have moved while the next was computed.
                last_tokens = min(serving.uncached_tokens, self._timing.chunk_tokens)
                self._joining += 1
                self._at(self._now_ms + self._transfer_ms(last_tokens), self._stream, serving)
        self._fleet.settle(replica, self._now_ms)
        self._feed()

    def _transfer_ms(self, tokens: int) -> float:
        size = round(self._timing.block_bytes * tokens / BLOCK_TOKENS)
        return transfer_ms(size, gigabytes_per_s=self._timing.link_gigabytes_per_s)

    def _stream(self, serving: Serving) -> None:
        """Its blocks are where they are needed: it joins the smallest batch that has room."""
        self._joining -= 1
        self._streams.append(serving)
        self._place_streams()

    def _place_streams(self) -> None:
        site = self._setting.site
        while self._streams:
            serving = self._streams[0]
            need = serving.prompt_tokens + serving.output_tokens
            best: Replica | None = None
            for replica in self._fleet.ready(WorkerRole.DECODE):
                size = len(replica.batch)
                # What is larger than a whole worker's room is let onto an empty one.
                fits = size < site.max_running and (not size or replica.held_tokens + need <= site.kv_tokens)
                if fits and (best is None or size < len(best.batch)):
                    best = replica
            if best is None:
                return
            self._streams.popleft()
            self._ends(best.join(serving, self._now_ms))
            self._plan_end(best)

    def _plan_end(self, replica: Replica) -> None:
        replica.planned += 1
        if replica.batch:
            self._at(replica.next_end_ms(), self._answered, (replica, replica.planned))

    def _answered(self, planned: tuple[Replica, int]) -> None:
        replica, which = planned
        if which != replica.planned:
            return
        self._ends(replica.advance(self._now_ms))
        self._plan_end(replica)
        self._place_streams()
        self._fleet.settle(replica, self._now_ms)

    def _ends(self, ended: list[tuple[Serving, float]]) -> None:
        for serving, at_ms in ended:
            self._end(serving, at_ms)

    def _end(self, serving: Serving, at_ms: float) -> None:
        serving.ended_ms = at_ms + HOP_MS
        self._ended.append(serving)
        self._unended -= 1
        for index in self._load.followers.get(serving.call.index, ()):
            call = self._load.calls[index]
            self._at(max(call.arrival_ms, serving.ended_ms + call.think_ms), self._arrive, index)

    # -- workers

    def _ready(self, replica: Replica) -> None:
        self._plan_failure(replica)
        self._feed()
        self._place_streams()

    def _plan_failure(self, replica: Replica) -> None:
        life_ms = self._fleet.draw_life_ms()
        if life_ms is not None:
            self._at(self._now_ms + life_ms, self._fail, (replica, replica.ready_ms))

    def _fail(self, failing: tuple[Replica, float]) -> None:
        replica, ready_ms = failing
        if replica.life is Life.GONE or replica.ready_ms != ready_ms:
            return
        lost = [*replica.prompts]
        self._ends(replica.advance(self._now_ms))
        for serving in replica.leave():
            serving.uncached_tokens = serving.prompt_tokens
            lost.append(serving)
        replica.prompts = ()
        replica.planned += 1
        for serving in lost:
            self._line.add_again(serving)
        self._fleet.failed(replica, self._now_ms)
        self._feed()

    def _emptied(self, replica: Replica) -> None:
        """Its drain took too long: its streams go on elsewhere, once their blocks are there."""
        self._ends(replica.advance(self._now_ms))
        for serving in replica.leave():
            self._moved_streams += 1
            self._joining += 1
            self._at(self._now_ms + self._transfer_ms(serving.prompt_tokens), self._stream, serving)
        replica.planned += 1
        self._fleet.settle(replica, self._now_ms)

    # -- deciding

    def _decide(self, _: None) -> None:
        if self._now_ms > self._span_ms + _PATIENCE_MS:
            raise StarvedError(
                f"{self._scaler.name} left {self._unended} requests without workers: give pools room to grow "
                "(--max-prefill, --max-decode), or a least size of 1"
            )
        seen = Seen(
            now_ms=self._now_ms,
            since_ms=self._decided_ms,
            prefill=self._seen(WorkerRole.PREFILL),
            decode=self._seen(WorkerRole.DECODE),
            arrived=self._arrived,
            first_tokens=self._first_tokens,
            ended=self._ended,
        )
        self._arrived, self._first_tokens, self._ended = [], [], []
        self._decided_ms = self._now_ms
        self._fleet.want(self._scaler.decide(seen), self._now_ms)
        self._feed()
        self._place_streams()
        self._at(self._now_ms + self._scaler.interval_ms, self._decide, None)

    def _seen(self, role: WorkerRole) -> PoolSeen:
        fleet = self._fleet
        mine = fleet.ready(role)
        requests = tokens = running = kv_tokens = 0
        if role is WorkerRole.PREFILL:
            requests, tokens = len(self._line), self._line.queued_tokens
            for replica in fleet.workers:
                requests += len(replica.prompts)
                tokens += sum(serving.uncached_tokens for serving in replica.prompts)
        else:
            requests = len(self._streams) + self._joining
            for replica in fleet.workers:
                running += len(replica.batch)
                kv_tokens += replica.batch.context_tokens
        return PoolSeen(
            role=role,
            wanted=fleet.wanted.of(role),
            ready=len(mine),
            starting_ms=fleet.starting_ms(role, self._now_ms),
            draining=fleet.draining(role),
            queued_requests=requests,
            queued_tokens=tokens,
            running=running,
            kv_tokens=kv_tokens,
            start_ms=fleet.start_times[role].mean_ms,
            drain_ms=fleet.drain_times[role].mean_ms,
        )

    def _at(self, time_ms: float, call: Callable[[Any], None], subject: Any) -> None:
        heapq.heappush(self._events, (time_ms, next(self._order), call, subject))
