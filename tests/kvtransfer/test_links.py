"""The reader's side, both ends in one process over tcp: wiring up, what a pull brings, what is left of one given up."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import grpc.aio
import numpy as np
import pytest
from antiphon_kvtransfer import links
from antiphon_kvtransfer.identity import BlockHash
from antiphon_kvtransfer.links import LinkError, PeerAddress, PeerLinks
from antiphon_kvtransfer.tcp import TcpTransport
from antiphon_kvtransfer.transport import PeerKey, ReadRange, Transport, TransportError, TransportUnavailable
from antiphon_proto import worker_pb2_grpc

from tests.support.block_keeper import FakeKeeper, hash_of
from tests.support.eventually import WAIT_S, eventually
from tests.support.gated_transport import Gate, GatedTransport

BLOCK_BYTES = 4096


class NoSuchTransport(TcpTransport):
    """Cannot run on this host."""

    name = "ucx"

    async def start(self) -> None:
        raise TransportUnavailable("no such library")


class BrokenTransport(TcpTransport):
    """Runs, but never connects."""

    name = "ucx"

    async def connect(self, peer: PeerKey, metadata: bytes, deadline_s: float) -> None:
        raise TransportError("no route")


@dataclass
class End:
    keeper: FakeKeeper
    links: PeerLinks
    gate: Gate
    peer: PeerAddress
    server: grpc.aio.Server


@asynccontextmanager
async def _end(
    worker_id: str,
    *,
    incarnation: str = "i1",
    port: int = 0,
    kv_format: str = "test/64/plain",
    block_bytes: int = BLOCK_BYTES,
    better: Sequence[type[TcpTransport]] = (),
) -> AsyncIterator[End]:
    keeper = FakeKeeper(64, block_bytes)
    gate = Gate()
    transports: list[Transport] = [kind(keeper.region) for kind in better]
    transports.append(GatedTransport(TcpTransport(keeper.region), gate))
    local = keeper.local_worker(worker_id, incarnation, kv_format)
    links = PeerLinks(local, keeper.plane(transports), keeper, heartbeat_ms=100, lost_after_ms=600)
    await links.start()
    server = grpc.aio.server()
    worker_pb2_grpc.add_KvBlocksServicer_to_server(links.servicer(), server)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield End(keeper, links, gate, PeerAddress(worker_id, incarnation, f"127.0.0.1:{port}"), server)
    finally:
        await links.close()
        await server.stop(None)
    assert keeper.kept_blocks() == 0


@asynccontextmanager
async def _two() -> AsyncIterator[tuple[End, End]]:
    async with _end("holder") as holder, _end("reader") as reader:
        for block in range(32):
            holder.keeper.store(63 - block if block % 3 else block, block + 1)
        yield reader, holder


def _hashes(*contents: int) -> list[BlockHash]:
    return [hash_of(one) for one in contents]


async def test_a_pull_brings_the_leading_blocks_that_the_holder_has() -> None:
    async with _two() as (reader, holder):
        link = await reader.links.link(holder.peer, WAIT_S)
        contents = list(range(1, 33))
        targets = [*range(10, 26), *range(40, 56)]
        assert await link.pull(_hashes(*contents), targets, deadline_s=WAIT_S) == 32
        assert reader.keeper.contents(targets) == contents
        assert await link.pull(_hashes(5, 6, 99, 7), [0, 1, 2, 3], deadline_s=WAIT_S) == 2
        assert reader.keeper.contents([0, 1, 2, 3]) == [5, 6, 0, 0]
        assert await link.pull(_hashes(99, 5), [2, 3], deadline_s=WAIT_S) == 0
        assert await link.pull([], [], deadline_s=WAIT_S) == 0
        assert reader.keeper.contents([2, 3]) == [0, 0]
        with pytest.raises(ValueError, match="2 hashes but 1"):
            await link.pull(_hashes(1, 2), [0], deadline_s=WAIT_S)
        await eventually(lambda: holder.keeper.kept_blocks() == 0 and reader.keeper.kept_blocks() == 0)


async def test_the_partial_block_moves_under_its_request() -> None:
    async with _two() as (reader, holder):
        holder.keeper.store_partial("request-1", 50, 123)
        link = await reader.links.link(holder.peer, WAIT_S)
        assert await link.pull_partial("request-1", 9, deadline_s=WAIT_S)
        assert reader.keeper.contents([9]) == [123]
        assert not await link.pull_partial("request-2", 8, deadline_s=WAIT_S)
        await eventually(lambda: holder.keeper.kept_blocks() == 0)


async def test_neighbours_on_both_sides_are_read_as_one_range(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[ReadRange]] = []
    read = GatedTransport.read

    def spy(self: GatedTransport, peer: PeerKey, ranges: Sequence[ReadRange]) -> object:
        seen.append(list(ranges))
        return read(self, peer, ranges)

    async with _end("holder") as holder, _end("reader") as reader:
        for block, content in ((7, 1), (8, 2), (9, 3), (20, 4), (21, 5), (11, 6)):
            holder.keeper.store(block, content)
        link = await reader.links.link(holder.peer, WAIT_S)
        monkeypatch.setattr(GatedTransport, "read", spy)
        assert await link.pull(_hashes(1, 2, 3, 4, 5, 6), [0, 1, 5, 6, 7, 8], deadline_s=WAIT_S) == 6
        assert reader.keeper.contents([0, 1, 5, 6, 7, 8]) == [1, 2, 3, 4, 5, 6]
    size = BLOCK_BYTES
    assert seen == [
        [
            ReadRange(7 * size, 0, 2 * size),
            ReadRange(9 * size, 5 * size, size),
            ReadRange(20 * size, 6 * size, 2 * size),
            ReadRange(11 * size, 8 * size, size),
        ]
    ]


async def test_many_pulls_at_once_share_one_link() -> None:
    async with _two() as (reader, holder):
        link = await reader.links.link(holder.peer, WAIT_S)
        pulls = [link.pull(_hashes(number % 32 + 1), [number % 64], deadline_s=WAIT_S) for number in range(64)]
        assert await asyncio.gather(*pulls) == [1] * 64
        assert reader.keeper.contents(range(64)) == [number % 32 + 1 for number in range(64)]
        assert len(holder.links.servicer()._calls) == 1


async def test_cancelled_pulls_free_both_sides() -> None:
    """ai-dynamo/dynamo#7489, vllm-project/vllm#50425: cancels at any phase leave the count of free blocks as it was."""
    async with _two() as (reader, holder):
        link = await reader.links.link(holder.peer, WAIT_S)
        for place in ("before", "after"):
            reader.gate.shut(place)
            pulls = [
                asyncio.create_task(
                    link.pull(_hashes(number + 1, number + 2), [2 * number, 2 * number + 1], deadline_s=WAIT_S)
                )
                for number in range(20)
            ]
            await reader.gate.reached.wait()
            for pull in pulls[::2]:
                pull.cancel()
            reader.gate.open()
            outcomes = await asyncio.gather(*pulls, return_exceptions=True)
            assert all(isinstance(one, asyncio.CancelledError) for one in outcomes[::2])
            assert outcomes[1::2] == [2] * 10
            await eventually(lambda: holder.keeper.kept_blocks() == 0 and reader.keeper.kept_blocks() == 0)
        at_once = asyncio.create_task(link.pull(_hashes(1), [0], deadline_s=WAIT_S))
        await asyncio.sleep(0)
        at_once.cancel()
        with pytest.raises(asyncio.CancelledError):
            await at_once
        await eventually(lambda: holder.keeper.kept_blocks() == 0 and reader.keeper.kept_blocks() == 0)
        assert await link.pull(_hashes(1), [0], deadline_s=WAIT_S) == 1


