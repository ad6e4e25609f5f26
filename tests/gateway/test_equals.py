"""Workers of equal hardware: a new one is priced by what the others measured, a slow one soon by itself."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import pytest
from antiphon_gateway.equals import POOLED_FOR_S, EqualWorkers
from antiphon_gateway.groups import Group
from antiphon_gateway.worker_client import Attachment, Timing, WorkerClient
from antiphon_policy.equals import TRUSTED_SAMPLES, Fitted
from antiphon_policy.latency import StepModel
from antiphon_policy.routing import WorkerRole
from antiphon_proto import worker_pb2 as pb

from tests.support.fake_worker import FakeWorker
from tests.support.gateway import eventually, running_gateway

TRUE = StepModel(4.0, 0.3, 2e-5, 0.2, 5e-4)
SLOW = StepModel(12.0, 0.9, 6e-5, 0.6, 15e-4)
PRIOR = StepModel()


class Scene:
    """Clients that are told what their workers say, without streams."""

    def __init__(self) -> None:
        self.now = 0.0
        self.equals = EqualWorkers(lambda: self.now)

    def worker(
        self,
        model: StepModel,
        samples: int,
        *,
        hardware: str = "torch bfloat16 tp1 pp1 ep1, A x4",
        card: str = "a card",
        role: WorkerRole = WorkerRole.BOTH,
    ) -> WorkerClient:
        client = WorkerClient("127.0.0.1:1", "a gateway", Timing(500, 1500), cast("Any", None))
        client.attachment = Attachment("a worker", "1", role, Group("a model", "", card), hardware)
        self.says(client, model, samples)
        return client

    def says(self, client: WorkerClient, model: StepModel, samples: int) -> None:
        self.now += POOLED_FOR_S
        client.fitted = Fitted(model, samples)
        client.step_model = model
        self.equals.heard(client)


def test_a_new_worker_is_priced_by_what_its_equals_measured() -> None:
    scene = Scene()
    others = [scene.worker(TRUE, 500) for _ in range(3)]
    new = scene.worker(PRIOR, 0)
    assert new.step_model == TRUE
    assert all(other.step_model is TRUE for other in others)
    scene.says(new, SLOW, TRUSTED_SAMPLES // 2)
    assert new.step_model.base_ms == pytest.approx(8.0), "half is its own by now"


def test_a_slow_worker_among_equals_keeps_its_own_fit_and_makes_nobody_else_look_slow() -> None:
    scene = Scene()
    for _ in range(3):
        scene.worker(TRUE, 500)
    slow = scene.worker(SLOW, TRUSTED_SAMPLES)
    assert slow.step_model is SLOW
    assert scene.worker(PRIOR, 0).step_model == TRUE


@pytest.mark.parametrize(
    "differs", [{"hardware": "another"}, {"card": "another"}, {"role": WorkerRole.DECODE}, {"hardware": ""}]
)
def test_who_is_no_equal_has_no_say(differs: dict[str, Any]) -> None:
    scene = Scene()
    scene.worker(TRUE, 500)
    assert scene.worker(PRIOR, 2, **differs).step_model == PRIOR


def test_what_a_worker_is_priced_by_stays_the_same_object_while_nothing_is_new() -> None:
    scene = Scene()
    scene.worker(TRUE, 500)
    new = scene.worker(PRIOR, 5)
    priced_by = new.step_model
    scene.now += POOLED_FOR_S
    scene.equals.heard(new)
    assert new.step_model is priced_by


def test_who_left_is_forgotten() -> None:
    scene = Scene()
    left = scene.worker(TRUE, 500)
    scene.equals.forget(left)
    scene.equals.forget(left)
    assert scene.worker(PRIOR, 2).step_model == PRIOR
    assert len(scene.equals._kinds) == 1


async def test_a_fit_goes_with_the_stream_and_is_taken_again_only_when_it_has_changed() -> None:
    told = pb.StepCoefficients(base_ms=7.0, per_new_token_ms=0.25, samples=40, relative_error=0.125)
    worker = FakeWorker()
    worker.queue.step_model.CopyFrom(told)
    async with running_gateway(worker) as running:
        client = next(iter(running.gateway.fleet.workers().values()))
        assert client.fitted == Fitted(StepModel(7.0, 0.25, 0.0, 0.0, 0.0), 40, 0.125)
        assert client.step_model is client.fitted.model
        before = client.step_model
        client._take_queue(worker.queue)
        assert client.step_model is before
        worker.queue.step_model.samples = 41
        worker.queue.step_model.base_ms = 8.0
        await eventually(lambda: client.step_model.base_ms == 8.0)
    assert dataclasses.replace(before, base_ms=8.0) == client.step_model
