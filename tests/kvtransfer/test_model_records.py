"""What the operator says of a Model reaches every mirror, and stays there while operator or Redis is away."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
from antiphon_kvtransfer import ClusterMirror, ModelRecordError, decode_model_record, encode_model_record
from antiphon_kvtransfer.model_record import ModelLedger, ModelRecord

from tests.support.membership import FakeEngine, announcing, record, until
from tests.support.model_records import KEY, OperatorVoice, model_record
from tests.support.valkey import Valkey


@pytest.fixture
def server() -> Iterator[Valkey]:
    with Valkey() as running:
        yield running


@contextlib.asynccontextmanager
async def mirroring(server: Valkey, on_change: Callable[[], None] = lambda: None) -> AsyncIterator[ClusterMirror]:
    mirror = ClusterMirror(server.url, on_change=on_change, look_ms=100)
    task = asyncio.create_task(mirror.run())
    try:
        yield mirror
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_record_is_known_with_and_without_workers_and_its_changes_are_told(server: Valkey) -> None:
    operator, changes = OperatorVoice(server), list[ModelRecord | None]()
    async with mirroring(server, lambda: changes.append(mirror.model_records().get(KEY))) as mirror:
        for one in (model_record(), model_record(names=("qwen", "q3")), model_record(draining=("w7",))):
            operator.put(one)
            await until(lambda one=one: mirror.model_records() == {KEY: one})  # type: ignore[misc]
            assert changes[-1] == one
        assert not mirror.workers()


async def test_a_record_stays_while_redis_is_away_and_restarts_empty(server: Valkey) -> None:
    one = model_record(ttl_ms=60_000)
    OperatorVoice(server).put(one)
    async with mirroring(server) as mirror:
        await until(lambda: mirror.model_records() == {KEY: one})
        server.kill()
        await until(lambda: not mirror.healthy)
        assert mirror.model_records() == {KEY: one}
        epoch = mirror.epoch
        server.start()
        await until(lambda: mirror.healthy and mirror.epoch > epoch)
        assert mirror.model_records() == {KEY: one}


async def test_a_record_that_vanished_stays_as_long_as_the_model_has_workers(server: Valkey) -> None:
    operator, one = OperatorVoice(server), model_record(ttl_ms=300)
    async with mirroring(server) as mirror:
        async with announcing(server.url, FakeEngine(), record(model=KEY), ttl_ms=400) as announcer:
            operator.put(one)
            await until(lambda: mirror.model_records() == {KEY: one} and len(mirror.workers()) == 1)
            operator.redis.delete(f"antiphon:{{{KEY.replace('/', '%2F')}}}:model")
            # Several times its time to live.
            await asyncio.sleep(1.0)
            assert mirror.model_records() == {KEY: one}
            await announcer.withdraw()
        await until(lambda: not mirror.model_records())
        await until(lambda: not mirror._readers)


async def test_a_deleted_model_is_forgotten_with_its_last_worker(server: Valkey) -> None:
    operator, gone = OperatorVoice(server), model_record(deleted=True)
    async with mirroring(server) as mirror:
        async with announcing(server.url, FakeEngine(), record(model=KEY)) as announcer:
            operator.put(model_record())
            await until(lambda: bool(mirror.model_records()) and bool(mirror.workers()))
            operator.put(gone)
            await until(lambda: mirror.model_records() == {KEY: gone})
            await announcer.withdraw()
        await until(lambda: not mirror.model_records())
        operator.put(model_record(model="chat/other"))
        await until(lambda: mirror.model_records().keys() == {"chat/other"})
        operator.put(model_record(model="chat/other", deleted=True))
        await until(lambda: not mirror.model_records())


async def test_an_unreadable_record_is_said_once_and_the_last_good_one_stays(
    server: Valkey, caplog: pytest.LogCaptureFixture
) -> None:
    operator, good = OperatorVoice(server), model_record()
    caplog.set_level(logging.ERROR)
    async with mirroring(server) as mirror:
        operator.put(good)
        await until(lambda: mirror.model_records() == {KEY: good})
        operator.write(KEY, b'{"format": 99')
        await until(lambda: "not readable" in caplog.text)
        await asyncio.sleep(0.4)
        assert caplog.text.count("not readable") == 1
        assert mirror.model_records() == {KEY: good}
        better = model_record(generation=2)
        operator.put(better)
        await until(lambda: mirror.model_records() == {KEY: better})


def test_records_read_as_they_were_written_and_later_fields_are_ignored() -> None:
    one = model_record(revisions={"a": 500, "b": 1}, draining=("w",), waking=True, ttft_p95_ms=500.0)
    assert decode_model_record(encode_model_record(one), KEY) == one
    later = encode_model_record(one).replace(b"{", b'{"of_a_later_version":[1],', 1)
    assert decode_model_record(later, KEY) == one
    for raw in (b"{", encode_model_record(model_record(format=2))):
        with pytest.raises(ModelRecordError, match=KEY):
            decode_model_record(raw, KEY)


class TestLedger:
    """A record that vanished counts only after one full time to live in one unbroken epoch, and with no workers."""

    ONE = model_record(ttl_ms=1000)

    def ledger(self) -> ModelLedger:
        ledger = ModelLedger()
        assert ledger.observe(0.0, 1, self.ONE, has_workers=False)
        return ledger

    def test_missing_for_a_full_ttl(self) -> None:
        ledger = self.ledger()
        assert not ledger.observe(0.5, 1, None, has_workers=False)
        assert not ledger.observe(1.4, 1, None, has_workers=False)
        assert ledger.observe(1.5, 1, None, has_workers=False)
        assert ledger.record is None

    @pytest.mark.parametrize("kept_by", ["a new epoch", "workers", "the record"])
    def test_what_starts_the_wait_anew(self, kept_by: str) -> None:
        ledger = self.ledger()
        ledger.observe(0.5, 1, None, has_workers=False)
        epoch = 2 if kept_by == "a new epoch" else 1
        seen = self.ONE if kept_by == "the record" else None
        ledger.observe(1.4, epoch, seen, has_workers=kept_by == "workers")
        assert not ledger.observe(2.3, epoch, None, has_workers=False)
        assert not ledger.observe(2.35, epoch, None, has_workers=False)
        assert ledger.record == self.ONE
        assert ledger.observe(3.4, epoch, None, has_workers=False)

    def test_deleted_counts_at_once_without_workers(self) -> None:
        ledger = self.ledger()
        gone = model_record(deleted=True)
        assert ledger.observe(0.1, 1, gone, has_workers=True)
        assert ledger.record == gone
        assert ledger.observe(0.2, 1, gone, has_workers=False)
        assert ledger.record is None
        assert not ledger.observe(0.3, 1, gone, has_workers=False)