async def test_a_pull_past_its_deadline_fails_and_the_link_stays() -> None:
    async with _two() as (reader, holder):
        link = await reader.links.link(holder.peer, WAIT_S)
        reader.gate.shut("before")
        with pytest.raises(LinkError, match=r"0\.2 s"):
            await link.pull(_hashes(1), [0], deadline_s=0.2)
        reader.gate.open()
        await eventually(lambda: holder.keeper.kept_blocks() == 0 and reader.keeper.kept_blocks() == 0)
        assert await link.pull(_hashes(1), [0], deadline_s=WAIT_S) == 1


# ------------------------------------------------------------------------------------------------ wiring up


async def test_the_measurement_touches_no_block_and_stands_in_the_status() -> None:
    async with _end("holder") as holder, _end("reader") as reader:
        holder.keeper.memory[:] = 7
        await reader.links.link(holder.peer, WAIT_S)
        assert not reader.keeper.memory.any()
        (status,) = reader.links.statuses()
        assert (status.peer_worker_id, status.transport, status.up, status.detail) == ("holder", "tcp", True, "")
        assert status.gigabytes_per_s > 0


@pytest.mark.parametrize(
    ("holder_has", "reader_has", "why"),
    [
        ([TcpTransport], [NoSuchTransport], "no such library"),
        ([], [BrokenTransport], "does not serve it"),
        ([BrokenTransport], [BrokenTransport], "no route"),
    ],
    ids=["not here", "not there", "does not connect"],
)
async def test_a_fall_to_another_transport_says_why(
    holder_has: list[type[TcpTransport]], reader_has: list[type[TcpTransport]], why: str
) -> None:
    async with _end("holder", better=holder_has) as holder, _end("reader", better=reader_has) as reader:
        holder.keeper.store(0, 1)
        link = await reader.links.link(holder.peer, WAIT_S)
        assert await link.pull(_hashes(1), [5], deadline_s=WAIT_S) == 1
        (status,) = reader.links.statuses()
        assert status.transport == "tcp"
        assert status.detail.startswith("tcp is used instead of ucx")
        assert why in status.detail


