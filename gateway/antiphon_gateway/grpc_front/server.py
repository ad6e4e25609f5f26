"""The gRPC server: `antiphon.v1.Inference`, health and reflection, in the gateway's own event loop.

    serving -> (stop) -> no new calls, running ones to their end, bounded -> closed

Owned by the process (`antiphon_gateway.server`) or a test. Each call has a coroutine, which is gRPC's and is cancelled
when the client cancels or its deadline is over, and a task for the gateway's handler, which then is told that its
client has gone, as with HTTP. Methods are registered as streams of raw messages both ways (on the wire that is the
same), so that what is asked is read when the handler wants it, within its deadline.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeAlias

import grpc
import grpc.aio

from antiphon_gateway.app import Gateway
from antiphon_gateway.errors import ApiError, client_too_slow
from antiphon_gateway.grpc_front.failures import status_of, trailing
from antiphon_gateway.grpc_front.health import HEALTH, Health
from antiphon_gateway.grpc_front.methods import METHODS, SERVICE
from antiphon_gateway.grpc_front.reflection import REFLECTION, reflection_handlers
from antiphon_gateway.grpc_front.request import Context, GrpcRequest, Method
from antiphon_gateway.http import ClientGone

log = logging.getLogger("antiphon.gateway")

MAX_CALLS = 4096
"""At one time on one connection; a client's further ones wait at the client."""
MAX_METADATA_BYTES = 64 * 1024
_KEEPALIVE_MS = 30_000
_KEEPALIVE_TIMEOUT_MS = 20_000
_CLIENTS_PING_MS = 5_000
_IDENTITY_ONLY = 1

_Behaviour: TypeAlias = Callable[[AsyncIterator[bytes], Context], Awaitable[None]]


class GrpcFront:
    """See the module."""

    def __init__(self, gateway: Gateway, *, last_words_s: float) -> None:
        """`last_words_s`: how long answers may take to end once the front is to stop."""
        self._gateway = gateway
        self._last_words_s = last_words_s
        self._health = Health(gateway)
        self._server = grpc.aio.server(options=_channel_options(gateway))
        handlers = {method.name: _raw(self._behaviour(method)) for method in METHODS}
        self._server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(SERVICE, handlers),
                grpc.method_handlers_generic_handler(HEALTH, self._health.handlers()),
                *reflection_handlers((SERVICE, HEALTH, REFLECTION), gateway.check_key),
            )
        )

    async def start(self, host: str, port: int) -> str:
        """Listen; the address. Raises OSError where it cannot."""
        place = f"[{host}]" if ":" in host else host
        try:
            taken = self._server.add_insecure_port(f"{place}:{port}")
        except RuntimeError as error:
            raise OSError(str(error)) from error
        await self._server.start()
        self._health.start()
        return f"{place}:{taken}"

    async def stop(self) -> None:
        """Take no more calls, let running ones end, and cancel those that do not."""
        await self._health.stop()
        await self._server.stop(self._last_words_s)

    # -- calls

    def _behaviour(self, method: Method) -> _Behaviour:
        async def serve(_: AsyncIterator[bytes], context: Context) -> None:
            await self._serve(GrpcRequest(context, SERVICE, method, self._gateway.text), method, context)

        return serve

    async def _serve(self, request: GrpcRequest, method: Method, context: Context) -> None:
        handling = asyncio.create_task(self._handle(request, method))
        try:
            await asyncio.shield(handling)
        except asyncio.CancelledError:
            request.lose_client()
            await asyncio.wait({handling}, timeout=self._last_words_s)
            handling.cancel()
            await asyncio.gather(handling, return_exceptions=True)
            raise
        finally:
            request.forget()
        if request.given_up:
            await self._end_slow(request, context)
        elif request.failure is not None:
            await _abort(request, request.failure, context)

    async def _handle(self, request: GrpcRequest, method: Method) -> None:
        if method.path_of is not None:
            try:
                # Before anything of it is read.
                self._gateway.check_key(request)
                message, _ = await request.message(self._gateway.options.body_timeout_s)
                request.path = method.path_of(message)
            except ApiError as error:
                request.failure = error
                return
            except ClientGone:
                return
        await self._gateway.handle(request)

    async def _end_slow(self, request: GrpcRequest, context: Context) -> None:
        """The status stands behind what the client has not read; nobody waits until it has read that."""
        try:
            async with asyncio.timeout(self._last_words_s):
                await _abort(request, client_too_slow(), context)
        except (TimeoutError, asyncio.InvalidStateError):
            log.debug("request %s: its client has not read the status", request.request_id)


async def _abort(request: GrpcRequest, error: ApiError, context: Context) -> None:
    metadata = trailing(error)
    if not request.head_sent:
        metadata += request.metadata()
    await context.abort(status_of(error), error.message, metadata)


def _raw(behaviour: _Behaviour) -> grpc.RpcMethodHandler[Any, Any]:
    return grpc.stream_stream_rpc_method_handler(behaviour)


def _channel_options(gateway: Gateway) -> list[tuple[str, Any]]:
    options = gateway.options
    return [
        ("grpc.max_receive_message_length", options.max_body_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.max_concurrent_streams", MAX_CALLS),
        # As with HTTP: what is small compressed may be anything when it is not.
        ("grpc.compression_enabled_algorithms_bitset", _IDENTITY_ONLY),
        # Several gateways on one port only where that is asked for.
        ("grpc.so_reuseport", int(options.reuse_port)),
        # A peer that vanished is found out, and a client may look for us as often.
        ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", _CLIENTS_PING_MS),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", _CLIENTS_PING_MS),
    ]
