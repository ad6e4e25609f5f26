"""A worker's own chunk, and what of its pool is empty, count where it is judged."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from antiphon_gateway.load import Pledge, WorkerLoad
from antiphon_policy.latency import CHUNK_TOKENS, StepModel
from antiphon_policy.routing import WorkerRole
from antiphon_proto import worker_pb2 as pb

STEP = StepModel(base_ms=10.0, per_new_token_ms=0.1, per_sequence_ms=0.0, per_kv_token_ms=0.0)


def load(**figures: int) -> WorkerLoad:
    client: Any = SimpleNamespace(
        attachment=SimpleNamespace(worker_id="a", role=WorkerRole.BOTH, group=None),
        queue=pb.QueueState(free_blocks=50, total_blocks=100, **figures),
        step_model=STEP,
    )
    return WorkerLoad(client, 0.0, confirmed_in_s=4.0)


def test_smaller_chunks_pay_for_more_steps_but_need_less_in_advance() -> None:
    large, small = load(chunk_tokens=1000, waiting_tokens=4000), load(chunk_tokens=100, waiting_tokens=4000)
    assert large.queue_ms(0.0) == 4 * 10.0 + 400.0
    assert small.queue_ms(0.0) == 40 * 10.0 + 400.0
    assert (large.tokens_per_ms, small.tokens_per_ms) == (1000 / 110.0, 100 / 20.0)
    assert (large.horizon_ms, small.horizon_ms) == (110.0, 20.0)
    assert (large.view(0.0, draining=False).chunk_tokens, small.view(0.0, draining=False).chunk_tokens) == (1000, 100)


def test_a_worker_that_does_not_say_its_chunk_is_taken_to_have_the_usual_one() -> None:
    assert load().view(0.0, draining=False).chunk_tokens == CHUNK_TOKENS


def test_a_chunk_that_is_said_later_counts_from_then_on() -> None:
    worker = load()
    before = worker.tokens_per_ms
    worker.client.queue.chunk_tokens = 100
    assert worker.tokens_per_ms == 5.0 < before


def test_what_was_just_sent_there_is_taken_from_what_is_empty_too() -> None:
    worker = load(empty_blocks=8)
    assert worker.view(0.0, draining=False).empty_blocks == 8
    worker.pledge(Pledge(tokens=192, blocks=3, decodes=True, made_at=0.0))
    assert worker.view(0.0, draining=False).empty_blocks == 5
    worker.pledge(Pledge(tokens=640, blocks=10, decodes=True, made_at=0.0))
    view = worker.view(0.0, draining=False)
    assert (view.empty_blocks, view.free_blocks) == (0, 37)
