"""The gateway's process with `--grpc-port`: it starts, drains and ends with both ways in."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from antiphon_proto import inference_pb2 as api
from antiphon_proto import inference_pb2_grpc as api_grpc
from antiphon_telemetry.exit import ExitCode

from tests.gateway.test_process import Gate, gateway, start
from tests.support.fake_worker import FakeWorker
from tests.support.grpc_calls import failure_of, rest_of, told_by

ASKED = api.ChatCompletionRequest(model="test-model", messages=[api.Message(role="user", content="hello")])


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


async def test_a_signal_drains_both_ways_in(tmp_path: Path) -> None:
    gate, port = Gate(), free_port()
    worker = FakeWorker(behaviour=gate)
    async with (
        gateway(tmp_path, worker, grpc_port=port) as process,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        stub: Any = api_grpc.InferenceStub(channel)
        call = stub.StreamChatCompletion(ASKED, wait_for_ready=True, timeout=60)
        await call.read()
        process.signal()
        await process.ready(503)
        error = await failure_of(stub.ChatCompletion(ASKED))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert told_by(error)["x-antiphon-error-code"] == "draining"
        gate.open.set()
        assert "".join(chunk.choices[0].delta.content for chunk in await rest_of(call)) == "ab"
        assert await process.exit_code() == 0


def test_a_port_that_is_taken_is_said_and_nothing_is_left() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        process = start(port=0, grpc_port=taken.getsockname()[1])
        _, said = process.communicate(timeout=60)
    assert process.returncode == ExitCode.UNAVAILABLE
    assert b"cannot listen for gRPC on 127.0.0.1 port" in said
