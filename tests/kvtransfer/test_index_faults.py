"""Whatever happens to the feed, to Redis or to one side: soon the mirror is what the workers hold, block by block.

Each row of `FAULTS` is harm done to a real server, or to the way to it, while three workers change their sets about two
hundred times a second. After the harm the mirror must reach what each worker held at that moment, and equal it exactly.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import pytest
from antiphon_kvtransfer.cluster import MirrorCounters

from tests.support import stream_edits
from tests.support.index_scene import KEYS, TTL_MS, Scene
from tests.support.membership import until
from tests.support.stream_edits import Edit, edit_unread_events


@dataclass(frozen=True)
class Fault:
    name: str
    inject: Callable[[Scene], Awaitable[None]]
    noticed: Callable[[MirrorCounters, MirrorCounters], bool]
    """From the mirror's counters before and after: that the harm reached it."""


def edited(edit: Edit) -> Callable[[Scene], Awaitable[None]]:
    async def inject(scene: Scene) -> None:
        with scene.client() as client:
            await edit_unread_events(scene.to_mirror, client, KEYS.events, edit)

    return inject


async def send_the_stream_backward(scene: Scene) -> None:
    """A last id in the past, as a restored copy has. The engines rest, so that nothing newer hides it."""
    scene.rest()
    await scene.until_true()
    with scene.client() as client, client.pipeline(transaction=True) as pipeline:
        pipeline.delete(KEYS.events)
        pipeline.xadd(KEYS.events, {"kind": "none", "worker": "w0"}, id="1-1")
        pipeline.execute()
    await scene.until_looked()
    scene.go_on()


async def write_nonsense(scene: Scene) -> None:
    """Events of a later version, and events that are no events."""
    with scene.client() as client:
        for fields in (
            {"kind": "of a later version", "worker": "w0"},
            {"kind": "delta", "worker": "w0"},
            {"kind": "delta", "worker": "w0", "incarnation": "i1", "previous": "x", "sequence": "y"},
            {"kind": "withdrawn", "worker": b"\xff", "incarnation": "i1"},
        ):
            client.xadd(KEYS.events, fields)
        position = scene.mirror.blocks.position("demo", "w0")
        assert position is not None
        # Half a hash, in a delta that would continue exactly where the worker stands.
        client.xadd(
            KEYS.events,
            {"kind": "delta", "worker": "w0", "incarnation": "i1", "previous": position.sequence}
            | {"sequence": position.sequence + 10**6, "stored": b"12345678", "removed": b""},
        )
    await scene.until_looked()


async def restart_the_gateway(scene: Scene) -> None:
    await scene.kill_gateway()
    await scene.until_changed(20)
    await scene.start_gateway()


async def restart_a_worker_in_place(scene: Scene) -> None:
    """Under the same id, with an empty pool, while the old one's record and blocks are still in Redis."""
    await scene.kill_worker("w0")
    await scene.start_worker("w0")


async def restart_valkey_empty(scene: Scene) -> None:
    scene.server.kill()
    await scene.until_changed(20)
    scene.server.start()


async def flush(scene: Scene) -> None:
    with scene.client() as client:
        client.flushall()


async def lose_one_set(scene: Scene) -> None:
    """As when Redis evicts keys for want of memory."""
    with scene.client() as client:
        client.delete(KEYS.blocks("w0"))
        client.delete(KEYS.index("w1"))


async def fail_over_to_a_lagging_replica(scene: Scene) -> None:
    """The replica hears nothing for a while, then its primary dies, and it is what everybody is pointed at."""
    primary, replica = scene.server, await scene.replica()
    replica.lag()
    await scene.until_changed(60)
    with scene.client() as ahead, scene.client_of(replica.server) as behind:
        assert int(ahead.hget(KEYS.index("w0"), "sequence")) > int(behind.hget(KEYS.index("w0"), "sequence"))
    primary.kill()
    replica.promote()
    scene.move_to(replica.server)


