"""The loop: news of the gateway in, decisions out, and the crew follows them. The gateway is told the promise, as an
operator would tell it, by the model's record in Redis.

One task, owned by the supervisor. Whatever fails in a look (Valkey is being restarted, a worker does not answer) is
said once, and the next look begins from what there is then. Without news the law freezes sizes by itself.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from antiphon_kvtransfer import RedisAccess
from antiphon_kvtransfer.keys import ModelKeys
from antiphon_kvtransfer.model_record import ModelRecord, encode_model_record
from antiphon_kvtransfer.scaling_decisions import DecisionsUnavailable, read_memory
from antiphon_kvtransfer.scaling_news import read_news
from antiphon_policy.route_records import WorkerRole
from antiphon_policy.scaling import (
    GatewayNews,
    ModelSetup,
    PoolSetup,
    ScalingDecision,
    ScalingInputs,
    ScalingNewsError,
    decide,
    decode_news,
    merged,
)
from antiphon_policy.scaling.assembly import figures_of, is_fresh, workers_of
from antiphon_policy.scaling.remembered import PoolPast, Remembered, RememberedError, decode_remembered
from antiphon_policy.scaling.victims import losses
from redis.asyncio import Redis
from redis.exceptions import RedisError

from antiphon.autoscale.crew import Crew, Place
from antiphon.autoscale.goals import Bounds, Goals
from antiphon.autoscale.moves import Moves, Worker, moves_of
from antiphon.autoscale.telling import DecisionLog
from antiphon.console import Console

log = logging.getLogger("antiphon.autoscale")

EVERY_S = 2.0
"""As often as gateways write their news."""
_REDIS_DEADLINE_S = 3.0
RECORD_TTL_MS = 60_000
"""After the supervisor's end nothing is promised any more."""


