"""grpc.health.v1: whether this gateway can serve, as `/ready` says it.

`Check` looks when it is asked; who watches is told within a second. Nobody is asked for a key here, so few questions
are read at a time and none is waited for long: one may be as long as any message.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2 as pb

from antiphon_gateway.app import Gateway
from antiphon_gateway.grpc_front.methods import SERVICE
from antiphon_gateway.grpc_front.request import Context

HEALTH: str = pb.DESCRIPTOR.services_by_name["Health"].full_name

_KNOWN = ("", SERVICE)
_READ_AT_ONCE = 8
_READ_S = 5.0
_LOOK_S = 1.0


class Health:
    """See the module. Owned by the front."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._reading = asyncio.Semaphore(_READ_AT_ONCE)
        self._told = False
        """What those who watch were told last."""
        self._changed = asyncio.Event()
        """Replaced by a new one at each change."""
        self._looking: asyncio.Task[None] | None = None

    def handlers(self) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
        return {
            name: grpc.stream_stream_rpc_method_handler(
                behaviour, response_serializer=pb.HealthCheckResponse.SerializeToString
            )
            for name, behaviour in (("Check", self._check), ("Watch", self._watch))
        }

    def start(self) -> None:
        self._look()
        self._looking = asyncio.create_task(self._keep_looking(), name="grpc health")

    async def stop(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            self._look()

    def _look(self) -> None:
        ready = self._gateway.ready
        if ready is not self._told:
            self._told = ready
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()

    async def _check(self, _: AsyncIterator[bytes], context: Context) -> None:
        service = await self._service(context)
        if service not in _KNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"There is no service {service[:100]!r} here.")
        await context.write(_answer(self._gateway.ready))

    async def _watch(self, _: AsyncIterator[bytes], context: Context) -> None:
        service = await self._service(context)
        if service not in _KNOWN:
            await context.write(pb.HealthCheckResponse(status=pb.HealthCheckResponse.SERVICE_UNKNOWN))
            await asyncio.Event().wait()
        told: bool | None = None
        while True:
            changed = self._changed
            if self._told is not told:
                told = self._told
                await context.write(_answer(told))
            else:
                await changed.wait()

    async def _service(self, context: Context) -> str:
        """That is asked about."""
        try:
            async with asyncio.timeout(_READ_S), self._reading:
                data = await context.read()
            request = pb.HealthCheckRequest.FromString(data if isinstance(data, bytes) else b"")
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "The question did not arrive in time.")
        except DecodeError:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "The message is no HealthCheckRequest.")
        service: str = request.service
        return service


def _answer(ready: bool) -> pb.HealthCheckResponse:
    response = pb.HealthCheckResponse
    return response(status=response.SERVING if ready else response.NOT_SERVING)