async def test_no_transport_at_all_is_an_error() -> None:
    keeper = FakeKeeper(4, BLOCK_BYTES)
    links = PeerLinks(keeper.local_worker("reader", "i1"), keeper.plane([NoSuchTransport(keeper.region)]), keeper)
    with pytest.raises(TransportUnavailable, match="no such library"):
        await links.start()
    await links.close()


@pytest.mark.parametrize(
    ("kv_format", "block_bytes", "says"),
    [("float32/64/mha", BLOCK_BYTES, "float32/64/mha.*test/64/plain"), ("test/64/plain", 8192, "8192 bytes.*4096")],
    ids=["format", "size"],
)
async def test_blocks_that_are_not_alike_are_never_mixed(kv_format: str, block_bytes: int, says: str) -> None:
    async with _end("holder", kv_format=kv_format, block_bytes=block_bytes) as holder, _end("reader") as reader:
        with pytest.raises(LinkError, match=says):
            await reader.links.link(holder.peer, WAIT_S)
        (status,) = reader.links.statuses()
        assert not status.up
        assert re.search(says, status.detail)


async def test_nobody_at_the_address_is_a_link_error_at_once() -> None:
    async with _end("reader") as reader:
        with pytest.raises(LinkError, match="UNAVAILABLE"):
            await reader.links.link(PeerAddress("nobody", "i1", "127.0.0.1:1"), WAIT_S)


async def test_wanted_peers_are_wired_up_in_the_background() -> None:
    async with _end("holder") as holder, _end("reader") as reader:
        reader.links.wanted([holder.peer, reader.peer])
        await eventually(lambda: [status.up for status in reader.links.statuses()] == [True])


async def test_links_to_peers_that_are_not_wanted_are_closed_when_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "_IDLE_CLOSE_S", 0.1)
    async with _two() as (reader, holder):
        reader.links.wanted([holder.peer])
        link = await reader.links.link(holder.peer, WAIT_S)
        reader.gate.shut("before")
        pull = asyncio.create_task(link.pull(_hashes(1), [0], deadline_s=WAIT_S))
        await reader.gate.reached.wait()
        reader.links.wanted([])
        await asyncio.sleep(0.3)
        assert [status.up for status in reader.links.statuses()] == [True]  # In use.
        reader.gate.open()
        assert await pull == 1
        await eventually(lambda: reader.links.statuses() == [])
        again = await reader.links.link(holder.peer, WAIT_S)
        assert await again.pull(_hashes(1), [0], deadline_s=WAIT_S) == 1


