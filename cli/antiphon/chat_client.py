"""One side of a chat: asks an OpenAI-compatible endpoint, and gives the answer piece by piece.

A request is one connection. Whoever closes the iterator of an answer closes the connection, and by that cancels the
request. What may fail is a `ChatError`, whose message says what to do next.
"""

from __future__ import annotations

import contextlib
import email.utils
import enum
import http.client
import math
import time
import urllib.error
import urllib.request
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
from antiphon_telemetry.exit import ExitCode

from antiphon.chat_events import EventParser, EventTooLong
from antiphon.endpoint import opener

_LOOK_UP_S = 10.0
_SILENCE_S = 600.0
"""The longest time without a byte: a request may wait in a queue, and a long prompt takes its time."""
_PIECE_BYTES = 64 * 1024
_MOST_BYTES = 4 * 1024 * 1024
_DONE = b"[DONE]"


class ChatError(Exception):
    """There is no answer, or it broke off. The message says what to do next."""

    def __init__(self, message: str, exit_code: ExitCode) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Busy(ChatError):
    """The endpoint asks to come again after `retry_after_s`."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message, ExitCode.UNAVAILABLE)
        self.retry_after_s = retry_after_s


class Message(msgspec.Struct, frozen=True):
    role: Literal["system", "user", "assistant"]
    content: str


class Question(msgspec.Struct, frozen=True, omit_defaults=True):
    """The body of a request. What is not said is the endpoint's to choose."""

    stream: Literal[True]
    model: str
    messages: Sequence[Message]
    max_tokens: int | None = None
    temperature: float | None = None


class Kind(enum.Enum):
    TEXT = "text"
    REASONING = "reasoning"
    FINISH = "finish"
    """Why the answer ended, in the endpoint's word."""


@dataclass(frozen=True, slots=True)
class Piece:
    kind: Kind
    text: str


class _Delta(msgspec.Struct):
    content: str | None = None
    refusal: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)
    finish_reason: str | None = None


class _Error(msgspec.Struct):
    message: str = ""


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = msgspec.field(default_factory=list)
    error: _Error | str | None = None