class Autoscaler:
    """See the module."""

    def __init__(
        self, goals: Goals, crew: Crew, redis_url: str, model: str, console: Console, record: Path | None = None
    ) -> None:
        """`record`: where decisions are added, beside Redis."""
        self._goals = goals
        self._crew = crew
        self._model = model
        self._console = console
        self._access = RedisAccess(redis_url)
        self._log = DecisionLog(self._access, model, record, console.say)
        self._remembered = Remembered()
        self._trouble = ""

    async def run(self) -> None:
        """Until cancelled."""
        self._remembered = await self._what_was()
        while True:
            began = time.monotonic()
            try:
                await self.look()
                self._trouble = ""
            except (RedisError, OSError, TimeoutError) as error:
                self._complain(f"no look at the load: Redis is away ({type(error).__name__})")
            except Exception as error:
                log.exception("a look at the load failed by a fault of this program")
                self._complain(f"no look at the load: {type(error).__name__}: {error}; the sizes stay")
            await asyncio.sleep(max(0.1, EVERY_S - (time.monotonic() - began)))

    async def look(self) -> ScalingDecision:
        """One decision, and what follows of it. Raises what Redis raises."""
        await self._crew.tell_all()
        news = await self._news()
        inputs = self._inputs(news, time.time() * 1e3)
        # On a thread: it takes some tens of milliseconds, in which the loop serves its children.
        decision = await asyncio.to_thread(decide, inputs)
        self._remembered = msgspec.structs.replace(self._remembered, memory=decision.memory)
        workers = workers_of(one for one in news if is_fresh(one, decision.at_ms))
        computing = WorkerRole.PREFILL if len(self._goals.pools) == 2 else WorkerRole.BOTH
        lost_ms = losses(workers.values(), self._remembered.of(computing).figures)
        await self._act(moves_of(decision, self._workers(), lost_ms))
        await self._log.tell(decision, self._remembered)
        return decision

    # -- what is known

    async def _news(self) -> Sequence[GatewayNews]:
        async with asyncio.timeout(_REDIS_DEADLINE_S), Redis.from_url(self._access.url) as redis:
            record = encode_model_record(self._record())
            await redis.set(ModelKeys(self._model).model_record, record, px=RECORD_TTL_MS)
            raw = await read_news(redis, self._model)
        found = []
        for gateway_id, told in raw.items():
            try:
                found.append(decode_news(told, gateway_id))
            except ScalingNewsError as error:
                self._complain(str(error))
        return found

    def _inputs(self, news: Sequence[GatewayNews], now_ms: float) -> ScalingInputs:
        """What is known now. What was measured since the last look is remembered."""
        remembered = self._remembered
        fresh = [one for one in news if is_fresh(one, now_ms)]
        workers = workers_of(fresh)
        for bounds in self._goals.pools:
            figures = figures_of(workers.values(), bounds.role)
            if figures is not None:
                past = msgspec.structs.replace(remembered.of(bounds.role), figures=figures)
                remembered = remembered.with_pool(past)
        times = self._crew.take_times()
        for role, took_ms in times.started:
            remembered = remembered.with_pool(remembered.of(role).started(took_ms))
        for role, took_ms in times.drained:
            remembered = remembered.with_pool(remembered.of(role).drained(took_ms))
        remembered = msgspec.structs.replace(remembered, history=remembered.history.heard(fresh))
        self._remembered = remembered
        setup = ModelSetup(
            promise=self._goals.promise,
            pools=tuple(self._setup(bounds, remembered.of(bounds.role)) for bounds in self._goals.pools),
            budget_devices=self._budget(),
            may_switch=self._goals.may_switch and not any(place.keeps_role for place in self._crew.places),
        )
        return merged(news, setup, remembered.history, remembered.memory, now_ms)

    def _setup(self, bounds: Bounds, past: PoolPast) -> PoolSetup:
        places, now = self._crew.of(bounds.role), time.monotonic()
        return PoolSetup(
            role=bounds.role,
            size=len(places),
            ready=sum(1 for place in places if place.ready),
            starting_ms=tuple(
                max(0.0, past.start_ms - (now - place.asked_at) * 1e3) for place in places if not place.ready
            ),
            draining=self._crew.leaving(bounds.role),
            floor=bounds.least,
            ceiling=bounds.most,
            start_ms=past.start_ms,
            drain_ms=past.drain_ms if past.drains_ms else min(past.drain_ms, self._goals.most_drain_ms),
            shape="as all here" if self._goals.may_switch else "",
            figures=past.figures,
        )

    def _budget(self) -> int:
        """Workers in all. While the last one could not be started there are no more than there are."""
        if not self._crew.resting:
            return self._goals.most_workers
        return sum(1 for place in self._crew.places if not place.leaving)

    def _workers(self) -> list[Worker]:
        return [
            Worker(place.name, place.role, place.ready, place.born, place.keeps_role)
            for place in self._crew.places
            if not place.leaving
        ]

    def _record(self) -> ModelRecord:
        """What the gateway has to know: it routes so that the promise is kept, and gives nothing to who leaves."""
        promise = self._goals.promise
        return ModelRecord(
            model=self._model,
            generation=1,
            names=(self._model,),
            revisions={"": 1000},
            draining=tuple(place.name for place in self._crew.places if place.leaving),
            ttft_p95_ms=promise.ttft.base_ms if promise.ttft is not None else None,
            ttft_per_thousand_tokens_ms=promise.ttft.per_thousand_tokens_ms if promise.ttft is not None else 0.0,
            tpot_p95_ms=promise.tpot.limit_ms if promise.tpot is not None else None,
            ttl_ms=RECORD_TTL_MS,
        )

    async def _what_was(self) -> Remembered:
        """What an earlier supervisor on this Redis remembered; else what was measured here is all there is."""
        try:
            raw = await read_memory(self._access, self._model)
            return decode_remembered(raw) if raw else Remembered()
        except (DecisionsUnavailable, RememberedError) as error:
            self._complain(str(error))
            return Remembered()

    # -- what is done

    async def _act(self, moves: Moves) -> None:
        by_name: Mapping[str, Place] = {place.name: place for place in self._crew.places if not place.leaving}
        for name, role in moves.switch:
            self._console.say(f"autoscale: {name} becomes a {role.value} worker; its cache stays")
            await self._crew.switch(by_name[name], role)
        for role in moves.start:
            place = self._crew.start(role)
            self._console.say(f"autoscale: {place.name} is started")
        for name in moves.end:
            self._console.say(f"autoscale: {name} drains and ends")
            self._crew.retire(by_name[name])

    def _complain(self, line: str) -> None:
        if line != self._trouble:
            self._trouble = line
            self._console.say(f"autoscale: {line}")
