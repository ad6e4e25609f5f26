"""The gateway's mirror, against a real server and real announcers, through everything Redis may do."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import redis
from antiphon_kvtransfer import _scripts
from antiphon_kvtransfer.access import RedisUrlError
from antiphon_kvtransfer.cluster import ClusterMirror
from antiphon_kvtransfer.keys import ModelKeys
from antiphon_kvtransfer.mirror import Position
from antiphon_kvtransfer.records import RecordLedger

from tests.support.membership import FakeEngine, announcing, block, record, until
from tests.support.valkey import Valkey

KEYS = ModelKeys("demo")


@pytest.fixture
def server() -> Iterator[Valkey]:
    with Valkey() as running:
        yield running


def connect(server: Valkey) -> Any:
    return redis.Redis.from_url(server.url, protocol=2)


@contextlib.asynccontextmanager
async def mirroring(
    server: Valkey, *, look_ms: int = 300, max_blocks: int = 100_000, on_change: Callable[[], None] = lambda: None
) -> AsyncIterator[ClusterMirror]:
    mirror = ClusterMirror(server.url, on_change=on_change, look_ms=look_ms, max_blocks=max_blocks)
    task = asyncio.create_task(mirror.run())
    try:
        yield mirror
        assert not task.done(), "the mirror ended by itself"
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def equal(mirror: ClusterMirror, engine: FakeEngine, worker_id: str = "w0") -> bool:
    return mirror.blocks.contents("demo", worker_id) == engine.held


@contextlib.asynccontextmanager
async def fleet(server: Valkey, size: int, ttl_ms: int = 2000) -> AsyncIterator[list[FakeEngine]]:
    async with contextlib.AsyncExitStack() as stack:
        engines = [FakeEngine() for _ in range(size)]
        for number, engine in enumerate(engines):
            await stack.enter_async_context(announcing(server.url, engine, record(f"w{number}"), ttl_ms=ttl_ms))
        yield engines


def all_equal(mirror: ClusterMirror, engines: list[FakeEngine]) -> bool:
    return all(equal(mirror, engine, f"w{number}") for number, engine in enumerate(engines))


def write_delta(client: Any, previous: int, sequence: int, *, stored: bytes = b"", removed: bytes = b"") -> None:
    """As the announcer of incarnation i1 of w0 would."""
    keys = (KEYS.index("w0"), KEYS.blocks("w0"), KEYS.events)
    client.eval(_scripts.WRITE_DELTA, 3, *keys, "w0", "i1", previous, sequence, removed, stored, 60_000, 1000)


async def test_workers_and_blocks_appear_and_follow(server: Valkey) -> None:
    changes: list[int] = []
    async with mirroring(server, on_change=lambda: changes.append(1)) as mirror, fleet(server, 3) as engines:
        await until(lambda: mirror.workers().keys() == {"w0", "w1", "w2"})
        assert changes
        source = random.Random(5)
        for _ in range(100):
            for engine in engines:
                engine.churn(source)
            await asyncio.sleep(0)
        await until(lambda: all_equal(mirror, engines))
        chain = [block("a"), block("b"), block("c")]
        engines[0].change({*chain})
        engines[1].change({*chain[:2]})
        await until(lambda: mirror.blocks.leading_blocks("demo", chain) == {"w0": 3, "w1": 2})
        assert mirror.healthy


async def test_a_gateway_that_starts_late_converges(server: Valkey) -> None:
    """ai-dynamo/dynamo#4904: a restarted front end must find all workers and models."""
    async with fleet(server, 3) as engines, announcing(server.url, FakeEngine(), record("other", model="o/{x}")):
        for engine in engines:
            engine.churn(random.Random(1))
        for _ in range(2):
            async with mirroring(server) as mirror:
                await until(lambda: mirror.workers().keys() == {"w0", "w1", "w2", "other"})
                await until(lambda: all_equal(mirror, engines))
                assert mirror.workers()["other"].model == "o/{x}"