class _Refusal(msgspec.Struct):
    error: _Error | str


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class ChatClient:
    """Asks one endpoint. `url` is what `/v1/...` is put behind."""

    def __init__(self, url: str, api_key: str) -> None:
        self._url = url
        self._api_key = api_key

    def models(self) -> list[str]:
        """Those that the endpoint serves. Raises ChatError."""
        try:
            with self._open("/v1/models", None, _LOOK_UP_S) as response:
                body = self._read(response)
            return [model.id for model in msgspec.json.decode(body, type=_Models).data]
        except (_NotThere, msgspec.DecodeError) as error:
            raise self._no_endpoint() from error

    def ask(self, question: Question) -> Generator[Piece, None, None]:
        """The answer's pieces. Closing the generator cancels the request. Raises ChatError, and Busy before a piece."""
        try:
            response = self._open("/v1/chat/completions", msgspec.json.encode(question), _SILENCE_S)
        except _NotThere as error:
            raise self._not_there(question.model, str(error)) from error
        with response:
            if response.headers.get_content_type() != "text/event-stream":
                raise self._no_endpoint()
            yield from self._pieces(response)

    def _pieces(self, response: http.client.HTTPResponse) -> Generator[Piece, None, None]:
        parser, finished = EventParser(), False
        while True:
            try:
                received = response.read1(_PIECE_BYTES)
                events = parser.feed(received)
            except (OSError, http.client.HTTPException, EventTooLong) as error:
                raise _broke_off(str(error) or type(error).__name__) from error
            for event in events:
                if event == _DONE:
                    return
                for piece in _pieces_of(event):
                    finished |= piece.kind is Kind.FINISH
                    yield piece
            if not received:
                if finished:
                    return
                raise _broke_off("the connection ended")

    def _open(self, path: str, body: bytes | None, timeout_s: float) -> http.client.HTTPResponse:
        """The endpoint's 200. Raises ChatError."""
        request = urllib.request.Request(self._url + path, body, {"accept": "application/json, text/event-stream"})
        if body is not None:
            request.add_header("content-type", "application/json")
        if self._api_key:
            request.add_unredirected_header("authorization", f"Bearer {self._api_key}")
        try:
            response = opener(self._url).open(request, timeout=timeout_s)
        except urllib.error.HTTPError as error:
            with error:
                raise self._refused(error.code, error.headers.get("retry-after"), self._read(error)) from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            raise ChatError(
                f"no endpoint answers at {self._url} ({reason}): start one with `antiphon serve`, or correct --url",
                ExitCode.UNAVAILABLE,
            ) from error
        assert isinstance(response, http.client.HTTPResponse)
        return response

    def _read(self, response: http.client.HTTPResponse | urllib.error.HTTPError) -> bytes:
        """The whole of a short body. What does not come whole is no JSON, which the caller tells."""
        try:
            return response.read(_MOST_BYTES)
        except (OSError, http.client.HTTPException):
            return b""

    def _refused(self, status: int, retry_after: str | None, body: bytes) -> ChatError:
        try:
            told = msgspec.json.decode(body, type=_Refusal).error
        except msgspec.DecodeError:
            told = ""
        said = (told if isinstance(told, str) else told.message) or f"it answers {status}"
        message = f"{self._url}: {said}"
        if status == 401:
            return ChatError(f"{message} Name a file that holds the key with --api-key-file.", ExitCode.BAD_INPUT)
        if status == 404:
            return _NotThere(message, ExitCode.BAD_INPUT)
        wait_s = _seconds(retry_after)
        if status in (429, 503) and wait_s is not None:
            return Busy(message, wait_s)
        return ChatError(message, ExitCode.UNAVAILABLE if status == 429 or status >= 500 else ExitCode.BAD_INPUT)

    def _not_there(self, model: str, said: str) -> ChatError:
        """A 404 is about the model, or about a URL that leads to something else."""
        try:
            models = self.models()
        except ChatError:
            return self._no_endpoint()
        if model in models:
            return ChatError(said, ExitCode.BAD_INPUT)
        there = f"it has {', '.join(models)}" if models else "it has none yet"
        return ChatError(f"there is no model {model!r} at {self._url}: {there}", ExitCode.BAD_INPUT)

    def _no_endpoint(self) -> ChatError:
        return ChatError(
            f"what answers at {self._url} is no OpenAI-compatible endpoint: correct --url", ExitCode.BAD_INPUT
        )


class _NotThere(ChatError):
    """404."""


def _pieces_of(event: bytes) -> list[Piece]:
    """Raises ChatError where the event tells of a failure."""
    try:
        chunk = msgspec.json.decode(event, type=_Chunk)
    except msgspec.DecodeError as error:
        raise _broke_off(f"an event is no part of an answer: {error}") from error
    if chunk.error is not None:
        said = chunk.error if isinstance(chunk.error, str) else chunk.error.message
        raise _broke_off(said or "the endpoint does not say why")
    pieces = []
    for choice in chunk.choices:
        delta = choice.delta
        # Both names hold the same text, for clients that know one of them.
        if thought := delta.reasoning or delta.reasoning_content:
            pieces.append(Piece(Kind.REASONING, thought))
        if text := (delta.content or "") + (delta.refusal or ""):
            pieces.append(Piece(Kind.TEXT, text))
        if choice.finish_reason:
            pieces.append(Piece(Kind.FINISH, choice.finish_reason))
    return pieces


def _broke_off(why: str) -> ChatError:
    return ChatError(f"the answer broke off ({why}): ask again", ExitCode.UNAVAILABLE)


def _seconds(retry_after: str | None) -> float | None:
    """Retry-After is a number of seconds, or a date."""
    if retry_after is None:
        return None
    with contextlib.suppress(ValueError):
        seconds = float(retry_after)
        return max(seconds, 0.0) if math.isfinite(seconds) else None
    with contextlib.suppress(ValueError):
        return max(email.utils.parsedate_to_datetime(retry_after).timestamp() - time.time(), 0.0)
    return None