async def freeze_valkey(scene: Scene) -> None:
    """Longer than the records' time to live: all have run out when it goes on."""
    scene.server.freeze()
    await until(lambda: not scene.mirror.healthy)
    await asyncio.sleep(TTL_MS / 1000 + 0.2)
    scene.server.thaw()


async def cut_the_gateway_off(scene: Scene) -> None:
    outages = scene.mirror.counters.outages
    scene.to_mirror.hold_requests()
    await until(lambda: scene.mirror.counters.outages > outages)
    scene.to_mirror.cut()
    scene.to_mirror.release()


async def lose_the_answers_to_the_workers(scene: Scene) -> None:
    """What they wrote is in, and they do not know."""
    scene.to_workers.hold_replies()
    await scene.until_changed(20)
    scene.to_workers.cut()
    scene.to_workers.release()


def reload(before: MirrorCounters, after: MirrorCounters) -> bool:
    """A gap, or a look, showed it."""
    return after.reloads > before.reloads


def all_loaded(before: MirrorCounters, after: MirrorCounters) -> bool:
    """By a mirror that is new, so what was counted before is another one's."""
    return after.reloads >= 3


def outage(before: MirrorCounters, after: MirrorCounters) -> bool:
    return after.outages > before.outages


def outage_or_another_server(before: MirrorCounters, after: MirrorCounters) -> bool:
    """Where the connection is made anew between two commands, only the other run id tells."""
    return outage(before, after) or reload(before, after)


def nothing(before: MirrorCounters, after: MirrorCounters) -> bool:
    """What was written or read twice changes nothing, and costs no reload."""
    return (after.gaps, after.reloads, after.catch_ups) == (before.gaps, before.reloads, before.catch_ups)


def unreadable(before: MirrorCounters, after: MirrorCounters) -> bool:
    return after.unreadable == before.unreadable + 4


FAULTS = (
    Fault("deltas dropped", edited(stream_edits.drop), reload),
    Fault("deltas duplicated", edited(stream_edits.duplicate), nothing),
    Fault("deltas reordered", edited(stream_edits.reorder), reload),
    Fault("stream trimmed", edited(stream_edits.trim), reload),
    Fault("stream deleted", edited(stream_edits.delete), reload),
    Fault("stream went backward", send_the_stream_backward, reload),
    Fault("unreadable events", write_nonsense, unreadable),
    Fault("gateway restarted", restart_the_gateway, all_loaded),
    Fault("worker restarted in place", restart_a_worker_in_place, reload),
    Fault("Valkey restarted empty", restart_valkey_empty, outage_or_another_server),
    Fault("Valkey flushed", flush, reload),
    Fault("a set and an index evicted", lose_one_set, reload),
    Fault("fail-over to a lagging replica", fail_over_to_a_lagging_replica, outage_or_another_server),
    Fault("Valkey frozen", freeze_valkey, outage),
    Fault("gateway cut off", cut_the_gateway_off, outage),
    Fault("answers to the workers lost", lose_the_answers_to_the_workers, nothing),
)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
async def test_the_mirror_is_what_the_workers_hold_again(fault: Fault) -> None:
    """llm-d/llm-d-router#1737 (gaps never checked, dropped events lost for good), llm-d/llm-d-router#2853 (a worker
    restarted in place keeps its old blocks), ai-dynamo/dynamo#4904 (a restarted front end finds only some),
    vllm-project/aibrix#917 (replicas that know different things)."""
    async with Scene() as scene:
        before = scene.counted()
        await fault.inject(scene)
        # So that nothing which the mirror knew before will do.
        await scene.until_changed(1)
        await scene.until_true()
        assert fault.noticed(before, scene.counted()), (before, scene.counted())
        # And what comes later is followed again.
        await scene.until_changed(5)
        await scene.until_true()
        assert scene.fewest_workers == len(scene.engines), "a living worker was dropped"