async def test_redis_killed_and_restarted_empty_under_change(server: Valkey) -> None:
    """The mirror equals the workers' true contents within 5 s, and no worker is ever dropped."""
    seen: list[int] = []
    async with (
        fleet(server, 4) as engines,
        mirroring(server, on_change=lambda: seen.append(len(mirror.workers()))) as mirror,
    ):
        await until(lambda: len(mirror.workers()) == 4)
        source = random.Random(9)
        for _ in range(3):
            seen.clear()
            epoch = mirror.epoch
            for engine in engines:
                engine.churn(source)
            server.kill()
            for engine in engines:
                engine.churn(source)
            await until(lambda: not mirror.healthy)
            assert len(mirror.workers()) == 4
            server.start()
            for engine in engines:
                engine.churn(source)
            await until(lambda: mirror.healthy and all_equal(mirror, engines), deadline_s=5)
            await until(lambda: len(connect(server).zrange(KEYS.workers, 0, -1)) == 4)
            assert mirror.epoch > epoch
            assert set(seen) <= {4}


async def test_flushed(server: Valkey) -> None:
    seen: list[int] = []
    async with (
        fleet(server, 2) as engines,
        mirroring(server, on_change=lambda: seen.append(len(mirror.workers()))) as mirror,
    ):
        for engine in engines:
            engine.churn(random.Random(2))
        await until(lambda: len(mirror.workers()) == 2 and all_equal(mirror, engines))
        seen.clear()
        connect(server).flushall()
        for engine in engines:
            engine.churn(random.Random(3))
        await until(lambda: all_equal(mirror, engines))
        await until(lambda: len(connect(server).zrange(KEYS.workers, 0, -1)) == 2)
        assert set(seen) <= {2}


async def test_frozen_redis_freezes_the_mirror_and_nothing_else(server: Valkey) -> None:
    """Longer than the records' time to live: when Redis goes on, all records have run out, all workers stay."""
    seen: list[int] = []
    async with (
        fleet(server, 2, ttl_ms=600) as engines,
        mirroring(server, on_change=lambda: seen.append(len(mirror.workers()))) as mirror,
    ):
        for engine in engines:
            engine.churn(random.Random(2))
        await until(lambda: len(mirror.workers()) == 2 and all_equal(mirror, engines))
        seen.clear()
        server.freeze()
        before = [mirror.blocks.contents("demo", f"w{number}") for number in range(2)]
        await until(lambda: not mirror.healthy)
        for engine in engines:
            engine.churn(random.Random(3))
        await asyncio.sleep(1.0)
        assert [mirror.blocks.contents("demo", f"w{number}") for number in range(2)] == before
        server.thaw()
        await until(lambda: mirror.healthy and all_equal(mirror, engines))
        assert set(seen) <= {2}


async def test_a_killed_worker_is_gone_after_its_time_and_leaves_nothing(server: Valkey) -> None:
    async with mirroring(server) as mirror, announcing(server.url, FakeEngine(), record("w1"), ttl_ms=400):
        engine = FakeEngine()
        engine.change({block(1)})
        async with announcing(server.url, engine, ttl_ms=400):
            await until(lambda: mirror.workers().keys() == {"w0", "w1"} and equal(mirror, engine))
        await until(lambda: mirror.workers().keys() == {"w1"})
        assert mirror.blocks.contents("demo", "w0") == frozenset()
        await until(lambda: not [key for key in connect(server).scan_iter() if key.endswith(b":w0")])


async def test_a_withdrawn_worker_is_gone_at_once(server: Valkey) -> None:
    engine = FakeEngine()
    engine.change({block(1)})
    async with mirroring(server, look_ms=2000) as mirror, announcing(server.url, engine, ttl_ms=60_000) as announcer:
        await until(lambda: equal(mirror, engine))
        await announcer.withdraw()
        await until(lambda: not mirror.workers(), deadline_s=1.5)
        assert mirror.blocks.contents("demo", "w0") == frozenset()


