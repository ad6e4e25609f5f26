"""Large sets and many workers: written in parts, read in pages, and still never half of anything.

The sizes of parts and pages are made small here, so that a few thousand blocks take as many steps as millions do.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import pytest
import redis
from antiphon_kvtransfer import _redis, _scripts, announcer, cluster
from antiphon_kvtransfer.cluster import ClusterMirror
from antiphon_kvtransfer.identity import BlockHash
from antiphon_kvtransfer.keys import MODELS_KEY
from antiphon_kvtransfer.mirror import BlockMirror, Position
from antiphon_kvtransfer.records import encode_record

from tests.support.index_scene import KEYS, START_DEADLINE_S, Scene
from tests.support.membership import FakeEngine, announcing, block, record, until
from tests.support.valkey import Valkey

PAGE = 50


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(announcer, "PART_HASHES", PAGE)
    monkeypatch.setattr(cluster, "HASHES_AT_ONCE", PAGE)
    monkeypatch.setattr(cluster, "WORKERS_AT_ONCE", 2)


@pytest.fixture
def server() -> Iterator[Valkey]:
    with Valkey() as running:
        yield running


Script = Callable[..., Awaitable[Any]]


@pytest.fixture
def before_script(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[str, Sequence[str]], Awaitable[None] | None]]:
    """Functions put in here are called with text and keys of each script before it is sent."""
    spies: list[Callable[[str, Sequence[str]], Awaitable[None] | None]] = []
    original: Script = _redis.RedisSession.script

    async def script(
        session: _redis.RedisSession, text: str, keys: Sequence[str], arguments: Sequence[Any], deadline_s: float
    ) -> Any:
        for spy in spies:
            waited = spy(text, keys)
            if waited is not None:
                await waited
        return await original(session, text, keys, arguments, deadline_s)

    monkeypatch.setattr(_redis.RedisSession, "script", script)
    return spies


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Position, frozenset[BlockHash]]]:
    """Each set that a mirror loaded, as it was loaded."""
    loads: list[tuple[Position, frozenset[BlockHash]]] = []
    original = BlockMirror.load

    def load(mirror: BlockMirror, model: str, worker_id: str, position: Position, hashes: Sequence[BlockHash]) -> None:
        loads.append((position, frozenset(hashes)))
        original(mirror, model, worker_id, position, hashes)

    monkeypatch.setattr(BlockMirror, "load", load)
    return loads


def connect(server: Valkey) -> Any:
    return redis.Redis.from_url(server.url, protocol=2)


def blocks(first: int, count: int) -> set[BlockHash]:
    return {block(number) for number in range(first, first + count)}


def write_set(client: Any, sequence: int, hashes: set[BlockHash], written: str) -> None:
    """As the announcer of incarnation i1 of w0 would."""
    client.eval(_scripts.LIST_MODEL, 1, MODELS_KEY, "demo", 60_000)
    client.eval(
        *(_scripts.HEARTBEAT, 5, KEYS.record("w0"), KEYS.index("w0"), KEYS.blocks("w0"), KEYS.workers, KEYS.events),
        *("w0", "i1", 1, encode_record(record()), 60_000, 60_000, 1000),
    )
    client.eval(
        *(_scripts.WRITE_ALL, 4, KEYS.index("w0"), KEYS.blocks("w0"), KEYS.events, KEYS.part("w0", written)),
        *("w0", "i1", 1, sequence, b"".join(hashes), len(hashes), written, 60_000, 1000),
    )


@contextlib.asynccontextmanager
async def mirroring(server: Valkey, look_ms: int = 100) -> Any:
    mirror = ClusterMirror(server.url, on_change=lambda: None, look_ms=look_ms)
    task = asyncio.create_task(mirror.run())
    try:
        yield mirror
        assert not task.done()
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def test_a_set_that_changes_while_it_is_read(loaded: list[tuple[Position, frozenset[BlockHash]]]) -> None:
    """A dozen pages, and some change between any two of them: with the deltas in between the result is exact."""
    async with Scene(blocks=600) as scene:
        engine = scene.engines["w0"]
        for _ in range(4):
            await scene.kill_gateway()
            await scene.start_gateway()
            await scene.until_changed(1)
            await scene.until_true(START_DEADLINE_S)
        torn = [position for position, hashes in loaded if hashes != engine.held_at.get(position.sequence)]
        assert torn, "no set changed while it was read, so nothing was shown"


async def test_a_set_that_is_replaced_while_it_is_read(
    server: Valkey,
    loaded: list[tuple[Position, frozenset[BlockHash]]],
    before_script: list[Callable[[str, Sequence[str]], None]],
) -> None:
    """At the same sequence, as after a loss: only the name of the writing tells the pages of two sets apart."""
    first, second = blocks(0, 1000), blocks(5000, 1000)
    pages = 0

    def replace_after_ten_pages(text: str, keys: Sequence[str]) -> None:
        nonlocal pages
        pages += text == _scripts.READ_PAGE
        if pages == 10:
            pages += 1
            with connect(server) as client:
                client.delete(KEYS.index("w0"))
                write_set(client, 7, second, "b")

    with connect(server) as client:
        write_set(client, 7, first, "a")
    before_script.append(replace_after_ten_pages)
    async with mirroring(server) as mirror:
        await until(lambda: mirror.blocks.contents("demo", "w0") == second)
    assert {hashes for _, hashes in loaded} == {frozenset(second)}


async def test_pages_that_came_are_not_read_again_when_redis_does_not_answer(
    loaded: list[tuple[Position, frozenset[BlockHash]]],
    before_script: list[Callable[[str, Sequence[str]], None]],
) -> None:
    """Each fifth page is given up, so no session reads a set to its end; meanwhile one of them changes."""
    asked = given_up = 0

    def give_up_often(text: str, keys: Sequence[str]) -> None:
        nonlocal asked, given_up
        if text != _scripts.READ_PAGE:
            return
        asked += 1
        engine.change({block(f"new {asked}")}, {block(f"new {asked - 2}")} if asked > 2 else set())
        if asked % 5 == 0:
            given_up += 1
            raise TimeoutError("no answer")

    async with Scene(blocks=600) as scene:
        engine = scene.engines["w0"]
        await scene.kill_gateway()
        loaded.clear()
        before_script.append(give_up_often)
        await scene.start_gateway()
        await scene.until_true(START_DEADLINE_S)
        before_script.clear()
        assert given_up >= 3
        assert asked - given_up <= 60, "more pages were read than three sets have"


async def test_another_redis_is_read_from_the_start(
    server: Valkey, before_script: list[Callable[[str, Sequence[str]], None]]
) -> None:
    """What was half read of a set says nothing of the set that a restarted Redis has, and neither does the cursor."""
    first, second = blocks(0, 1000), blocks(500, 1000)
    pages = 0

    def restart_after_ten_pages(text: str, keys: Sequence[str]) -> None:
        nonlocal pages
        pages += text == _scripts.READ_PAGE
        if pages == 10:
            pages += 1
            server.restart_empty()
            with connect(server) as client:
                write_set(client, 7, second, "a")

    with connect(server) as client:
        write_set(client, 7, first, "a")
    before_script.append(restart_after_ten_pages)
    async with mirroring(server) as mirror:
        await until(lambda: mirror.blocks.contents("demo", "w0") != frozenset())
        assert mirror.blocks.contents("demo", "w0") == second


async def test_a_set_whose_answer_was_lost_is_not_written_again(
    server: Valkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Redis that is slow for all of a fleet's sets would be slower still if each came twice."""
    original: Script = _redis.RedisSession.script
    written = 0

    async def lose_the_answer(session: _redis.RedisSession, text: str, *rest: Any) -> Any:
        nonlocal written
        answer = await original(session, text, *rest)
        if text == _scripts.WRITE_ALL:
            written += 1
            raise TimeoutError("no answer")
        return answer

    monkeypatch.setattr(_redis.RedisSession, "script", lose_the_answer)
    engine = FakeEngine()
    engine.change(blocks(0, 1000))
    async with announcing(server.url, engine) as writer:
        await until(lambda: writer.healthy)
        engine.change({block("more")})
        with connect(server) as client:
            await until(lambda: client.smembers(KEYS.blocks("w0")) == engine.held)
    assert written == 1


