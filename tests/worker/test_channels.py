"""The worker's gRPC server against a caller that is frozen: its process is stopped, its kernel still answers."""

from __future__ import annotations

import asyncio
import signal
import sys
from typing import Any

import grpc
import grpc.aio
from antiphon_proto import worker_pb2 as wire
from antiphon_proto.worker_pb2_grpc import WorkerServicer, add_WorkerServicer_to_server
from antiphon_worker.channels import server_options

from tests.support.workers import within

CALLER = """
import asyncio, sys, grpc.aio
from antiphon_proto import worker_pb2 as wire
from antiphon_proto.worker_pb2_grpc import WorkerStub
async def main():
    call = WorkerStub(grpc.aio.insecure_channel(sys.argv[1])).Attach()
    await call.write(wire.GatewayMessage(hello=wire.Hello()))
    await asyncio.sleep(60)
asyncio.run(main())
"""


class Servicer(WorkerServicer):
    """Sends more than a caller takes that does not read, and ends the call."""

    def __init__(self) -> None:
        self.called = asyncio.Event()
        self.frozen = asyncio.Event()
        self.ended = asyncio.Event()

    async def Attach(self, request_iterator: Any, context: Any) -> None:  # noqa: N802
        await context.read()
        self.called.set()
        await self.frozen.wait()
        try:
            await context.write(
                wire.WorkerMessage(step=wire.StepBatch(steps=[wire.RequestStep(text="x" * 50_000_000)]))
            )
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the gateway does not read")
        finally:
            self.ended.set()


async def test_the_end_of_a_call_does_not_wait_for_ever_for_a_frozen_caller() -> None:
    """Without pings of the server the end of the call would wait in its buffers for as long as the caller stands."""
    servicer = Servicer()
    server = grpc.aio.server(options=server_options(lost_after_ms=300))
    add_WorkerServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    caller = await asyncio.create_subprocess_exec(sys.executable, "-c", CALLER, f"127.0.0.1:{port}")
    try:
        await within(30, servicer.called.wait())
        caller.send_signal(signal.SIGSTOP)
        servicer.frozen.set()
        await within(20, servicer.ended.wait())
    finally:
        caller.kill()
        await caller.wait()
        await server.stop(None)
