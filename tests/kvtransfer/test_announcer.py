"""What a worker writes, against a real server that is emptied, frozen, killed and lied to."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from antiphon_kvtransfer.access import RedisUrlError, redacted
from antiphon_kvtransfer.announcer import EVENTS_KEPT, WorkerAnnouncer
from antiphon_kvtransfer.identity import BlockHash
from antiphon_kvtransfer.keys import ModelKeys
from antiphon_kvtransfer.records import decode_record

from tests.support.membership import FakeEngine, announcing, block, record, until
from tests.support.valkey import Valkey

KEYS = ModelKeys("demo")


@pytest.fixture
def server() -> Iterator[Valkey]:
    with Valkey() as running:
        yield running


def connect(server: Valkey) -> Any:
    return redis.Redis.from_url(server.url, protocol=2)


def written(server: Valkey, worker_id: str = "w0") -> tuple[str, int, set[bytes]]:
    """(incarnation, sequence, set) as they lie in Redis."""
    with connect(server) as client:
        incarnation, sequence = client.hmget(KEYS.index(worker_id), "incarnation", "sequence")
        return (incarnation or b"").decode(), int(sequence or -1), set(client.smembers(KEYS.blocks(worker_id)))


def tells_the_truth(server: Valkey, engine: FakeEngine, incarnation: str = "i1") -> bool:
    return written(server) == (incarnation, engine.sequence, engine.held)


async def test_record_and_index_are_written(server: Valkey) -> None:
    engine = FakeEngine()
    engine.change({block(1), block(2)})
    async with announcing(server.url, engine, record(role="decode")) as announcer:
        await until(lambda: announcer.healthy)
        engine.change({block(3)}, {block(1)})
        await until(lambda: tells_the_truth(server, engine))
        assert announcer.republished == 1
        with connect(server) as client:
            found = decode_record(client.get(KEYS.record("w0")), "w0")
            assert (found.role, found.ttl_ms) == ("decode", 2000)
            assert client.zrange("antiphon:models", 0, -1) == [b"demo"]


async def test_many_changes_are_few_deltas_with_the_right_result(server: Valkey) -> None:
    engine, source = FakeEngine(), random.Random(3)
    async with announcing(server.url, engine) as announcer:
        await until(lambda: announcer.healthy)
        for _ in range(500):
            engine.churn(source)
        await until(lambda: tells_the_truth(server, engine))
        assert announcer.republished == 1
        with connect(server) as client:
            assert client.xlen(KEYS.events) < 50


async def test_changes_may_come_from_any_thread(server: Valkey) -> None:
    engine = FakeEngine()
    async with announcing(server.url, engine) as announcer:
        await until(lambda: announcer.healthy)
        thread = threading.Thread(target=lambda: [engine.change({block(index)}) for index in range(300)])
        thread.start()
        await until(lambda: not thread.is_alive() and tells_the_truth(server, engine))


async def test_emptied_restarted_and_flushed(server: Valkey) -> None:
    engine = FakeEngine()
    async with announcing(server.url, engine) as announcer:
        engine.change({block(1)})
        await until(lambda: tells_the_truth(server, engine))
        server.restart_empty()
        engine.change({block(2)})
        await until(lambda: tells_the_truth(server, engine))
        with connect(server) as client:
            client.flushall()
        await until(lambda: tells_the_truth(server, engine) and announcer.healthy)
        with connect(server) as client:
            assert client.get(KEYS.record("w0")) is not None


@pytest.mark.parametrize("lost", ["blocks", "index", "half the set", "older sequence"])
async def test_lost_data_is_noticed_and_written_again(server: Valkey, lost: str) -> None:
    """llm-d/llm-d-router#1737: index equals engine again. Also with nothing new to say (the heartbeat asks)."""
    engine = FakeEngine()
    engine.change({block(1), block(2)})
    async with announcing(server.url, engine, ttl_ms=800) as announcer:
        await until(lambda: tells_the_truth(server, engine))
        with connect(server) as client:
            match lost:
                case "blocks":
                    client.delete(KEYS.blocks("w0"))
                case "index":
                    client.delete(KEYS.index("w0"))
                case "half the set":
                    client.srem(KEYS.blocks("w0"), block(1))
                case "older sequence":
                    client.hset(KEYS.index("w0"), "sequence", 0)
        await until(lambda: announcer.republished == 2)
        assert tells_the_truth(server, engine)


