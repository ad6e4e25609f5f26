"""What a worker knows of its own speed before its first request, and whom it tells."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from antiphon_engine import BlockEngine, SchedulerConfig
from antiphon_engine.torch_engine.executor import TorchExecutor
from antiphon_engine.torch_engine.sampler import Sampler
from antiphon_worker.hardware import hardware_name
from antiphon_worker.options import WorkerOptions
from antiphon_worker.self_measure import measured_steps

from tests.support.engine import Recorder
from tests.support.torch_engine import info_for, tiny_model
from tests.support.workers import AttachClient, Workers, eventually, prompt_of

TIMED_LIKE = ("--timed-base-ms", "3", "--timed-per-new-token-ms", "0.05")


async def test_a_worker_that_has_served_nobody_tells_gateways_its_measured_speed(tmp_path: Path) -> None:
    async with Workers(tmp_path) as workers:
        worker = await workers.start("--role", "both", *TIMED_LIKE)
        async with AttachClient(worker) as client:
            told = client.welcome.queue.step_model
            assert client.welcome.hardware == "timed"
            assert told.samples > 3
            assert told.relative_error == 0.0, "no real step was predicted yet"
            assert told.base_ms == pytest.approx(3.0, rel=0.1)
            assert told.per_new_token_ms == pytest.approx(0.05, rel=0.1)
            assert (await worker.status())["step_model"]["observed"]["new_tokens"] == [1, 512]
            assert await worker.metric("antiphon_engine_steps_total") == 0
            assert await worker.metric("antiphon_worker_step_model_samples") == told.samples

            await client.run(client.submission(prompt_of(100), max_tokens=5))
            await eventually(lambda: client.queue is not None and client.queue.step_model.samples > told.samples)
            steps = await worker.metric("antiphon_engine_steps_total")
            assert await worker.metric("antiphon_worker_step_model_samples") == told.samples + steps
            assert 0.0 < await worker.metric("antiphon_worker_step_prediction_error_ratio") < 50.0


async def test_it_can_be_told_not_to(tmp_path: Path) -> None:
    async with Workers(tmp_path) as workers:
        worker = await workers.start("--role", "both", "--no-self-measure", *TIMED_LIKE)
        async with AttachClient(worker) as client:
            assert client.welcome.queue.step_model.samples == 0
            assert client.welcome.queue.step_model.base_ms == 3.0, "the prior"


async def test_the_torch_engine_times_real_steps_and_leaves_its_pool_as_it_was() -> None:
    model = tiny_model("llama")
    info = info_for(model, torch.float32, 16)
    executor = TorchExecutor(
        model,
        info,
        num_blocks=60,
        block_tokens=16,
        dtype=torch.float32,
        sampler=Sampler(info.vocab_size),
        kernels=False,
    )
    engine = BlockEngine(executor, SchedulerConfig(max_batch_tokens=128, max_sequences=8))
    measuring = engine.measure_first(budget_ms=60_000.0)
    recorder = Recorder()
    engine.start(recorder)
    try:
        samples = await measured_steps(measuring)
        assert {(16, 1), (1, 1), (4, 4)} <= {(sample.new_tokens, sample.sequences) for sample in samples}
        assert all(sample.duration_ms > 0 for sample in samples)
        report = engine.check_integrity()
        assert (report.free_blocks, report.used_blocks, report.cached_blocks) == (60, 0, 0)
        assert engine.indexed_blocks() == (0, frozenset())
        assert not recorder.steps
    finally:
        engine.close()


def options(**changes: object) -> WorkerOptions:
    return WorkerOptions(**{"threads": 4, **changes})  # type: ignore[arg-type]


def test_equal_machines_have_one_name_and_what_decides_over_speed_is_in_it(tmp_path: Path) -> None:
    cpu_info, cpu_share = tmp_path / "cpuinfo", tmp_path / "cpu.max"
    cpu_info.write_text("processor\t: 0\nmodel name\t: A  Processor 9000\nprocessor\t: 1\nmodel name\t: Another one\n")
    cpu_share.write_text("max 100000\n")

    def name(**changes: object) -> str:
        return hardware_name(options(**changes), cpu_info=cpu_info, cpu_share=cpu_share)

    assert (
        name()
        == name(worker_id="another", port=1234, role="prefill")
        == ("torch bfloat16 tp1 pp1 ep1, A Processor 9000 x4")
    )
    others = {name(threads=2), name(dtype="float32"), name(engine="timed"), name(tensor_parallel=2)}
    assert len(others | {name()}) == 5
    cpu_share.write_text("150000 100000\n")
    assert name() == "torch bfloat16 tp1 pp1 ep1, A Processor 9000 x4 on 1.5 cores"
    cpu_share.write_text("800000 100000\n")
    assert name().endswith("x4"), "a limit that does not bind"


def test_a_machine_that_tells_nothing_of_itself_has_a_name_all_the_same(tmp_path: Path) -> None:
    name = hardware_name(options(), cpu_info=tmp_path / "none", cpu_share=tmp_path / "none")
    assert name.startswith("torch bfloat16 tp1 pp1 ep1, ")
    assert name.endswith(" x4")
