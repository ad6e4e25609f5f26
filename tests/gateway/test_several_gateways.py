"""Two gateways and one worker's room: what one keeps back the other hears from the worker, and leaves room to it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from antiphon_gateway.holding_shared import RoomOfAll
from antiphon_gateway.load import WorkerLoad
from antiphon_policy.admission import Entry, Priority, WaitingLine
from antiphon_policy.latency import StepModel
from antiphon_policy.routing import WorkerRole
from antiphon_policy.sharing import NEWS_MS
from antiphon_proto import worker_pb2 as pb

from tests.support.eventually import eventually
from tests.support.workers import TIMED, AttachClient, Workers


def load(gateway: str, sent: list[pb.KeptBack]) -> WorkerLoad:
    client: Any = SimpleNamespace(
        attachment=SimpleNamespace(worker_id="p", role=WorkerRole.PREFILL, group=None),
        queue=pb.QueueState(gateways=2),
        step_model=StepModel(),
        gateway_id=gateway,
        keep_back=sent.append,
    )
    return WorkerLoad(client, 0.0, confirmed_in_s=3.0)


def entry(due_ms: float) -> Entry[Any]:
    return Entry(key=object(), arrived_ms=0.0, uncached_tokens=100, due_ms=due_ms)


def test_what_one_tells_the_other_leaves_room_to_until_the_worker_speaks_of_it_no_more() -> None:
    told: list[pb.KeptBack] = []
    urgent, patient = (RoomOfAll(), load("urgent", told)), (RoomOfAll(), load("patient", []))
    line: WaitingLine[Any] = WaitingLine()
    line.add(entry(500.0))
    for room, its in (urgent, patient):
        assert not room.heard(its, 0.0)
    urgent[0].tell(line, [urgent[1]], 0.0)
    urgent[0].tell(line, [urgent[1]], 0.01)
    assert [(kept.tokens, kept.due_in_ms) for kept in told] == [(100, 500)]
    said = told[0]
    said.gateway_id, said.said_ms_ago = "urgent", 10
    room, its = patient
    its.client.queue.kept_back.append(said)
    room.heard(its, 0.01)
    assert room.others_tokens == 100
    assert room.leaves_ms(its, entry(900.0), 0.01) == NEWS_MS
    # The other one is gone, and says so by nothing more than that the worker does not name it.
    del its.client.queue.kept_back[:]
    assert room.heard(its, 0.02)
    assert room.leaves_ms(its, entry(900.0), 0.02) == 0.0
    assert room.others_tokens == 0


def test_when_nothing_waits_any_more_the_worker_is_told_so() -> None:
    told: list[pb.KeptBack] = []
    room, its = RoomOfAll(), load("a", told)
    line: WaitingLine[Any] = WaitingLine()
    waits = entry(500.0)
    line.add(waits)
    room.heard(its, 0.0)
    room.tell_before_room(line, its, 0.0)
    line.remove(waits.key)
    room.tell(line, (), 0.01)
    assert [kept.tokens for kept in told] == [100, 0]


def test_alone_at_a_worker_nothing_is_told() -> None:
    told: list[pb.KeptBack] = []
    room, its = RoomOfAll(), load("a", told)
    its.client.queue.gateways = 1
    line: WaitingLine[Any] = WaitingLine()
    line.add(entry(500.0))
    room.heard(its, 0.0)
    room.tell(line, [its], 0.0)
    room.tell_before_room(line, its, 0.0)
    assert told == []


async def test_a_worker_tells_each_gateway_what_the_others_keep_back_until_they_go_away(tmp_path: Path) -> None:
    async with Workers(tmp_path) as workers:
        (worker,) = await workers.start_all((*TIMED, "--role", "prefill"))
        async with AttachClient(worker) as listens:
            async with AttachClient(worker) as keeps:
                await keeps.send(
                    pb.GatewayMessage(kept_back=pb.KeptBack(tokens=700, priority=Priority.NORMAL, due_in_ms=400))
                )
                await eventually(lambda: listens.queue is not None and len(listens.queue.kept_back) == 1)
                assert listens.queue is not None
                (heard,) = listens.queue.kept_back
                assert (heard.gateway_id, heard.tokens, heard.due_in_ms) == (keeps.gateway_id, 700, 400)
                assert listens.queue.gateways == 2
            await eventually(lambda: listens.queue is not None and not listens.queue.kept_back)
            await listens.send(pb.GatewayMessage(kept_back=pb.KeptBack(tokens=1)))
            await eventually(lambda: listens.queue is not None and len(listens.queue.kept_back) == 1)
            await listens.send(pb.GatewayMessage(kept_back=pb.KeptBack()))
            await eventually(lambda: listens.queue is not None and not listens.queue.kept_back)
            assert listens.queue is not None
            assert listens.queue.gateways == 1
