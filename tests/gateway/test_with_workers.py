"""The awkward requests once more, against real worker processes (timed engine): prompts computed on one, answers
decoded on another."""

from __future__ import annotations

import json
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.support.gateway import RunningGateway, eventually, running_gateway
from tests.support.openai_cases import CHECKS
from tests.support.workers import WorkerProcess, Workers

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def workers(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[list[WorkerProcess]]:
    folder: Path = tmp_path_factory.mktemp("workers")
    async with Workers(folder) as started:
        yield await started.start_all(("--role", "decode"), ("--role", "prefill"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(workers: list[WorkerProcess]) -> AsyncIterator[RunningGateway]:
    async with running_gateway(worker=tuple(worker.ready.address for worker in workers)) as gateway:
        await eventually(lambda: len(gateway.gateway.fleet.workers()) == 2)
        yield gateway


@pytest.mark.parametrize("case", CHECKS)
async def test_case(running: RunningGateway, case: str) -> None:
    (model,) = running.gateway.models
    await CHECKS[case](running.url, model.name)
    await eventually(lambda: running.at_rest)


async def test_nothing_is_left_on_the_workers(running: RunningGateway, workers: list[WorkerProcess]) -> None:
    for worker in workers:
        await worker.until_idle()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_stream_whose_only_worker_dies_ends_with_an_error(tmp_path: Path, number: signal.Signals) -> None:
    async with Workers(tmp_path) as started:
        worker = await started.start("--role", "both")
        async with running_gateway(worker=(worker.ready.address,)) as running:
            await eventually(lambda: len(running.gateway.fleet.workers()) == 1)
            (model,) = running.gateway.models
            body = {"model": model.name, "prompt": "hello", "max_tokens": 4000, "ignore_eos": True, "stream": True}
            lines: list[str] = []
            async with running.client.stream("POST", "/v1/completions", json=body) as response:
                async for line in response.aiter_lines():
                    if line:
                        lines.append(line.removeprefix("data: "))
                    if len(lines) == 5:
                        worker.send_signal(number)
            assert response.status_code == 200
            assert "[DONE]" not in lines
            assert json.loads(lines[-1])["error"]["code"] == "worker_failed"
            await eventually(lambda: running.at_rest)
            refused = await running.client.post("/v1/completions", json={**body, "stream": False})
            assert refused.status_code == 503
