"""Who hears of a worker's load, when: gateways that got nothing of a step hear of it too, but not too often."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from antiphon_engine.interface import Load, StepResult
from antiphon_proto import worker_pb2 as wire
from antiphon_worker.load_news import EVERY_S, LoadNews

from tests.support.workers import AttachClient, Workers, prompt_of, within

IDLE = Load(running=0, waiting=0, waiting_tokens=0, kv_tokens=0, free_blocks=8, total_blocks=8, retained_blocks=0)


class Report:
    """What the worker would say now, and how often a message was made of it."""

    def __init__(self) -> None:
        self.of_now = IDLE
        self.made = 0

    def load(self) -> Load:
        return self.of_now

    def state_of(self, load: Load) -> wire.QueueState:
        self.made += 1
        return wire.QueueState(kv_tokens=load.kv_tokens)


@dataclass(eq=False)
class Gateway:
    takes_load: bool = True
    owed_load: bool = False
    heard: list[tuple[float, wire.WorkerMessage]] = field(default_factory=list)

    def tell_load(self, message: wire.WorkerMessage) -> None:
        self.owed_load = False
        self.heard.append((asyncio.get_running_loop().time(), message))


class Scene:
    def __init__(self, *gateways: Gateway) -> None:
        self.report = Report()
        report: Any = self.report
        self.gateways = set(gateways)
        self.news = LoadNews(report, self.gateways)

    def step(self, load: Load | None = None) -> None:
        """Ends a step, after which the load is another, or the one that is given."""
        load = load or replace(IDLE, kv_tokens=self.report.of_now.kv_tokens + 1)
        self.report.of_now = load
        self.news.observe(StepResult((), (), load, None))

    async def pass_by(self) -> None:
        """Longer than anything may be put off."""
        await asyncio.sleep(2 * EVERY_S)


async def test_all_gateways_hear_of_a_step_at_once_by_one_message() -> None:
    one, other = Gateway(), Gateway()
    scene = Scene(one, other)
    scene.step()
    assert not one.heard  # what the step brought goes first
    await asyncio.sleep(0)
    await scene.pass_by()
    assert len(one.heard) == len(other.heard) == scene.report.made == 1
    assert one.heard[0][1] is other.heard[0][1]
    assert one.heard[0][1].step.queue.kv_tokens == 1


async def test_many_steps_are_told_together_and_the_last_one_is_never_left_out() -> None:
    gateway = Gateway()
    scene = Scene(gateway)
    loop = asyncio.get_running_loop()
    ends_at = loop.time() + 5 * EVERY_S
    while loop.time() < ends_at:
        scene.step()
        last = loop.time()
        await asyncio.sleep(0.001)
    await scene.pass_by()
    times = [at for at, _ in gateway.heard]
    assert min(after - before for before, after in itertools.pairwise(times)) >= EVERY_S - 1e-3
    assert times[-1] >= last
    assert scene.report.made == len(times)


async def test_who_was_told_meanwhile_is_not_told_again() -> None:
    gateway, other = Gateway(), Gateway()
    scene = Scene(gateway, other)
    scene.step()
    gateway.owed_load = False  # the load went with what the step brought
    await scene.pass_by()
    assert not gateway.heard
    assert len(other.heard) == 1


async def test_steps_that_change_nothing_and_idleness_say_nothing() -> None:
    gateway = Gateway()
    scene = Scene(gateway)
    scene.step(IDLE)
    await scene.pass_by()
    scene.step(replace(IDLE))
    await scene.pass_by()
    assert len(gateway.heard) == 1


async def test_a_gateway_that_does_not_read_is_passed_over_until_it_does() -> None:
    slow, reads = Gateway(takes_load=False), Gateway()
    scene = Scene(slow, reads)
    for _ in range(4):
        scene.step()
        await scene.pass_by()
    assert not slow.heard
    assert len(reads.heard) == 4
    slow.takes_load = True
    await scene.pass_by()
    assert len(slow.heard) == 1
    assert len(reads.heard) == 4


async def test_what_changes_without_a_step_is_told_while_there_is_work() -> None:
    gateway = Gateway()
    scene = Scene(gateway)
    scene.step(replace(IDLE, running=1))
    await scene.pass_by()
    scene.report.of_now = replace(IDLE, running=1, waiting=1)
    await scene.pass_by()
    scene.report.of_now = IDLE
    await scene.pass_by()
    assert len(gateway.heard) == 3
    scene.report.of_now = replace(IDLE, waiting=1)  # for nobody looks any more
    await scene.pass_by()
    assert len(gateway.heard) == 3


async def test_nothing_is_told_after_the_end() -> None:
    gateway = Gateway()
    scene = Scene(gateway)
    scene.step()
    scene.news.close()
    await scene.pass_by()
    assert not gateway.heard


# -- real workers: heartbeats come once in ten seconds, so what is heard of loads comes by steps

SELDOM = ("--heartbeat-ms", "10000", "--lost-after-ms", "60000", "--timed-base-ms", "5", "--kv-blocks", "64")


@pytest.fixture
async def workers(tmp_path: Path) -> AsyncIterator[Workers]:
    async with Workers(tmp_path) as workers:
        yield workers


def was_at_work(client: AttachClient) -> bool:
    return any(batch.queue.free_blocks < 64 for batch in client.batches)


def is_done(queue: wire.QueueState | None) -> bool:
    return queue is not None and not (queue.running or queue.waiting) and queue.free_blocks == 64


async def test_gateways_hear_the_load_of_prefill_workers_and_of_what_others_sent(workers: Workers) -> None:
    prefill, decode = await workers.start_all(
        ("--role", "prefill", "--max-batch-tokens", "64", *SELDOM), ("--role", "decode", *SELDOM)
    )
    async with AttachClient(prefill) as to_prefill, AttachClient(decode) as to_decode, AttachClient(decode) as other:
        assert to_prefill.welcome is not None
        empty = to_prefill.welcome.queue
        assert (empty.chunk_tokens, empty.empty_blocks, empty.free_blocks) == (64, 64, 64)
        await to_decode.wire_up(prefill)
        answer = to_decode.submission(prompt_of(640), prefill=[prefill], max_tokens=20, ignore_eos=True)
        await to_decode.run(answer)

        async def settled(client: AttachClient) -> None:
            while not (was_at_work(client) and is_done(client.queue)):  # noqa: ASYNC110 - it reads in a task of its own
                await asyncio.sleep(0.01)

        await within(5, asyncio.gather(settled(to_prefill), settled(other)))
        for client in (to_prefill, other):
            assert not client.heartbeats
            assert not any(batch.steps for batch in client.batches)
        # Ten chunks: it was seen at work on the prompt, and what it keeps of the prompt now is free, but not empty.
        assert any(batch.queue.waiting_tokens for batch in to_prefill.batches)
        assert to_prefill.queue is not None
        assert to_prefill.queue.empty_blocks == 54
