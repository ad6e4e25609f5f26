"""The holder's side: what a pin keeps, and when it stops keeping it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import pytest
from antiphon_kvtransfer.pins import MAX_HASHES_PER_PIN, MAX_PINS_PER_CALL, KvBlocksService, PinRefused, PinTable
from antiphon_proto import worker_pb2, worker_pb2_grpc

from tests.support.block_keeper import FakeKeeper, hash_of
from tests.support.eventually import WAIT_S, eventually


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def _table(blocks: int = 8) -> tuple[PinTable, FakeKeeper, Clock]:
    keeper = FakeKeeper(blocks, 16)
    for block in range(blocks):
        keeper.store(block, block + 1)
    clock = Clock()
    return PinTable(keeper, ttl_s=1.5, clock=clock), keeper, clock


def test_a_pin_keeps_the_leading_blocks_that_are_there() -> None:
    table, keeper, _ = _table(4)
    assert table.pin(1, [hash_of(3), hash_of(1), hash_of(99), hash_of(2)]) == [2, 0]
    assert keeper.reuse() == [1, 3]
    assert keeper.contents([2, 0]) == [3, 1]
    assert table.held_blocks == 2
    assert table.confirm(1)
    assert keeper.kept_blocks() == 0


def test_a_pin_is_confirmed_once() -> None:
    table, keeper, _ = _table()
    table.pin(1, [hash_of(1)])
    assert table.confirm(1)
    assert not table.confirm(1)
    assert not table.confirm(2)
    assert keeper.kept_blocks() == 0


def test_hearing_something_renews_every_pin() -> None:
    table, _, clock = _table()
    table.pin(1, [hash_of(1)])
    for _ in range(5):
        clock.now_s += 1.4
        assert not table.lapse()
        table.heard()
    assert table.seconds_left() == pytest.approx(1.5)
    assert table.confirm(1)


def test_silence_ends_every_pin() -> None:
    table, keeper, clock = _table()
    table.pin(1, [hash_of(1)])
    table.pin(2, [hash_of(1), hash_of(2)])
    clock.now_s += 1.5
    assert table.seconds_left() == 0
    assert table.lapse()
    assert keeper.kept_blocks() == 0
    assert not table.confirm(1)
    assert not table.confirm(2)


def test_a_message_that_comes_too_late_does_not_save_a_pin() -> None:
    """Nobody had noticed the silence yet: the message itself finds that the pins have lapsed."""
    table, keeper, clock = _table()
    table.pin(1, [hash_of(1)])
    clock.now_s += 10
    table.heard()
    assert keeper.kept_blocks() == 0
    assert not table.confirm(1)


def test_two_pins_of_a_block_are_two() -> None:
    table, keeper, _ = _table()
    table.pin(1, [hash_of(1)])
    table.pin(2, [hash_of(1)])
    table.release(1)
    assert 0 not in keeper.reuse()
    assert table.confirm(2)
    assert 0 in keeper.reuse()


def test_the_end_of_the_call_ends_its_pins() -> None:
    table, keeper, _ = _table()
    keeper.store_partial("request", 5, 77)
    table.pin(1, [hash_of(1)])
    assert table.pin_partial(2, "request") == [5]
    assert table.pin_partial(3, "another") == []
    table.end()
    assert keeper.kept_blocks() == 0


def test_bounds_are_kept() -> None:
    table, keeper, _ = _table()
    with pytest.raises(PinRefused, match="at most"):
        table.pin(1, [hash_of(1)] * (MAX_HASHES_PER_PIN + 1))
    with pytest.raises(PinRefused, match="16 bytes"):
        table.pin(1, [b"short"])
    for pin_id in range(MAX_PINS_PER_CALL):
        table.pin(pin_id, [hash_of(1)])
    with pytest.raises(PinRefused, match="in use"):
        table.pin(0, [hash_of(1)])
    with pytest.raises(PinRefused, match="confirm or release"):
        table.pin(MAX_PINS_PER_CALL, [hash_of(1)])
    assert keeper.kept[0] == MAX_PINS_PER_CALL


# ------------------------------------------------------------------------------------------------ the service


Call = grpc.aio.StreamStreamCall[worker_pb2.PinUp, worker_pb2.PinDown]


@asynccontextmanager
async def _holder(lost_after_ms: int = 400) -> AsyncIterator[tuple[FakeKeeper, worker_pb2_grpc.KvBlocksAsyncStub]]:
    keeper = FakeKeeper(4, 16)
    for block in range(4):
        keeper.store(block, block + 1)
    service = KvBlocksService(
        keeper.local_worker("holder", "i1"), lambda: (), keeper, heartbeat_ms=100, lost_after_ms=lost_after_ms
    )
    server = grpc.aio.server()
    worker_pb2_grpc.add_KvBlocksServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.enable_http_proxy", 0)]) as channel:
            yield keeper, worker_pb2_grpc.KvBlocksStub(channel)
        await eventually(lambda: service.held_blocks == 0 and keeper.kept_blocks() == 0)
    finally:
        service.close()
        await server.stop(1)


def _hello(incarnation: str = "i1", heartbeat_ms: int = 100) -> worker_pb2.PinUp:
    hello = worker_pb2.PinHello(reader_worker_id="reader", incarnation=incarnation, heartbeat_ms=heartbeat_ms)
    return worker_pb2.PinUp(hello=hello)


def _pin(pin_id: int, *contents: int) -> worker_pb2.PinUp:
    return worker_pb2.PinUp(pin=worker_pb2.PinBlocks(pin_id=pin_id, hashes=[hash_of(one) for one in contents]))


async def _answer(call: Call, kind: str) -> worker_pb2.PinDown:
    """The next message that is not a heartbeat, which must be of this kind."""
    async with asyncio.timeout(WAIT_S):
        while True:
            message = await call.read()
            assert isinstance(message, worker_pb2.PinDown), "the call has ended"
            if message.WhichOneof("kind") != "heartbeat":
                assert message.WhichOneof("kind") == kind
                return message


async def _status(call: Call) -> grpc.StatusCode:
    """How the holder ended the call."""
    async with asyncio.timeout(WAIT_S):
        with contextlib.suppress(grpc.aio.AioRpcError):
            while isinstance(await call.read(), worker_pb2.PinDown):
                pass
        return await call.code()


async def test_pin_and_confirm_over_the_wire() -> None:
    async with _holder() as (keeper, stub):
        call = stub.Pin()
        await call.write(_hello())
        assert (await _answer(call, "welcome")).welcome.ttl_ms == 400
        await call.write(_pin(7, 1, 2, 9))
        pinned = (await _answer(call, "pinned")).pinned
        assert (pinned.pin_id, list(pinned.block_numbers)) == (7, [0, 1])
        assert keeper.reuse() == [2, 3]
        await call.write(worker_pb2.PinUp(confirm=worker_pb2.PinConfirm(pin_id=7)))
        confirmed = (await _answer(call, "confirmed")).confirmed
        assert (confirmed.pin_id, confirmed.held) == (7, True)
        await call.write(worker_pb2.PinUp(confirm=worker_pb2.PinConfirm(pin_id=7)))
        assert not (await _answer(call, "confirmed")).confirmed.held
        call.cancel()


async def test_another_incarnation_is_refused() -> None:
    async with _holder() as (keeper, stub):
        call = stub.Pin()
        await call.write(_hello(incarnation="i0"))
        assert await _status(call) is grpc.StatusCode.FAILED_PRECONDITION
        assert keeper.kept_blocks() == 0


async def test_a_silent_reader_loses_its_pins_and_its_call() -> None:
    """The connection stands: only the missing heartbeats say that the reader is gone."""
    async with _holder() as (keeper, stub):
        call = stub.Pin()
        await call.write(_hello())
        await call.write(_pin(1, 1))
        await _answer(call, "welcome")
        await _answer(call, "pinned")
        assert await _status(call) is grpc.StatusCode.DEADLINE_EXCEEDED
        assert keeper.kept_blocks() == 0


async def test_a_reader_that_leaves_frees_its_pins_at_once() -> None:
    """ai-dynamo/dynamo#13855: blocks staged for a reader that went away go back to the pool."""
    async with _holder(lost_after_ms=60_000) as (keeper, stub):
        for _ in range(5):
            call = stub.Pin()
            await call.write(_hello())
            await call.write(_pin(1, 1, 2, 3, 4))
            await _answer(call, "welcome")
            await _answer(call, "pinned")
            assert keeper.kept_blocks() == 4
            call.cancel()
            await eventually(lambda: keeper.kept_blocks() == 0)


@pytest.mark.parametrize(
    "messages",
    [
        [_pin(1, 1)],
        [_hello(), _hello()],
        [_hello(), _pin(1, 1), _pin(1, 2)],
        [_hello(heartbeat_ms=400)],
    ],
    ids=["no hello", "two hellos", "pin id twice", "heartbeat too seldom"],
)
async def test_a_reader_that_breaks_the_protocol_loses_its_call(messages: list[worker_pb2.PinUp]) -> None:
    async with _holder() as (keeper, stub):
        for _ in range(10):  # Most of them end while the holder's first answer is still being written.
            call = stub.Pin()
            for message in messages:
                with contextlib.suppress(asyncio.InvalidStateError):  # The call has ended before all was written.
                    await call.write(message)
            assert await _status(call) is grpc.StatusCode.INVALID_ARGUMENT
            await eventually(lambda: keeper.kept_blocks() == 0)
