"""What both endpoints share in rendering answers: usage, finish reasons, and bytes of server-sent events.

A stream's chunks differ in a few values only, so everything else is encoded once per request, and a chunk is a join
of bytes.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import msgspec
from antiphon_proto import worker_pb2 as pb

from antiphon_gateway.errors import ApiError
from antiphon_gateway.flight import Choice, Flight

DONE = b"data: [DONE]\n\n"

FINISH_REASONS = {pb.FINISH_STOP: "stop", pb.FINISH_LENGTH: "length"}

FINISH_REASONS_JSON = {pb.FINISH_NONE: b"null", pb.FINISH_STOP: b'"stop"', pb.FINISH_LENGTH: b'"length"'}


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    reasoning_tokens: int


class UsageBody(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | msgspec.UnsetType = msgspec.UNSET
    """Where the model is known to reason."""


class Renderer(Protocol):
    """Turns the steps of one flight into the answer's bytes; one of the endpoints' two, for one request."""

    def take(self, choice: Choice, step: pb.RequestStep) -> bytes:
        """One step of a streamed answer as events; empty: nothing to send yet."""

    def end(self, flight: Flight) -> bytes:
        """What follows when all choices have ended well."""

    def whole(self, flight: Flight) -> bytes:
        """An answer that is sent whole, from what its choices collected."""


def usage(flight: Flight, reasoning_tokens: int | None = None) -> UsageBody:
    """`reasoning_tokens`: of all choices; None: they are not told apart."""
    prompt_tokens = flight.prompt_tokens
    completion_tokens = flight.completion_tokens
    return UsageBody(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptTokensDetails(min(prompt_tokens, flight.cached_tokens)),
        completion_tokens_details=(
            msgspec.UNSET if reasoning_tokens is None else CompletionTokensDetails(reasoning_tokens)
        ),
    )


@runtime_checkable
class TellsFailure(Protocol):
    """A renderer whose streams end in a way of their own where they fail."""

    def failed(self, error: ApiError) -> bytes:
        """What ends a stream that has begun and cannot go on."""


class Frame:
    """The constant bytes around every chunk of one stream. Made only for answers that are streamed."""

    def __init__(self, *, id: str, object: str, created: int, model: str, include_usage: bool) -> None:
        head = msgspec.json.encode({"id": id, "object": object, "created": created, "model": model})
        self._head = b"data: " + head[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"
        self.include_usage = include_usage

    def chunk(self, choice: bytes) -> bytes:
        return self._head + choice + self._tail

    def last(self, flight: Flight, reasoning_tokens: int | None = None) -> bytes:
        """The usage chunk, where it was asked for, and the end. `reasoning_tokens`: as `usage` takes them."""
        if not self.include_usage:
            return DONE
        return self._head + b'],"usage":' + msgspec.json.encode(usage(flight, reasoning_tokens)) + b"}\n\n" + DONE