@pytest.mark.parametrize("lost", ["blocks", "index"])
async def test_lost_data_is_noticed_by_the_next_delta(server: Valkey, lost: str) -> None:
    """Long before the next heartbeat."""
    engine = FakeEngine()
    engine.change({block(1), block(2)})
    async with announcing(server.url, engine, ttl_ms=60_000) as announcer:
        await until(lambda: tells_the_truth(server, engine))
        connect(server).delete(KEYS.blocks("w0") if lost == "blocks" else KEYS.index("w0"))
        engine.change({block(3)})
        await until(lambda: tells_the_truth(server, engine) and announcer.republished == 2)


async def test_a_write_whose_reply_was_lost_is_not_written_twice(server: Valkey) -> None:
    engine = FakeEngine()
    async with announcing(server.url, engine) as announcer:
        await until(lambda: announcer.healthy)
        server.freeze()
        engine.change({block(1)})
        await until(lambda: not announcer.healthy)
        engine.change({block(2)}, {block(1)})
        server.thaw()
        await until(lambda: tells_the_truth(server, engine) and announcer.healthy)
        with connect(server) as client:
            deltas = [fields for _, fields in client.xrange(KEYS.events) if fields[b"kind"] == b"delta"]
        sequences = [int(fields[b"sequence"]) for fields in deltas]
        assert sequences == sorted(set(sequences))
        assert announcer.republished == 1


async def test_changes_in_an_outage_are_bounded(server: Valkey) -> None:
    engine = FakeEngine()
    async with announcing(server.url, engine, max_pending_hashes=50) as announcer:
        await until(lambda: announcer.healthy)
        server.kill()
        for index in range(10_000):
            engine.change({block(index % 100)}, {block((index + 50) % 100)})
            assert announcer._pending._hashes <= 50
        server.start()
        await until(lambda: announcer.healthy and tells_the_truth(server, engine))


async def test_an_empty_change_is_bounded_too(server: Valkey) -> None:
    engine = FakeEngine()
    announcer = WorkerAnnouncer(server.url, record(), engine.snapshot, max_pending_hashes=50)
    for sequence in range(1, 1000):
        announcer.block_change(sequence, (), ())
    assert len(announcer._pending._changes) <= 50


async def test_a_missed_change_leads_to_a_snapshot(server: Valkey) -> None:
    engine = FakeEngine()
    async with announcing(server.url, engine) as announcer:
        await until(lambda: announcer.healthy)
        engine.announcer = None
        engine.change({block(1)})
        engine.announcer = announcer
        engine.change({block(2)})
        await until(lambda: tells_the_truth(server, engine) and announcer.republished == 2)


async def test_updates_are_written_at_once(server: Valkey) -> None:
    engine = FakeEngine()
    async with announcing(server.url, engine, ttl_ms=60_000) as announcer:
        await until(lambda: announcer.healthy)
        announcer.update(record(draining=True, role="prefill", role_version=2))

        def seen() -> bool:
            with connect(server) as client:
                found = decode_record(client.get(KEYS.record("w0")), "w0")
            return (found.draining, found.role, found.role_version) == (True, "prefill", 2)

        await until(seen, deadline_s=3)
        with pytest.raises(ValueError, match="one incarnation"):
            announcer.update(record(incarnation="i2"))


async def test_withdraw_leaves_nothing_of_the_worker(server: Valkey) -> None:
    engine, other = FakeEngine(), FakeEngine()
    engine.change({block(1)})
    other.change({block(1)})
    async with announcing(server.url, engine) as announcer, announcing(server.url, other, record("w1")):
        await until(lambda: tells_the_truth(server, engine) and bool(written(server, "w1")[2]))
        await announcer.withdraw()
        engine.change({block(2)})
        announcer.update(record(draining=True))
        # More than one heartbeat: nothing is written any more, and the task is its owner's to end.
        await asyncio.sleep(0.7)
        assert [task for task in asyncio.all_tasks() if "WorkerAnnouncer.run" in repr(task)]
        with connect(server) as client:
            assert [key for key in client.scan_iter() if key.endswith(b":w0")] == []
            assert client.zrange(KEYS.workers, 0, -1) == [b"w1"]
            assert client.smembers(KEYS.blocks("w1")) == {block(1)}