async def test_a_fleets_sets_are_not_written_all_at_once_and_what_is_urgent_does_not_wait(
    server: Valkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(random, "uniform", lambda _, most: most)
    engine = FakeEngine()
    engine.change(blocks(0, 10))
    with connect(server) as client:
        client.zadd(KEYS.workers, {f"other{number}": 9e12 for number in range(100_000)})
        async with announcing(server.url, engine, ttl_ms=60_000) as writer:
            await until(lambda: client.exists(KEYS.record("w0")) == 1)
            assert not writer.healthy, "the last of a hundred thousand would not come first"
            writer.update(record(draining=True))
            await until(lambda: b'"draining":true' in (client.get(KEYS.record("w0")) or b""))
            assert client.smembers(KEYS.blocks("w0")) == engine.held


@pytest.mark.parametrize("size", [0, 1, PAGE, PAGE + 1, 10 * PAGE])
async def test_sets_of_all_sizes_are_written_and_read(server: Valkey, size: int) -> None:
    engine = FakeEngine()
    engine.change(blocks(0, size))
    async with announcing(server.url, engine), mirroring(server) as mirror:
        await until(lambda: mirror.blocks.position("demo", "w0") == Position("i1", 1))
        assert mirror.blocks.contents("demo", "w0") == engine.held
        with connect(server) as client:
            assert client.hget(KEYS.index("w0"), "count") == str(size).encode()
            assert parts(client) == []


def parts(client: Any) -> list[bytes]:
    return [key for key in client.scan_iter() if key.startswith(KEYS.blocks("w0").encode() + b":")]


async def test_the_old_set_stands_until_all_parts_are_there(
    server: Valkey, before_script: list[Callable[[str, Sequence[str]], None]]
) -> None:
    engine = FakeEngine()
    engine.change(blocks(0, 1000))
    seen: list[tuple[int, int]] = []

    def look(text: str, keys: Sequence[str]) -> None:
        if text in (_scripts.WRITE_PART, _scripts.WRITE_ALL):
            with connect(server) as client:
                count = int(client.hget(KEYS.index("w0"), "count") or -1)
                seen.append((client.scard(KEYS.blocks("w0")), count))

    async with announcing(server.url, engine) as writer:
        await until(lambda: writer.healthy)
        before_script.append(look)
        engine.announcer = None  # A change that the announcer is not told of: it has to write the whole set.
        engine.change(blocks(5000, 500))
        engine.announcer = writer
        engine.change(blocks(6000, 1))
        await until(lambda: writer.republished == 2)
        with connect(server) as client:
            assert client.smembers(KEYS.blocks("w0")) == engine.held
    assert len(seen) == 31
    assert set(seen) == {(1000, 1000)}


async def test_parts_that_get_lost_are_written_again(
    server: Valkey, before_script: list[Callable[[str, Sequence[str]], None]], caplog: pytest.LogCaptureFixture
) -> None:
    """As when Redis evicts keys for want of memory. Nobody ever sees a set that is not whole."""
    engine = FakeEngine()
    engine.change(blocks(0, 1000))
    evictions = 0

    def evict(text: str, keys: Sequence[str]) -> None:
        nonlocal evictions
        if text == _scripts.WRITE_ALL and evictions < 2:
            evictions += 1
            with connect(server) as client:
                assert client.unlink(keys[3]) == 1

    before_script.append(evict)
    with caplog.at_level(logging.WARNING):
        async with announcing(server.url, engine), mirroring(server) as mirror:
            await until(lambda: mirror.blocks.contents("demo", "w0") == engine.held)
    assert evictions == 2
    assert "does redis evict keys?" in caplog.text
    with connect(server) as client:
        assert parts(client) == []


async def test_a_writer_killed_in_the_middle_leaves_nothing_for_long(
    server: Valkey, before_script: list[Callable[[str, Sequence[str]], Awaitable[None]]]
) -> None:
    engine = FakeEngine()
    engine.change(blocks(0, 1000))
    reached = asyncio.Event()

    async def stop_at_the_last_part(text: str, keys: Sequence[str]) -> None:
        if text == _scripts.WRITE_ALL:
            reached.set()
            await asyncio.Event().wait()

    before_script.append(stop_at_the_last_part)
    async with announcing(server.url, engine):
        await asyncio.wait_for(reached.wait(), 5)
    with connect(server) as client:
        [part] = parts(client)
        assert 0 < client.pttl(part) <= announcer.PART_TTL_MS
        assert client.hget(KEYS.index("w0"), "sequence") == b"-1", "nobody may read what is not whole"


async def test_a_superseded_writer_takes_its_parts_away(server: Valkey) -> None:
    with connect(server) as client:
        write_set(client, 7, blocks(0, 10), "a")
        client.hset(KEYS.index("w0"), mapping={"incarnation": "later", "started_at_ms": 99})
        part = KEYS.part("w0", "b")
        assert client.eval(_scripts.WRITE_PART, 1, part, b"".join(blocks(0, 2)), 10_000) == [0]
        write_set(client, 8, blocks(2, 2), "b")
        assert parts(client) == []
        assert client.scard(KEYS.blocks("w0")) == 10


async def test_looks_and_events_go_on_while_a_fleet_is_loaded(
    server: Valkey, before_script: list[Callable[[str, Sequence[str]], Awaitable[None]]]
) -> None:
    """A gateway that starts among many workers knows the first ones' news before it has loaded the last one."""
    engines = {f"w{number}": FakeEngine() for number in range(9)}
    told = asyncio.Event()
    order: list[str] = []
    at_the_last: list[tuple[bool, int]] = []

    async def go_slowly(text: str, keys: Sequence[str]) -> None:
        if text != _scripts.READ_PAGE:
            return
        worker = keys[0].rpartition(":")[2]
        if worker not in order:
            order.append(worker)
        if len(order) > 1:
            await told.wait()
            await asyncio.sleep(0.03)
        if len(order) == len(engines):
            at_the_last.append((block("news") in mirror.blocks.contents("demo", order[0]), mirror.counters.looks))

    async with contextlib.AsyncExitStack() as stack:
        for worker, engine in engines.items():
            engine.change(blocks(0, 2 * PAGE))
            await stack.enter_async_context(announcing(server.url, engine, record(worker)))
        client = stack.enter_context(connect(server))
        await until(lambda: len(client.keys(KEYS.blocks("*"))) == 9)
        before_script.append(go_slowly)
        mirror = await stack.enter_async_context(mirroring(server))
        await until(lambda: bool(order) and mirror.blocks.position("demo", order[0]) is not None)
        engines[order[0]].change({block("news")})
        await until(lambda: client.sismember(KEYS.blocks(order[0]), block("news")))
        told.set()
        await until(lambda: all(mirror.blocks.contents("demo", name) == one.held for name, one in engines.items()))
    news, looks = at_the_last[0]
    assert news, "the news came only after all was loaded"
    assert looks > 1, "no look while the fleet was loaded"
    assert mirror.epoch == 1


async def test_in_a_large_fleet_a_worker_writes_less_often_and_what_is_urgent_at_once(
    server: Valkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis and every gateway pay by the write, so thousands of workers may not write fifty times a second each."""
    monkeypatch.setattr(announcer, "FLEET_ROUNDS_PER_S", 100)
    monkeypatch.setattr(announcer, "FLEET_SETS_PER_S", 1_000_000)
    engine = FakeEngine()
    with connect(server) as client:
        client.zadd(KEYS.workers, {f"other{number}": 9e12 for number in range(2_000)})
        async with announcing(server.url, engine, ttl_ms=60_000) as writer:
            await until(lambda: writer.healthy)
            for number in range(100):
                engine.change({block(number)})
                await asyncio.sleep(0.002)
            deltas = [fields for _, fields in client.xrange(KEYS.events) if fields[b"kind"] == b"delta"]
            assert len(deltas) <= 1
            writer.update(record(draining=True))
            await until(lambda: b'"draining":true' in (client.get(KEYS.record("w0")) or b""))
            # It told of its blocks on the way.
            await until(lambda: client.smembers(KEYS.blocks("w0")) == engine.held)
