"""What every transport does, written once. Each scenario runs against a peer that is another process.

A process that used NIXL crashes when the interpreter exits, so the `ucx` runs have a process of their own:
`python -m tests.support.transport_scenarios NAME KIND`.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import numpy as np
import pytest
from antiphon_kvtransfer.transport import PeerKey, ReadRange, Transport, TransportError
from antiphon_telemetry.exit import leave

from tests.support.transport_peer import POOL_BYTES, Pool, TransportPeer, empty_pool, make_transport, pattern

WAIT_S = 60.0
"""Ends a test that hangs; says nothing about speed."""


@asynccontextmanager
async def _reader(kind: str, pool: Pool) -> AsyncIterator[Transport]:
    transport = make_transport(kind, pool, "reader/1")
    await transport.start()
    try:
        yield transport
    finally:
        await transport.close()


@asynccontextmanager
async def _connected(kind: str) -> AsyncIterator[tuple[Transport, Pool, TransportPeer]]:
    pool = empty_pool()
    with TransportPeer(kind) as peer:
        async with _reader(kind, pool) as reader:
            await reader.connect(peer.key, peer.metadata, WAIT_S)
            yield reader, pool, peer


async def a_read_lands_and_touches_nothing_else(kind: str) -> None:
    async with _connected(kind) as (reader, pool, peer):
        ranges = [ReadRange(1 << 20, 0, 1000), ReadRange(77, 5 << 20, 3 << 20), ReadRange(POOL_BYTES - 1, 1001, 1)]
        handle = reader.read(peer.key, ranges)
        await handle.wait(WAIT_S)
        assert handle.ended.done()
        expected = empty_pool()
        source = pattern()
        for one in ranges:
            expected[one.local_offset_bytes :][: one.length_bytes] = source[one.remote_offset_bytes :][
                : one.length_bytes
            ]
        assert np.array_equal(pool, expected)


async def many_reads_at_once(kind: str) -> None:
    async with _connected(kind) as (reader, pool, peer):
        step = 256 << 10
        handles = [
            reader.read(peer.key, [ReadRange(POOL_BYTES - (number + 1) * step, number * step, step)])
            for number in range(32)
        ]
        await asyncio.gather(*(handle.wait(WAIT_S) for handle in handles))
        expected = np.concatenate([pattern()[POOL_BYTES - (number + 1) * step :][:step] for number in range(32)])
        assert np.array_equal(pool[: 32 * step], expected)
        assert all(handle.ended.done() for handle in handles)


async def a_read_of_very_many_ranges(kind: str) -> None:
    async with _connected(kind) as (reader, pool, peer):
        ranges = [ReadRange(number * 256, number * 128, 16) for number in range(10_000)]
        await reader.read(peer.key, ranges).wait(WAIT_S)
        got = pool[: 10_000 * 128].reshape(10_000, 128)
        assert np.array_equal(got[:, :16], pattern()[: 10_000 * 256].reshape(10_000, 256)[:, :16])
        assert not got[:, 16:].any()


async def a_read_into_scratch_leaves_the_pool_alone(kind: str) -> None:
    async with _connected(kind) as (reader, pool, peer):
        await reader.read(peer.key, [ReadRange(0, POOL_BYTES, reader.scratch_bytes)]).wait(WAIT_S)
        assert not pool.any()


async def what_is_out_of_bounds_is_refused_at_once(kind: str) -> None:
    async with _connected(kind) as (reader, pool, peer):
        wrong = [
            [],
            [ReadRange(POOL_BYTES - 1, 0, 2)],
            [ReadRange(-1, 0, 1)],
            [ReadRange(0, -1, 1)],
            [ReadRange(0, POOL_BYTES - 1, 2)],
            [ReadRange(0, POOL_BYTES, reader.scratch_bytes + 1)],
            [ReadRange(0, 0, 0)],
            [ReadRange(0, 0, 10), ReadRange(POOL_BYTES, 0, 1)],
        ]
        for ranges in wrong:
            with pytest.raises(TransportError):
                reader.read(peer.key, ranges)
        with pytest.raises(TransportError, match="connect first"):
            reader.read(PeerKey("nobody/1/0"), [ReadRange(0, 0, 1)])
        assert not pool.any()


async def metadata_that_is_wrong_or_of_a_dead_peer_does_not_connect(kind: str) -> None:
    with TransportPeer(kind) as peer:
        peer.kill()
        async with _reader(kind, empty_pool()) as reader:
            with pytest.raises(TransportError):
                await reader.connect(peer.key, peer.metadata, WAIT_S)
            with pytest.raises(TransportError, match="cannot be read"):
                await reader.connect(peer.key, b"garbage", WAIT_S)
            with pytest.raises(TransportError):
                reader.read(peer.key, [ReadRange(0, 0, 1)])


async def a_killed_peer_fails_its_reads(kind: str) -> None:
    async with _connected(kind) as (reader, _, peer):
        everything = [ReadRange(0, 0, POOL_BYTES)]
        await reader.read(peer.key, everything).wait(WAIT_S)
        handles = [reader.read(peer.key, everything) for _ in range(8)]
        peer.kill()
        outcomes = await asyncio.gather(*(handle.wait(WAIT_S) for handle in handles), return_exceptions=True)
        assert all(outcome is None or isinstance(outcome, TransportError) for outcome in outcomes)
        await asyncio.wait_for(asyncio.gather(*(handle.ended for handle in handles)), WAIT_S)
        with pytest.raises(TransportError):
            await reader.read(peer.key, everything).wait(WAIT_S)


async def a_stopped_peer_is_left_by_deadline_and_the_read_ends(kind: str) -> None:
    """The read either goes through (the kernel copies, whatever the peer does) or only its deadline ends the wait."""
    async with _connected(kind) as (reader, pool, peer):
        peer.stop()
        handle = reader.read(peer.key, [ReadRange(0, 0, POOL_BYTES)])
        (outcome,) = await asyncio.gather(handle.wait(0.5), return_exceptions=True)
        if outcome is None:
            assert np.array_equal(pool, pattern())
        else:
            assert "within 0.5 s" in str(outcome)
        peer.go_on()
        await asyncio.wait_for(handle.ended, WAIT_S)
        # Nothing writes any more: what is put there stays.
        pool[:] = 0
        await reader.connect(peer.key, peer.metadata, WAIT_S)
        await reader.read(peer.key, [ReadRange(0, 0, 4096)]).wait(WAIT_S)
        assert np.array_equal(pool[:4096], pattern()[:4096])
        assert not pool[4096:].any()


async def a_cancelled_read_ends_and_others_do_not_notice(kind: str) -> None:
    async with _connected(kind) as (reader, pool, peer):
        handles = [reader.read(peer.key, [ReadRange(n << 22, n << 22, 1 << 22)]) for n in range(4)]
        waiting = [asyncio.create_task(handle.wait(WAIT_S)) for handle in handles]
        await asyncio.sleep(0)
        waiting[1].cancel()
        await asyncio.wait(waiting)
        assert waiting[1].cancelled()
        for task in (waiting[0], waiting[2], waiting[3]):
            task.result()
        await asyncio.wait_for(asyncio.gather(*(handle.ended for handle in handles)), WAIT_S)
        pool[:] = 0
        await reader.read(peer.key, [ReadRange(0, 0, 1 << 20)]).wait(WAIT_S)
        assert np.array_equal(pool[: 1 << 20], pattern()[: 1 << 20])


async def a_disconnected_peer_can_be_connected_again(kind: str) -> None:
    async with _connected(kind) as (reader, pool, peer):
        for _ in range(3):
            handle = reader.read(peer.key, [ReadRange(0, 0, POOL_BYTES)])
            await reader.disconnect(peer.key)
            with pytest.raises(TransportError):
                reader.read(peer.key, [ReadRange(0, 0, 1)])
            await asyncio.wait_for(handle.ended, WAIT_S)
            pool[:] = 0
            await reader.connect(peer.key, peer.metadata, WAIT_S)
            await reader.connect(peer.key, peer.metadata, WAIT_S)
            await reader.read(peer.key, [ReadRange(0, 0, 1 << 20)]).wait(WAIT_S)
            assert np.array_equal(pool[: 1 << 20], pattern()[: 1 << 20])


async def close_ends_what_runs(kind: str) -> None:
    pool = empty_pool()
    with TransportPeer(kind) as peer:
        async with _reader(kind, pool) as reader:
            await reader.connect(peer.key, peer.metadata, WAIT_S)
            handle = reader.read(peer.key, [ReadRange(0, 0, POOL_BYTES)])
        await asyncio.wait_for(handle.ended, WAIT_S)
        with pytest.raises(TransportError):
            reader.read(peer.key, [ReadRange(0, 0, 1)])


SCENARIOS: dict[str, Callable[[str], Awaitable[None]]] = {
    scenario.__name__: scenario
    for scenario in (
        a_read_lands_and_touches_nothing_else,
        many_reads_at_once,
        a_read_of_very_many_ranges,
        a_read_into_scratch_leaves_the_pool_alone,
        what_is_out_of_bounds_is_refused_at_once,
        metadata_that_is_wrong_or_of_a_dead_peer_does_not_connect,
        a_killed_peer_fails_its_reads,
        a_stopped_peer_is_left_by_deadline_and_the_read_ends,
        a_cancelled_read_ends_and_others_do_not_notice,
        a_disconnected_peer_can_be_connected_again,
        close_ends_what_runs,
    )
}


async def run_scenario(name: str, kind: str) -> None:
    """Raises if the scenario fails, or if the loop saw an exception that nobody handled."""
    unhandled: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(repr(context)))
    await SCENARIOS[name](kind)
    await asyncio.sleep(0)
    assert not unhandled
    assert asyncio.all_tasks() == {asyncio.current_task()}


if __name__ == "__main__":
    asyncio.run(run_scenario(sys.argv[1], sys.argv[2]))
    print("passed")
    leave(0)