async def test_withdraw_with_redis_gone_ends_soon(server: Valkey) -> None:
    engine = FakeEngine()
    async with announcing(server.url, engine) as announcer:
        await until(lambda: announcer.healthy)
        server.freeze()
        async with asyncio.timeout(5):
            await announcer.withdraw()
        server.thaw()


async def test_after_a_kill_nothing_stays(server: Valkey) -> None:
    engine = FakeEngine()
    engine.change({block(1)})
    async with announcing(server.url, engine, ttl_ms=300):
        await until(lambda: tells_the_truth(server, engine))

    def empty() -> bool:
        with connect(server) as client:
            return bool(client.dbsize() == 0)

    assert not empty()
    await until(empty)


async def test_a_survivor_sweeps_the_list_of_workers(server: Valkey) -> None:
    survivor = FakeEngine()
    async with announcing(server.url, survivor, record("w1"), ttl_ms=300):
        async with announcing(server.url, FakeEngine(), ttl_ms=300) as killed:
            await until(lambda: killed.healthy)

        def swept() -> bool:
            with connect(server) as client:
                return bool(client.zrange(KEYS.workers, 0, -1) == [b"w1"])

        await until(swept)


async def test_a_restarted_worker_takes_over_and_the_old_one_cannot_return(server: Valkey) -> None:
    """llm-d/llm-d-router#2853: a new incarnation starts at sequence 0; the old one's blocks are void."""
    old, new = FakeEngine(), FakeEngine()
    old.change({block("old")})
    async with announcing(server.url, old, record(incarnation="i1", started_at_ms=1), ttl_ms=400) as superseded:
        await until(lambda: tells_the_truth(server, old))
        async with announcing(server.url, new, record(incarnation="i2", started_at_ms=2)) as owner:
            await until(lambda: tells_the_truth(server, new, "i2"))
            old.change({block("old2")})
            await until(lambda: not superseded.healthy)
            new.change({block("new")})
            await until(lambda: tells_the_truth(server, new, "i2"))
            # Several of the old one's heartbeats: none may take the keys back.
            for _ in range(50):
                await asyncio.sleep(0.01)
                assert tells_the_truth(server, new, "i2")
            assert not superseded.healthy
            assert owner.healthy
            assert owner.republished == 1


async def test_the_stream_is_trimmed(server: Valkey) -> None:
    with connect(server) as client:
        for _ in range(EVENTS_KEPT // 500):
            pipeline = client.pipeline()
            for _ in range(1000):
                pipeline.xadd(KEYS.events, {"kind": "none", "worker": ""})
            pipeline.execute()
    engine = FakeEngine()
    async with announcing(server.url, engine) as announcer:
        await until(lambda: announcer.healthy)
        with connect(server) as client:
            assert client.xlen(KEYS.events) < EVENTS_KEPT * 1.1


async def test_unix_sockets_and_large_sets() -> None:
    with Valkey(unix=True) as server:
        engine = FakeEngine()
        engine.change({BlockHash(index.to_bytes(16, "little")) for index in range(30_000)})
        async with announcing(server.url, engine):
            await until(lambda: tells_the_truth(server, engine))


async def test_credentials_are_never_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with Valkey(password="s3cret") as server:
        async with announcing(server.url, FakeEngine()) as announcer:
            await until(lambda: announcer.healthy)
            server.kill()
            await until(lambda: not announcer.healthy)
        server.start()
        async with announcing(server.url.replace("s3cret", "wr0ng"), FakeEngine()):
            await until(lambda: "refuses the user name or the password" in caplog.text)
    assert "s3cret" not in caplog.text
    assert "wr0ng" not in caplog.text
    with pytest.raises(RedisUrlError) as raised:
        WorkerAnnouncer("http://user:s3cret@host/", record(), FakeEngine().snapshot)
    assert "s3cret" not in str(raised.value)


def test_redacted() -> None:
    assert redacted("rediss://user:pw@host:6380/1?password=pw") == "rediss://host:6380/1"
    assert redacted("unix://user:pw@/run/valkey.sock?db=1") == "unix:///run/valkey.sock"
    assert "pw" not in redacted("redis://user:pw@host:notaport")