async def test_a_restart_in_place_voids_the_old_contents(server: Valkey) -> None:
    """llm-d/llm-d-router#2853: engine restarts in place, sequence from 0; the index keeps its old blocks."""
    old, new = FakeEngine(), FakeEngine()
    for number in range(5):
        old.change({block(number)})
    async with mirroring(server) as mirror:
        async with announcing(server.url, old, record(incarnation="i1", started_at_ms=1)):
            await until(lambda: equal(mirror, old))
        new.change({block("new")})
        async with announcing(server.url, new, record(incarnation="i2", started_at_ms=2)):
            await until(lambda: equal(mirror, new))
            assert mirror.workers()["w0"].incarnation == "i2"
            assert mirror.blocks.position("demo", "w0") == Position("i2", 1)


async def test_a_lost_delta_is_found_by_the_next_one(server: Valkey) -> None:
    """llm-d/llm-d-router#1737: sequence gaps never checked, dropped events lost for good."""
    engine = FakeEngine()
    engine.change({block(1)})
    async with announcing(server.url, engine, ttl_ms=60_000):
        await until(lambda: connect(server).scard(KEYS.blocks("w0")) == 1)
    # Looks too rare to help: only the next delta can tell.
    async with mirroring(server, look_ms=60_000) as mirror:
        await until(lambda: equal(mirror, engine))
        with connect(server).pipeline(transaction=True) as pipeline:
            write_delta(pipeline, 1, 2, stored=block(2))
            pipeline.xtrim(KEYS.events, 0)
            write_delta(pipeline, 2, 3, stored=block(3))
            pipeline.execute()
        await until(lambda: mirror.blocks.contents("demo", "w0") == {block(1), block(2), block(3)})
        assert mirror.counters.gaps == 1


@pytest.mark.parametrize("harm", ["trimmed", "deleted", "backward"])
async def test_lost_events_show_in_the_next_look(server: Valkey, harm: str) -> None:
    """No further delta comes, so only the comparison with Redis can tell."""
    engine = FakeEngine()
    async with mirroring(server) as mirror:
        async with announcing(server.url, engine, ttl_ms=60_000):
            engine.change({block(1)})
            await until(lambda: equal(mirror, engine))
        with connect(server).pipeline(transaction=True) as pipeline:
            write_delta(pipeline, 1, 2, stored=block("extra"))
            match harm:
                case "trimmed":
                    pipeline.xtrim(KEYS.events, 0)
                    pipeline.xadd(KEYS.events, {"kind": "of a later version", "worker": "w0"})
                case "deleted":
                    pipeline.delete(KEYS.events)
                case "backward":
                    pipeline.delete(KEYS.events)
                    pipeline.xadd(KEYS.events, {"kind": "record", "worker": "w0"}, id="1-1")
            pipeline.execute()
        await until(lambda: mirror.blocks.contents("demo", "w0") == engine.held | {block("extra")})
        assert mirror.blocks.position("demo", "w0") == Position("i1", 2)
        assert mirror.counters.gaps == 0
        assert (mirror.counters.catch_ups > 0) == (harm == "trimmed"), "a stream that went backward reloads all"


async def test_an_older_copy_of_redis_is_corrected_by_its_writer(server: Valkey) -> None:
    """As after a fail-over to a replica that lagged: same process, older content."""
    engine = FakeEngine()
    async with mirroring(server) as mirror, announcing(server.url, engine, ttl_ms=800):
        engine.change({block(1)})
        await until(lambda: equal(mirror, engine))
        dump = connect(server).dump(KEYS.blocks("w0"))
        older = connect(server).hgetall(KEYS.index("w0"))
        engine.change({block(2)}, {block(1)})
        await until(lambda: equal(mirror, engine))
        with connect(server).pipeline(transaction=True) as pipeline:
            pipeline.restore(KEYS.blocks("w0"), 20_000, dump, replace=True)
            pipeline.hset(KEYS.index("w0"), mapping=older)
            pipeline.execute()
        reloads = mirror.reloads
        await until(lambda: mirror.reloads > reloads and equal(mirror, engine))


