"""Bodies that are half right, by both ways: what HTTP serves gRPC serves, and it refuses the rest in the same words."""

from __future__ import annotations

import asyncio
import http.client
import json
from collections import Counter
from typing import Any
from urllib.parse import urlsplit

import grpc
from antiphon_gateway.errors import ApiError
from antiphon_gateway.grpc_front.failures import status_of
from antiphon_gateway.parameters import Endpoint
from antiphon_proto import inference_pb2 as api
from antiphon_proto import inference_pb2_grpc as api_grpc
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.support.fake_worker import FakeWorker, byte_card
from tests.support.fuzzed_bodies import Fuzzed, fuzzed
from tests.support.gateway import eventually
from tests.support.grpc_calls import message_of, running_front

BATCHES = 12
BATCH = 40
KINDS = {Endpoint.CHAT.value: api.ChatCompletionRequest, Endpoint.COMPLETIONS.value: api.CompletionRequest}


def as_message(body: Fuzzed) -> tuple[Any, bool] | None:
    """And whether it is streamed; None where a message cannot say that."""
    kind = KINDS.get(body.path)
    try:
        given = json.loads(body.raw)
        if kind is None or given.get("stream") not in (None, True, False):
            return None
        return message_of(kind, given), bool(given.get("stream"))
    except (ValueError, TypeError, AttributeError, KeyError, AssertionError, OverflowError, RecursionError):
        return None


def send_all(url: str, address: str) -> Counter[str]:
    """How often each status came by both ways. Raises AssertionError where they differ."""
    found: Counter[str] = Counter()
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=20)
    channel = grpc.insecure_channel(address)
    stub = api_grpc.InferenceStub(channel)

    def over_grpc(path: str, message: Any, stream: bool) -> tuple[str, str]:
        chat = path == Endpoint.CHAT.value
        try:
            if stream:
                list((stub.StreamChatCompletion if chat else stub.StreamCompletion)(message, timeout=20))
            else:
                (stub.ChatCompletion if chat else stub.Completion)(message, timeout=20)
        except grpc.RpcError as error:
            return error.code().name, error.details() or ""
        return "OK", ""

    @settings(
        max_examples=BATCHES,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(fuzzed("test-model"), min_size=BATCH, max_size=BATCH))
    def send(bodies: list[Fuzzed]) -> None:
        for body in bodies:
            made = as_message(body)
            if made is None:
                continue
            connection.request("POST", body.path, body.raw)
            response = connection.getresponse()
            answer = response.read()
            wanted = ("OK", "")
            if response.status != 200:
                said = json.loads(answer)["error"]
                code = status_of(ApiError(response.status, "", type="", code=said["code"])).name
                wanted = (code, said["message"])
            told = over_grpc(body.path, *made)
            assert told[0] == wanted[0], (body, wanted, told)
            # Of several faults, the one in the message itself is found before all else.
            found["in the same words"] += told == wanted and told[0] != "OK"
            found[told[0]] += 1

    try:
        send()
    finally:
        connection.close()
        channel.close()
    return found


async def test_what_a_message_can_say_is_answered_alike() -> None:
    async with running_front(FakeWorker(byte_card(context=200)), trust_request_chat_template=True) as front:
        found = await asyncio.to_thread(send_all, front.running.url, front.address)
        await eventually(lambda: front.running.at_rest)
        assert found["OK"] > 50
        assert found["INVALID_ARGUMENT"] > 20
        assert found["in the same words"] > 0.7 * found["INVALID_ARGUMENT"]
        assert set(found) <= {"OK", "INVALID_ARGUMENT", "NOT_FOUND", "in the same words"}
