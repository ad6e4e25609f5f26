"""How fast what waits is placed where nothing has to be held: by as few looks as can be, and not by a guessed speed.

Counted, not timed: looks and decisions, with the real dispatcher and workers that accept at once.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from antiphon_gateway import ApiKeys, Gateway, GatewayOptions
from antiphon_gateway.flight import Flight, Target, Ticket
from antiphon_gateway.groups import Group
from antiphon_gateway.load import SUBMIT_WINDOW
from antiphon_gateway.models import Model, Prompt
from antiphon_gateway.placing import Placing
from antiphon_gateway.waiting import MAX_STARTED
from antiphon_gateway.worker_client import Attachment, Timing, WorkerClient
from antiphon_policy.routing import WorkerRole
from antiphon_proto import worker_pb2 as pb
from opentelemetry.trace import INVALID_SPAN

from tests.support.eventually import eventually
from tests.support.fake_worker import byte_card

WORKERS = 4


class AcceptsAtOnce:
    """The stream to a worker that takes whatever comes, in the next turn of the event loop."""

    def __init__(self, client: WorkerClient) -> None:
        self._client = client
        self.submits = 0

    def send(self, message: bytes) -> None:
        said = pb.GatewayMessage.FromString(message)
        if said.WhichOneof("kind") == "submit":
            self.submits += 1
            accepted = pb.WorkerMessage(accepted=pb.Accepted(ref=said.submit.ref))
            asyncio.get_running_loop().call_soon(self._client._take, accepted)


class OpenFleet:
    """A gateway with workers that accept at once, and say nothing else after their welcome."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, says: pb.QueueState | None = None) -> None:
        self.looks = 0
        self.plans = 0
        self.gateway = Gateway(GatewayOptions(queue_size=10_000), ApiKeys(None), "pace")
        card = byte_card()
        self._model = Model(card)
        self.gateway.models.add(self._model)
        self._group = Group(card.model, "", card.digest)
        self.streams = []
        for number in range(WORKERS):
            client = WorkerClient(f"w{number}:1", "pace", Timing(500, 1500), self.gateway.fleet)
            client.attachment = Attachment(f"w{number}", f"w{number}/1", WorkerRole.BOTH, self._group)
            stream = AcceptsAtOnce(client)
            client._stream = stream  # type: ignore[assignment]
            client._take_queue(says or pb.QueueState(free_blocks=100_000, total_blocks=100_000))
            self.gateway.fleet.attached(client)
            self.streams.append(stream)
        self.flights: list[Flight] = []
        self._count(monkeypatch)

    def _count(self, monkeypatch: pytest.MonkeyPatch) -> None:
        refresh, plan = Placing.refresh, Placing.plan

        def looked(*given: Any, **more: Any) -> None:
            self.looks += 1
            refresh(*given, **more)

        def planned(*given: Any) -> Any:
            self.plans += 1
            return plan(*given)

        monkeypatch.setattr(Placing, "refresh", looked)
        monkeypatch.setattr(Placing, "plan", planned)

    def arrive(self, requests: int) -> None:
        """So many at once, before anybody can answer."""
        target = Target(self._model.name, self._group, self._model, 4096, b"")
        for number in range(requests):
            flight = Flight(
                Ticket(f"r{number}", "tenant", b"", "", INVALID_SPAN, time.monotonic()),
                target,
                [Prompt([97] * 64, ())],
                pb.Sampling(max_tokens=20),
                choices_per_prompt=1,
                buffer_steps=64,
                metrics=self.gateway.metrics.of(self._model.name, "completions"),
            )
            self.flights.append(flight)
            self.gateway.dispatcher.enqueue(flight)

    @property
    def waiting(self) -> int:
        return self.gateway.dispatcher.waiting

    def end(self) -> None:
        for flight in self.flights:
            self.gateway.dispatcher.withdraw(flight)


async def test_one_that_comes_to_an_open_fleet_is_one_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = OpenFleet(monkeypatch)
    for _ in range(3):
        fleet.arrive(1)
        await asyncio.sleep(0)
    assert (fleet.waiting, fleet.looks, fleet.plans) == (0, 3, 3)
    fleet.end()


async def test_two_thousand_at_once_are_placed_by_few_looks_on_workers_that_accept_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody reports anything meanwhile. What the workers may have unanswered is filled at once; each further look
    starts as many as one may, as all have been accepted until then; and no decision is made in vain, but for those
    that find all full."""
    fleet = OpenFleet(monkeypatch)
    fleet.arrive(2000)
    assert fleet.waiting == 2000 - WORKERS * SUBMIT_WINDOW
    fleet.looks = 0
    await eventually(lambda: fleet.waiting == 0)
    needed = -(-(2000 - WORKERS * SUBMIT_WINDOW) // MAX_STARTED)
    assert needed <= fleet.looks <= 2 * needed
    assert 2000 <= fleet.plans <= 2000 + 1 + fleet.looks
    assert sum(stream.submits for stream in fleet.streams) == 2000
    assert all(abs(stream.submits - 500) <= SUBMIT_WINDOW for stream in fleet.streams)
    fleet.end()


async def test_a_worker_that_says_how_fast_it_computes_is_held_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other side: prompts of 64 tokens at half a millisecond each, so about nine fit before the horizon."""
    slow = pb.StepCoefficients(base_ms=2.1, per_new_token_ms=0.5, samples=100)
    fleet = OpenFleet(monkeypatch, says=pb.QueueState(free_blocks=100_000, total_blocks=100_000, step_model=slow))
    fleet.arrive(100)
    assert WORKERS * 8 <= 100 - fleet.waiting <= WORKERS * 10
    fleet.end()
    assert fleet.waiting == 0
