"""The gateway's gRPC front beside its HTTP server, and the same body by both ways."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc
import grpc.aio
from antiphon_gateway.grpc_front.server import GrpcFront
from antiphon_proto import inference_pb2 as api
from antiphon_proto import inference_pb2_grpc as api_grpc
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from tests.support.fake_worker import FakeWorker
from tests.support.gateway import RunningGateway, running_gateway

Metadata: TypeAlias = Sequence[tuple[str, str]]
LAST_WORDS_S = 2.0


@dataclass(slots=True)
class RunningFront:
    running: RunningGateway
    front: GrpcFront
    address: str
    channel: grpc.aio.Channel
    stub: Any
    """An `api_grpc.InferenceStub`, which has no types for grpc.aio."""


@contextlib.asynccontextmanager
async def front_of(running: RunningGateway) -> AsyncIterator[RunningFront]:
    """A gRPC front of a gateway that runs, and a client of it."""
    front = GrpcFront(running.gateway, last_words_s=LAST_WORDS_S)
    address = await front.start("127.0.0.1", 0)
    try:
        async with grpc.aio.insecure_channel(address) as channel:
            yield RunningFront(running, front, address, channel, api_grpc.InferenceStub(channel))
    finally:
        await front.stop()


@contextlib.asynccontextmanager
async def running_front(*workers: FakeWorker, **options: Any) -> AsyncIterator[RunningFront]:
    """The same with workers and a gateway of its own."""
    async with running_gateway(*workers, **options) as running, front_of(running) as front:
        yield front


async def rest_of(call: Any) -> list[Any]:
    """The messages that are left of a stream."""
    messages = []
    while (message := await call.read()) is not grpc.aio.EOF:
        messages.append(message)
    return messages


async def failure_of(call: Any) -> grpc.aio.AioRpcError:
    """How a call failed, a stream's as well."""
    try:
        if isinstance(call, grpc.aio.UnaryStreamCall):
            while await call.read() is not grpc.aio.EOF:
                pass
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return error
    raise AssertionError("the call went well")


def told_by(error: grpc.aio.AioRpcError) -> dict[str, str]:
    """The trailing metadata."""
    return {name: str(value) for name, value in error.trailing_metadata() or ()}


# ------------------------------------------------------------------ HTTP's body as a message


def message_of(kind: type[Message], body: dict[str, Any]) -> Any:
    """What a client of gRPC would send for this body. Fails where the message has no field for something."""
    message = kind()
    if not isinstance(body, dict):
        raise TypeError("the body is no object")
    for name, value in body.items():
        if name != "stream" and value is not None:
            _set(message, name, value)
    return message


def _set(message: Any, name: str, value: Any) -> None:
    field = message.DESCRIPTOR.fields_by_name.get(name)
    if field is None and "extra" in message.DESCRIPTOR.fields_by_name:
        message.extra = json.dumps({**json.loads(message.extra or "{}"), name: value})
        return
    assert field is not None, f"{message.DESCRIPTOR.name} has no field {name}"
    if name == "content" and isinstance(value, list):
        field, name = message.DESCRIPTOR.fields_by_name["content_parts"], "content_parts"
    if field.GetOptions().Extensions[api.json_text]:
        if field.is_repeated:
            getattr(message, name).extend(json.dumps(one) for one in value)
        else:
            setattr(message, name, value if isinstance(value, str) else json.dumps(value))
    elif name == "prompt" and isinstance(message, api.CompletionRequest):
        several = isinstance(value, list) and value and not isinstance(value[0], int)
        message.prompt.extend(_prompt(one) for one in (value if several else [value]))
    elif isinstance(message, api.ChatCompletionRequest | api.TokenizeRequest) and name == "tool_choice":
        named = isinstance(value, dict)
        message.tool_choice.CopyFrom(
            api.ToolChoice(function=value["function"]["name"]) if named else api.ToolChoice(mode=value)
        )
    elif field.message_type is not None and field.message_type.GetOptions().map_entry:
        if any(isinstance(number, bool) for number in value.values()):
            raise TypeError(f"{name} has a value that is no number")
        getattr(message, name).update({int(key): number for key, number in value.items()})
    elif field.type == FieldDescriptor.TYPE_MESSAGE:
        for one in value if field.is_repeated else [value]:
            part = getattr(message, name).add() if field.is_repeated else getattr(message, name)
            part.SetInParent()
            for inner, inner_value in one.items():
                if inner_value is not None:
                    _set(part, inner, inner_value)
    elif field.is_repeated:
        values = [value] if name == "stop" and isinstance(value, str) else value
        if not isinstance(values, list):
            raise TypeError(f"{name} is no list")
        getattr(message, name).extend(_fitting(field, one) for one in values)
    else:
        setattr(message, name, _fitting(field, value))


def _fitting(field: FieldDescriptor, value: Any) -> Any:
    """Protobuf takes 0 for false and true for 1; JSON does not. Raises TypeError."""
    if isinstance(value, bool) is not (field.type == FieldDescriptor.TYPE_BOOL):
        raise TypeError(f"{field.name} cannot be {value!r}")
    return value


def _prompt(given: str | list[int]) -> api.Prompt:
    return api.Prompt(text=given) if isinstance(given, str) else api.Prompt(token_ids=api.TokenIds(ids=given))


# ------------------------------------------------------------------ answers, as JSON has them


def as_json(answer: Any) -> Any:
    """A message as HTTP's JSON would be: fields that are not set are null, what JSON says twice is said once."""
    made: dict[str, Any] = {}
    for field in answer.DESCRIPTOR.fields:
        value = getattr(answer, field.name)
        if field.is_repeated:
            made[field.name] = [as_json(one) if field.message_type is not None else one for one in value]
        elif field.has_presence and not answer.HasField(field.name):
            made[field.name] = None
        elif field.message_type is not None:
            made[field.name] = as_json(value)
        else:
            made[field.name] = list(value) if isinstance(value, bytes) else value
    return made


def without(answer: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in answer.items() if name not in names}
