"""Two revisions of one Model as real workers, and an operator's records, while clients stream."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

from tests.support.house import House, Streamed
from tests.support.model_records import KEY, OperatorVoice, model_record
from tests.support.workers import TIMED, WorkerProcess, prompt_of


async def revision(house: House, name: str) -> list[WorkerProcess]:
    return await house.start_workers(
        *(
            ("--role", role, "--revision", name, "--worker-id", f"{role}-{name}", "--no-list-model")
            for role in ("prefill", "decode")
        )
    )


async def until_counted(house: House, **expected: int) -> None:
    """The gateway has so many prefill and as many decode workers of each revision."""
    wanted = {name: {"prefill": count, "decode": count} for name, count in expected.items()}
    async with asyncio.timeout(30):
        while (await house.client.get(f"{house.url}/ready")).json()["models"][KEY]["revisions"] != wanted:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def test_a_rollout_loses_no_request_and_never_mixes_revisions(tmp_path: Path) -> None:
    options = (*TIMED, "--name", KEY, "--timed-base-ms", "5")
    async with House(tmp_path, *options) as house:
        operator = OperatorVoice(house.valkey)
        operator.put(model_record(revisions={"a": 1000}))
        old = await revision(house, "a")
        await house.start_gateway("--ready-without-workers")
        await until_counted(house, a=1)
        assert house.model == "qwen"

        numbers, stop = itertools.count(), asyncio.Event()
        answers: list[Streamed] = []

        async def client() -> None:
            while not stop.is_set():
                answer = await house.stream(prompt_of(300, seed=next(numbers)), max_tokens=30)
                answers.append(answer)

        clients = [asyncio.create_task(client()) for _ in range(6)]
        new = await revision(house, "b")
        await until_counted(house, a=1, b=1)
        operator.put(model_record(revisions={"a": 500, "b": 500}))
        for worker in new:
            await worker.until(lambda status: status["active_requests"] > 0, 20)

        # A long stream on the old revision, which then drains.
        [_, decode] = old
        operator.put(model_record(revisions={"a": 1000, "b": 0}))
        await asyncio.sleep(1.5)
        long = Streamed()
        streaming = asyncio.create_task(house.stream(prompt_of(300, seed=next(numbers)), long, max_tokens=400))
        await asyncio.wait_for(long.first_text.wait(), 20)
        operator.put(model_record(revisions={"a": 0, "b": 1000}, draining=tuple(worker.worker_id for worker in old)))
        await until_counted(house, a=0, b=1)
        await decode.until(lambda status: status["active_requests"] == 1, 20)
        assert (await streaming).complete
        for worker in old:
            status = await worker.until(lambda status: status["active_requests"] == 0, 20)
            assert status["prefill_runs"] == status["pins"] == 0
            assert {link["peer_worker_id"][-1] for link in status["links"]} == {"a"}
            assert await worker.terminate() == 0
        stop.set()
        await asyncio.gather(*clients)

        assert len(answers) > 20
        assert all(answer.complete for answer in answers), [answer.error for answer in answers if answer.error]
        for worker in new:
            status = await worker.until_idle(20)
            assert {link["peer_worker_id"][-1] for link in status["links"]} == {"b"}
            assert status["revision"] == "b"
        assert await new[1].metric("antiphon_remote_prefills_total", result="complete") > 0
        await house.until_gateway_is_at_rest()
