"""A worker's other surroundings: UCX, Redis, traces, metrics, exit codes."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import redis
from antiphon_kvtransfer.cluster import ClusterMirror
from antiphon_kvtransfer.identity import chain_hashes, chain_root, contents_digest
from antiphon_proto import worker_pb2 as wire

from tests.support.valkey import Valkey
from tests.support.workers import AttachClient, Workers, eventually, prompt_of

SMALL_BLOCKS = ("--block-tokens", "16", "--max-batch-tokens", "64")


@pytest.fixture
async def workers(tmp_path: Path) -> AsyncIterator[Workers]:
    async with Workers(tmp_path) as started:
        yield started


async def test_blocks_move_over_ucx(workers):
    pytest.importorskip("nixl_cu12", reason="NIXL is not installed")
    ucx = (*SMALL_BLOCKS, "--transport", "ucx")
    prefill, decode = await workers.start_all(("--role", "prefill", *ucx), ("--role", "decode", *ucx))
    async with AttachClient(decode) as client:
        await client.wire_up(prefill)
        [link] = (await decode.status())["links"]
        assert link["transport"] == "ucx"
        assert link["gigabytes_per_s"] > 0
        answers = await asyncio.gather(
            *(
                client.run(client.submission(prompt_of(333, seed=number), prefill=[prefill], max_tokens=10))
                for number in range(4)
            )
        )
        for answer in answers:
            assert answer.usage.pulled_blocks == 333 // 16
            assert len(answer.token_ids) == 10
        again = await client.run(client.submission(prompt_of(333, seed=0), max_tokens=10))
        assert again.token_ids == answers[0].token_ids
    await decode.until_idle()
    await prefill.until_idle()
    assert await prefill.terminate() == 0
    assert await decode.terminate() == 0


async def test_a_worker_announces_itself_and_its_blocks_and_withdraws(workers):
    with Valkey() as valkey:
        worker = await workers.start("--role", "both", "--redis-url", valkey.url, *SMALL_BLOCKS)
        mirror = ClusterMirror(valkey.url, on_change=lambda: None)
        task = asyncio.create_task(mirror.run())
        try:
            await eventually(lambda: worker.worker_id in mirror.workers())
            record = mirror.workers()[worker.worker_id]
            assert record.incarnation == worker.ready.incarnation
            assert record.address == worker.ready.address
            assert record.role == "both"
            async with AttachClient(worker) as client:
                card = await client.card()
                assert record.card_digest == card.digest
                await client.run(client.submission(prompt_of(100), cache_salt=b"tenant"))
            root = chain_root(
                model=card.model, revision=card.revision, adapter=card.adapter, kv_format=card.kv_format, salt=b"tenant"
            )
            chain = chain_hashes(root, prompt_of(100), card.block_tokens)
            await eventually(lambda: mirror.blocks.leading_blocks(card.model, chain) == {worker.worker_id: 6})
            assert await worker.terminate() == 0
            await eventually(lambda: worker.worker_id not in mirror.workers())
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def test_redis_that_goes_away_disturbs_no_request(workers):
    with Valkey() as valkey:
        worker = await workers.start("--role", "both", "--redis-url", valkey.url)
        valkey.kill()
        async with AttachClient(worker) as client:
            answer = await client.run(client.submission(prompt_of(100), max_tokens=20))
            assert len(answer.token_ids) == 20
        valkey.start()
        connection = redis.Redis.from_url(valkey.url)
        ends_at = time.monotonic() + 10
        while not any(worker.worker_id.encode() in key for key in connection.scan_iter()):
            assert time.monotonic() < ends_at, "the worker did not announce itself again"
            await asyncio.sleep(0.05)
        connection.close()
        assert await worker.terminate() == 0


def spans(log: str) -> list[dict]:
    """What the console exporter printed between log lines."""
    decoder = json.JSONDecoder()
    found = []
    for match in re.finditer(r"^\{$", log, re.MULTILINE):
        span, _ = decoder.raw_decode(log, match.start())
        found.append(span)
    return found


async def test_one_trace_through_decode_prefill_and_pulls(workers):
    traced = {"OTEL_TRACES_EXPORTER": "console"}
    prefill, decode = await asyncio.gather(
        workers.start("--role", "prefill", *SMALL_BLOCKS, environment=traced),
        workers.start("--role", "decode", *SMALL_BLOCKS, environment=traced),
    )
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    async with AttachClient(decode) as client:
        await client.wire_up(prefill)
        traceparent = f"00-{trace_id}-b7ad6b7169203331-01"
        await client.run(client.submission(prompt_of(300), prefill=[prefill], traceparent=traceparent))
    assert await decode.terminate() == 0
    assert await prefill.terminate() == 0
    decode_spans = {span["name"]: span for span in spans(decode.log)}
    prefill_spans = {span["name"]: span for span in spans(prefill.log)}
    assert {"decode", "remote prefill", "kv.pull", "kv.pull_partial"} <= set(decode_spans)
    every = [*decode_spans.values(), *prefill_spans.values()]
    assert {span["context"]["trace_id"] for span in every} == {f"0x{trace_id}"}
    assert decode_spans["decode"]["parent_id"] == "0xb7ad6b7169203331"
    assert prefill_spans["prefill"]["parent_id"] == decode_spans["remote prefill"]["context"]["span_id"]
    chunks = [event for event in prefill_spans["prefill"]["events"] if event["name"] == "chunk"]
    assert [event["attributes"]["antiphon.blocks"] for event in chunks] == [4, 8, 12, 16, 18]


async def test_metrics_tell_steps_blocks_and_links(workers):
    prefill, decode = await workers.start_all(("--role", "prefill", *SMALL_BLOCKS), ("--role", "decode", *SMALL_BLOCKS))
    async with AttachClient(decode) as client:
        await client.wire_up(prefill)
        await client.run(client.submission(prompt_of(300), prefill=[prefill], max_tokens=5))
        await decode.until_idle()
        assert await decode.metric("antiphon_engine_steps_total") > 0
        assert await decode.metric("antiphon_pulled_blocks_total") == 19
        assert await decode.metric("antiphon_pulled_bytes_total") == 19 * 512
        assert await decode.metric("antiphon_pulls_total", result="complete") >= 2
        assert await decode.metric("antiphon_worker_requests_total", role="decode", ending="length") == 1
        assert "# TYPE antiphon_engine_preemptions_total counter" in await decode.page("/metrics")
        assert await decode.metric("antiphon_link_up", peer=prefill.worker_id, transport="tcp") == 1
        assert await decode.metric("antiphon_blocks_free") == await decode.metric("antiphon_blocks_total")
        assert await prefill.metric("antiphon_worker_requests_total", role="prefill", ending="complete") == 1


async def test_the_queue_state_carries_a_step_model_that_was_learnt(workers):
    """The prior is right for the timed engine, so make it wrong: other coefficients than it waits by."""
    worker = await workers.start("--role", "both", "--timed-base-ms", "8", "--timed-per-new-token-ms", "0.1")
    async with AttachClient(worker) as client:
        await asyncio.gather(
            *(client.run(client.submission(prompt_of(700, seed=number), max_tokens=30)) for number in range(3))
        )
        status = await worker.status()
        assert 6 < status["step_model"]["base_ms"] < 12
        assert 0.05 < status["step_model"]["per_new_token_ms"] < 0.2
        await eventually(lambda: client.queue is not None and client.queue.step_model.base_ms > 6)


async def test_a_model_folder_that_is_not_there_is_one_sentence_and_exit_code_2(tmp_path):
    async with Workers(tmp_path, "--engine", "torch", "--transport", "tcp") as workers:
        with pytest.raises(AssertionError, match="ended with 2"):
            await workers.start("--model", str(tmp_path / "nothing"))
        assert "Traceback" not in (tmp_path / "worker-0.log").read_text()


async def test_a_redis_url_that_is_none_is_one_sentence_and_exit_code_2(workers, tmp_path):
    for number, url in enumerate(("localhost:6379", "redis://:secret@[half", "redis://host:port")):
        with pytest.raises(AssertionError, match="ended with 2"):
            await workers.start("--redis-url", url)
        log = (tmp_path / f"worker-{number}.log").read_text()
        assert "--redis-url: the Redis URL" in log
        assert "redis://" in log.splitlines()[-1]
        assert "Traceback" not in log
        assert "secret" not in log


async def test_the_page_of_blocks_is_what_the_index_holds(workers):
    worker = await workers.start("--role", "both", *SMALL_BLOCKS)
    assert json.loads(await worker.page("/blocks")) == {
        "incarnation": worker.ready.incarnation,
        "sequence": 0,
        "digest": contents_digest([]),
        "blocks": [],
    }
    async with AttachClient(worker) as client:
        card = await client.card()
        await client.run(client.submission(prompt_of(100), max_tokens=1))
    root = chain_root(
        model=card.model, revision=card.revision, adapter=card.adapter, kv_format=card.kv_format, salt=b""
    )
    page = json.loads(await worker.page("/blocks"))
    assert page["blocks"] == sorted(block.hex() for block in chain_hashes(root, prompt_of(100), card.block_tokens))
    status = await worker.status()
    assert (page["sequence"], len(page["blocks"])) == (status["index_sequence"], status["indexed_blocks"])


async def test_workers_that_are_told_to_end_leave_no_warning(workers):
    """A rolling restart is not a failure: nobody should be woken by its log lines."""
    with Valkey() as valkey:
        redis_url = ("--redis-url", valkey.url)
        one, two = await workers.start_all(("--role", "prefill", *redis_url), ("--role", "decode", *redis_url))
        async with AttachClient(one) as first, AttachClient(two) as second:
            await first.wire_up(two)
            await second.wire_up(one)
        # The peer that stays looks for the one that has left, and says so, as it is still wanted.
        assert await one.terminate() == 0
        await eventually(lambda: "is ending" in two.log)
        assert await two.terminate() == 0
    for line in one.log.splitlines():
        assert not {"warning", "error", "critical"} & set(line.split()), line
    assert "broke: worker" in two.log
    assert not [line for line in two.log.splitlines() if " warning " in line and "broke" in line]


async def test_cached_card_is_the_same_for_equal_workers(workers):
    one, two = await workers.start_all(("--role", "both"), ("--role", "both"))
    async with AttachClient(one) as first, AttachClient(two) as second:
        assert first.welcome.card_digest == second.welcome.card_digest
        card = await first.card()
        without = wire.ModelCard()
        without.CopyFrom(card)
        without.digest = ""
        assert card.digest != without.digest
