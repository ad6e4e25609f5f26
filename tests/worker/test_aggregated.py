"""A worker of role `both`, alone: the Attach protocol, answers, refusals, ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest
import pytest_asyncio
from antiphon_proto import worker_pb2 as wire
from antiphon_proto.worker_pb2_grpc import WorkerStub

from tests.support.workers import (
    AttachClient,
    RequestRefusedByWorker,
    StreamBroken,
    WorkerProcess,
    Workers,
    eventually,
    prompt_of,
    within,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module")
async def workers(tmp_path):
    """For tests that need a worker of their own."""
    async with Workers(tmp_path) as started:
        yield started


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def worker(tmp_path_factory) -> AsyncIterator[WorkerProcess]:
    """One worker for all tests that leave it as they found it."""
    async with Workers(tmp_path_factory.mktemp("shared")) as started:
        yield await started.start("--role", "both")


async def test_a_request_is_answered_with_tokens_text_and_usage(worker):
    async with AttachClient(worker) as client:
        answer = await client.run(client.submission(prompt_of(150, seed=77), max_tokens=6))
        assert len(answer.token_ids) == 6
        assert len(answer.text) == 6  # the timed model's tokens are single printable characters
        assert answer.finish == wire.Finish.FINISH_LENGTH
        assert answer.usage.prompt_tokens == 150
        assert answer.usage.completion_tokens == 6
        assert answer.usage.cached_tokens == 0
        again = await client.run(client.submission(prompt_of(150, seed=77), max_tokens=6))
        assert again.token_ids == answer.token_ids
        assert again.usage.cached_tokens == 128
    await worker.until_idle()


async def test_card_and_welcome_name_the_same_model(worker):
    async with AttachClient(worker) as client:
        card = await client.card()
        assert client.welcome.card_digest == card.digest
        assert client.welcome.incarnation == worker.ready.incarnation
        assert client.welcome.role == wire.Role.ROLE_BOTH
        assert card.model == "timed"
        assert card.tokenizer_json
        assert client.welcome.queue.total_blocks > 0


async def test_the_first_message_is_the_welcome_also_when_hello_is_late(worker):
    async with grpc.aio.insecure_channel(worker.ready.address) as channel:
        call = WorkerStub(channel).Attach()
        await call.wait_for_connection()
        await asyncio.sleep(0.8)  # more than a heartbeat's interval, less than the deadline of Hello
        await call.write(wire.GatewayMessage(hello=wire.Hello(gateway_id="late", heartbeat_ms=500)))
        first = await within(10, call.read())
        assert first.HasField("welcome")
        call.cancel()


async def test_a_stream_without_hello_is_ended(worker):
    async with grpc.aio.insecure_channel(worker.ready.address) as channel:
        call = WorkerStub(channel).Attach()
        await call.write(wire.GatewayMessage(heartbeat=wire.Heartbeat()))
        assert await within(10, call.code()) == grpc.StatusCode.UNAVAILABLE
        assert "Hello" in await call.details()


async def test_one_message_carries_all_requests_of_a_step(worker):
    async with AttachClient(worker) as client:
        answers = await asyncio.gather(
            *(client.run(client.submission(prompt_of(100, seed=n), max_tokens=40)) for n in range(8))
        )
        assert all(len(answer.token_ids) == 40 for answer in answers)
        # Two steps that end in one turn of a busy event loop go out together.
        assert max(len({step.ref for step in batch.steps}) for batch in client.batches) == 8
        assert len([batch for batch in client.batches if batch.steps]) < 8 * 40 / 2
    await worker.until_idle()


async def test_heartbeats_carry_the_queue_state_while_idle(worker):
    async with AttachClient(worker) as client:
        await eventually(lambda: len(client.heartbeats) >= 2)
        assert client.heartbeats[-1].queue.total_blocks > 0
        assert client.heartbeats[-1].queue.step_model.base_ms > 0


async def test_max_tokens_one(worker):
    async with AttachClient(worker) as client:
        answer = await client.run(client.submission(prompt_of(10), max_tokens=1))
        assert len(answer.token_ids) == 1
        assert answer.finish == wire.Finish.FINISH_LENGTH


async def test_stop_token_id_and_stop_string(worker):
    """The text of what stopped the answer is cut; the ids are all there."""
    async with AttachClient(worker) as client:
        plain = await client.run(client.submission(prompt_of(10), max_tokens=12, logprobs=0))
        assert len(plain.logprobs) == 12
        stop_id = plain.token_ids[4]
        first = plain.token_ids.index(stop_id)
        by_id = await client.run(client.submission(prompt_of(10), max_tokens=12, stop_token_ids=[stop_id]))
        assert by_id.token_ids == plain.token_ids[: first + 1]
        assert by_id.text == plain.text[:first]
        assert (by_id.finish, by_id.stop_reason) == (wire.Finish.FINISH_STOP, str(stop_id))

        stop = plain.text[3:6]
        begin = plain.text.index(stop)
        by_text = await client.run(client.submission(prompt_of(10), max_tokens=12, stop=[stop], logprobs=0))
        assert by_text.token_ids == plain.token_ids[: begin + 3]
        assert by_text.text == plain.text[:begin]
        assert (by_text.finish, by_text.stop_reason) == (wire.Finish.FINISH_STOP, stop)
        assert len(by_text.logprobs) == begin

        shown = await client.run(client.submission(prompt_of(10), max_tokens=12, stop=[stop], include_stop_text=True))
        assert shown.text == plain.text[: begin + 3]
    await worker.until_idle()


async def test_an_attempt_goes_on_where_an_earlier_one_stopped(worker):
    async with AttachClient(worker) as client:
        whole = await client.run(client.submission(prompt_of(70), max_tokens=20))
        rest = await client.run(client.submission(prompt_of(70), max_tokens=20, output=whole.token_ids[:7]))
        assert rest.token_ids == whole.token_ids[7:]
        assert rest.text == whole.text[7:]
        assert rest.usage.prompt_tokens == 70
        assert rest.usage.completion_tokens == 20


async def test_a_prompt_that_no_worker_could_take_is_refused_as_invalid(worker):
    async with AttachClient(worker) as client:
        with pytest.raises(RequestRefusedByWorker) as refused:
            await client.run(client.submission([]))
        assert refused.value.reason == wire.RefusalReason.REFUSAL_INVALID
        with pytest.raises(RequestRefusedByWorker) as refused:
            await client.run(client.submission([10**6]))
        assert refused.value.reason == wire.RefusalReason.REFUSAL_INVALID
    await worker.until_idle()


async def test_cancel_ends_a_request_and_frees_its_blocks(worker):
    async with AttachClient(worker) as client:
        submit = client.submission(prompt_of(200), max_tokens=5000)
        await client.submit(submit)
        steps = client.steps(submit)
        await anext(steps)
        await steps.aclose()
        await client.cancel(submit)
        await worker.until_idle()
        answer = await client.run(client.submission(prompt_of(20)))
        assert len(answer.token_ids) == 8


async def test_a_gateway_that_vanishes_takes_its_requests_along(worker):
    """vllm-project/production-stack#1040, ai-dynamo/dynamo#13691: what nobody waits for stops."""
    async with AttachClient(worker) as client:
        for number in range(3):
            await client.submit(client.submission(prompt_of(300, seed=number), max_tokens=5000))
        await worker.until(lambda status: status["active_requests"] == 3)
    await worker.until_idle()