async def test_a_damaged_record_hides_only_its_worker(server: Valkey, caplog: pytest.LogCaptureFixture) -> None:
    async with mirroring(server) as mirror, fleet(server, 1):
        with connect(server) as client:
            client.zadd(KEYS.workers, {"bad": 9e12})
            client.set(KEYS.record("bad"), "{")
        await until(lambda: "worker ignored" in caplog.text)
        assert mirror.workers().keys() == {"w0"}


async def test_a_mirror_that_is_too_small_stays_bounded_and_recovers(server: Valkey) -> None:
    """vllm-project/production-stack#687."""
    async with mirroring(server, max_blocks=50) as mirror, fleet(server, 2) as engines:
        engines[0].change({block(number) for number in range(40)})
        await until(lambda: equal(mirror, engines[0]))
        engines[1].change({block(number) for number in range(30)})
        await until(lambda: mirror.blocks.position("demo", "w1") == Position("i1", 1))
        assert mirror.blocks.blocks <= 50
        engines[0].change(set(), {block(number) for number in range(10, 40)})
        await until(lambda: all_equal(mirror, engines))


async def test_nothing_is_left_of_a_model_without_workers(server: Valkey) -> None:
    async with mirroring(server) as mirror:
        async with announcing(server.url, FakeEngine(), ttl_ms=300):
            await until(lambda: len(mirror.workers()) == 1)
        await until(lambda: not mirror._readers and not mirror.workers())


async def test_no_redis_at_all(server: Valkey) -> None:
    server.kill()
    async with mirroring(server) as mirror:
        await until(lambda: mirror.counters.outages > 1)
        assert not mirror.healthy
        assert not mirror.workers()
        server.start()
        await until(lambda: mirror.healthy)


def test_bad_urls_are_refused() -> None:
    with pytest.raises(RedisUrlError, match="use redis://"):
        ClusterMirror("localhost:6379", on_change=lambda: None)


class TestLedger:
    """A record that vanished counts only after one full time to live inside one unbroken epoch."""

    ONE = {"w0": record(ttl_ms=1000)}  # noqa: RUF012

    def test_missing_for_a_full_ttl(self) -> None:
        ledger = RecordLedger(max_gap_s=2)
        assert ledger.observe(0.0, "r", self.ONE)
        assert not ledger.observe(0.5, "r", {})
        assert not ledger.observe(1.4, "r", {})
        assert ledger.observe(1.5, "r", {})
        assert not ledger.records

    def test_seen_again_starts_anew(self) -> None:
        ledger = RecordLedger(max_gap_s=2)
        for now, shown in ((0.0, self.ONE), (0.5, {}), (1.4, self.ONE), (1.6, {}), (2.5, {})):
            ledger.observe(now, "r", shown)
        assert ledger.records == self.ONE

    @pytest.mark.parametrize("broken_by", ["restart", "outage", "pause"])
    def test_a_break_starts_anew(self, broken_by: str) -> None:
        ledger = RecordLedger(max_gap_s=2)
        ledger.observe(0.0, "r", self.ONE)
        ledger.observe(0.5, "r", {})
        if broken_by == "outage":
            ledger.interrupt()
        now, run_id = (9.0 if broken_by == "pause" else 1.6), ("r2" if broken_by == "restart" else "r")
        assert not ledger.observe(now, run_id, {})
        assert ledger.epoch == 2
        assert not ledger.observe(now + 0.9, run_id, {})
        assert ledger.observe(now + 1.0, run_id, {})

    def test_withdrawal_counts_only_for_its_incarnation(self) -> None:
        ledger = RecordLedger()
        ledger.observe(0.0, "r", self.ONE)
        assert not ledger.withdraw("w0", "other")
        assert ledger.withdraw("w0", "i1")
        assert not ledger.records
