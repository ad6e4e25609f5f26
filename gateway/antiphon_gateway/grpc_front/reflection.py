"""Server reflection: a client without the .proto file asks which services there are, and what their messages are.

With API keys it asks for one, before anything of a question is read. The protocol has two names, of which tools know
one or both; its messages are the same under both.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc
import grpc.aio
from grpc_reflection.v1alpha import reflection
from grpc_reflection.v1alpha import reflection_pb2 as pb

from antiphon_gateway.errors import ApiError
from antiphon_gateway.grpc_front.failures import status_of, trailing
from antiphon_gateway.grpc_front.request import Context, Head

REFLECTION: str = reflection.SERVICE_NAME
_NEWER_NAME = "grpc.reflection.v1.ServerReflection"


def reflection_handlers(
    services: Sequence[str], check_key: Callable[[Head], None]
) -> tuple[grpc.GenericRpcHandler[Any, Any], ...]:
    """`services`: those that it tells of. `check_key` raises ApiError for a caller without one."""
    servicer = reflection.aio.ReflectionServicer(services)  # type: ignore[attr-defined]

    async def answer(questions: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
        try:
            check_key(Head(context))
        except ApiError as error:
            await context.abort(status_of(error), error.message, trailing(error))
        async for reply in servicer.ServerReflectionInfo(questions, context):
            yield reply

    handler = grpc.stream_stream_rpc_method_handler(
        answer,
        request_deserializer=pb.ServerReflectionRequest.FromString,
        response_serializer=pb.ServerReflectionResponse.SerializeToString,
    )
    methods = {"ServerReflectionInfo": handler}
    return tuple(grpc.method_handlers_generic_handler(name, methods) for name in (REFLECTION, _NEWER_NAME))