async def test_a_second_address_of_the_same_incarnation_does_not_move_a_link_that_works() -> None:
    async with _two() as (reader, holder):
        nowhere = PeerAddress("holder", "i1", "127.0.0.1:1")
        with pytest.raises(LinkError):
            await reader.links.link(nowhere, WAIT_S)
        link = await reader.links.link(holder.peer, WAIT_S)
        reader.links.wanted([nowhere])
        assert await reader.links.link(nowhere, WAIT_S) is link
        assert await link.pull(_hashes(1), [0], deadline_s=WAIT_S) == 1


async def test_what_spoke_of_an_earlier_incarnation_is_void() -> None:
    async with _end("reader") as reader:
        async with _end("holder", incarnation="i1") as first:
            old = await reader.links.link(first.peer, WAIT_S)
            port = int(first.peer.address.rpartition(":")[2])
        await eventually(lambda: not any(status.up for status in reader.links.statuses()))
        async with _end("holder", incarnation="i2", port=port) as second:
            with pytest.raises(LinkError, match="i2, not i1"):
                await reader.links.link(first.peer, WAIT_S)
            second.keeper.store(0, 1)
            new = await reader.links.link(second.peer, WAIT_S)
            assert await new.pull(_hashes(1), [0], deadline_s=WAIT_S) == 1
            with pytest.raises(LinkError):
                await old.pull(_hashes(1), [1], deadline_s=WAIT_S)
            assert [status.up for status in reader.links.statuses()] == [True]


async def test_a_pull_on_the_old_incarnation_fails_when_the_new_one_is_known() -> None:
    async with _two() as (reader, holder):
        link = await reader.links.link(holder.peer, WAIT_S)
        reader.gate.shut("before")
        pull = asyncio.create_task(link.pull(_hashes(1, 2), [0, 1], deadline_s=WAIT_S))
        await reader.gate.reached.wait()
        reader.links.wanted([PeerAddress("holder", "i2", holder.peer.address)])
        reader.gate.open()
        with pytest.raises(LinkError, match="replaced by incarnation i2"):
            await pull
        await eventually(lambda: holder.keeper.kept_blocks() == 0 and reader.keeper.kept_blocks() == 0)


async def test_a_wanted_link_comes_back_by_itself() -> None:
    async with AsyncExitStack() as stack:
        reader = await stack.enter_async_context(_end("reader"))
        async with _end("holder") as holder:
            reader.links.wanted([holder.peer])
            await eventually(lambda: [status.up for status in reader.links.statuses()] == [True])
            port = int(holder.peer.address.rpartition(":")[2])
        await eventually(lambda: [status.up for status in reader.links.statuses()] == [False])
        again = await stack.enter_async_context(_end("holder", port=port))
        again.keeper.store(3, 33)
        await eventually(lambda: [status.up for status in reader.links.statuses()] == [True])
        link = await reader.links.link(again.peer, WAIT_S)
        assert await link.pull(_hashes(33), [0], deadline_s=WAIT_S) == 1
        assert np.all(reader.keeper.memory[0] == 33)


async def test_close_leaves_no_task() -> None:
    before = asyncio.all_tasks()
    async with _two() as (reader, holder):
        link = await reader.links.link(holder.peer, WAIT_S)
        reader.gate.shut("before")
        pull = asyncio.create_task(link.pull(_hashes(1), [0], deadline_s=WAIT_S))
        await reader.gate.reached.wait()
        await reader.links.close()
        with pytest.raises(LinkError):
            await pull
    await eventually(lambda: not {task for task in asyncio.all_tasks() - before if "antiphon" in str(task.get_coro())})