async def test_a_gateway_that_is_silent_is_given_up(worker):
    async with AttachClient(worker, heartbeat_ms=100) as client:
        await client.submit(client.submission(prompt_of(30), max_tokens=100_000))
        client.silent = True
        broken = await within(10, client.broken)
        assert "not heard" in str(broken)
    await worker.until_idle()


async def test_a_gateway_that_does_not_read_is_broken_off(workers):
    """Its unread answers must not pile up in the worker."""
    worker = await workers.start("--role", "both", "--timed-base-ms", "0.2")
    small_window = (("grpc.http2.bdp_probe", 0),)
    async with AttachClient(worker, channel_options=small_window) as client:
        client.reading.clear()
        for number in range(8):
            submit = client.submission(prompt_of(30, seed=number), max_tokens=100_000, logprobs=5)
            await client.send(wire.GatewayMessage(submit=submit))
        await worker.until(lambda status: status["gateways"] == 0, deadline_s=30)
        client.reading.set()
        await within(10, client.broken)
    await worker.until_idle()


async def test_draining_refuses_new_requests_and_finishes_the_running(workers):
    """ai-dynamo/dynamo#13565: scale-down lets running requests end."""
    worker = await workers.start("--role", "both")
    async with AttachClient(worker) as client:
        submit = client.submission(prompt_of(30), max_tokens=300)
        await client.submit(submit)
        worker.process.terminate()
        await eventually(lambda: client.queue is not None and client.queue.draining)
        with pytest.raises(RequestRefusedByWorker) as refused:
            await client.submit(client.submission(prompt_of(20)))
        assert refused.value.reason == wire.RefusalReason.REFUSAL_DRAINING
        tokens = [token async for step in client.steps(submit) for token in step.token_ids]
        assert len(tokens) == 300
        await within(10, client.broken)
        assert await worker.terminate() == 0


async def test_a_second_signal_ends_a_drain_at_once(workers):
    worker = await workers.start("--role", "both")
    async with AttachClient(worker) as client:
        await client.submit(client.submission(prompt_of(30), max_tokens=100_000))
        worker.process.terminate()
        await worker.until(lambda status: status["draining"])
        assert await worker.terminate() == 0
        with pytest.raises(StreamBroken):
            await client.submit(client.submission(prompt_of(20)))


async def test_a_port_in_use_is_one_clear_sentence_and_an_exit_code(workers, worker):
    port = worker.ready.address.rsplit(":", 1)[1]
    with pytest.raises(AssertionError, match="is not to be had"):
        await workers.start("--role", "both", "--port", port)
    assert workers._processes[-1].returncode == 4


async def test_listening_everywhere_needs_an_address_for_peers(workers):
    with pytest.raises(AssertionError, match="--advertise-host"):
        await workers.start("--role", "both", "--host", "0.0.0.0")
    assert workers._processes[-1].returncode == 2
    worker = await workers.start("--role", "both", "--host", "0.0.0.0", "--advertise-host", "127.0.0.1")
    assert worker.ready.address.startswith("127.0.0.1:")
    async with AttachClient(worker) as client:
        assert len((await client.run(client.submission(prompt_of(10)))).token_ids) == 8


async def test_prefill_workers_refuse_requests_of_gateways(workers):
    worker = await workers.start("--role", "prefill")
    async with AttachClient(worker) as client:
        assert client.welcome.role == wire.Role.ROLE_PREFILL
        with pytest.raises(RequestRefusedByWorker) as refused:
            await client.submit(client.submission(prompt_of(20)))
        assert refused.value.reason == wire.RefusalReason.REFUSAL_WRONG_ROLE
