"""One call as the gateway's handlers see it: a `ClientRequest`, as HTTP's `Request` is one.

The message is read when a handler asks for the body, so nothing of a call without a key is read. The answer's JSON
becomes messages here, one for each event of a stream. A message is written when the client's flow control takes it:
while it takes none, the handler waits in `send`, its flight collects a bounded number of steps, and the sweeper ends
the call after a time, as it does with a slow client of HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from antiphon_gateway import errors
from antiphon_gateway.errors import ApiError, invalid
from antiphon_gateway.grpc_front.failures import Metadata, plain
from antiphon_gateway.grpc_front.from_json import Maker, events_of
from antiphon_gateway.grpc_front.to_json import body_of
from antiphon_gateway.http import ClientGone, Header
from antiphon_gateway.tokenization import TextWorkers

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

_TIMEOUT = b"x-request-timeout-ms"
_TIMEOUT_DIGITS = 10
"""A longer one says nothing."""
_OURS = b"x-antiphon-"
"""How the names of those headers begin that are metadata too."""
_BYTES_PER_CHARACTER = 32
"""Of a message that is turned into JSON, or of JSON into a message, as much work as a character to encode."""


@dataclass(frozen=True, slots=True)
class Method:
    """One method of the service, and what of HTTP's API it is the twin of."""

    name: str
    kind: type[Message]
    """Of what is asked."""
    http_method: str
    path: str
    answer: Maker
    stream: bool = False
    path_of: Callable[[Any], str] | None = None
    """Where what is asked says the path."""


class Head:
    """A call's metadata, as HTTP's headers."""

    def __init__(self, context: Context) -> None:
        self.headers = _headers_of(context)

    def header(self, name: bytes) -> str:
        return self.headers.get(name, b"").decode("latin-1")


class GrpcRequest(Head):
    """See the module. Owned by the call's coroutine (`server`), given to one handler."""

    def __init__(self, context: Context, service: str, method: Method, text: TextWorkers) -> None:
        super().__init__(context)
        self.method = method.http_method
        self.path = method.path
        self.request_id = ""
        self.standing_headers: tuple[Header, ...] = ()
        self.late_headers: Callable[[], tuple[Header, ...]] = tuple
        self.started = False
        self.answered = False
        self.gone = False
        self.on_gone: Callable[[], None] | None = None
        self.failure: ApiError | None = None
        """What the call's status is to say."""
        self.given_up = False
        """The client took no data for too long."""
        self._context = context
        self._service = service
        self._method = method
        self._text = text
        self.head_sent = False
        self._head: Metadata = ()
        self._writer: asyncio.Task[Any] | None = None

    @property
    def operation(self) -> str:
        return f"{self._service}/{self._method.name}"

    # -- what is asked

    async def message(self, timeout_s: float) -> tuple[Message, int]:
        """With its size in bytes. Raises ApiError (400, 408) and ClientGone."""
        try:
            async with asyncio.timeout(timeout_s):
                data = await self._context.read()
        except TimeoutError as error:
            raise errors.body_timeout(timeout_s) from error
        if self.gone:
            raise ClientGone
        if not isinstance(data, bytes):
            raise invalid("The call has no message.")
        try:
            return self._method.kind.FromString(data), len(data)
        except DecodeError as error:
            raise invalid(f"The message is not a {self._method.kind.DESCRIPTOR.full_name}: {error}.") from error

    async def body(self, limit_bytes: int, timeout_s: float) -> bytes:
        """The message as HTTP's body. Raises ApiError (400, 408, 413) and ClientGone."""
        message, size = await self.message(timeout_s)
        raw = await self._text.run(
            lambda: body_of(message, stream=self._method.stream), characters=size // _BYTES_PER_CHARACTER
        )
        if len(raw) > limit_bytes:
            raise errors.body_too_large(limit_bytes)
        if self.gone:
            raise ClientGone
        return raw

    # -- the answer

    def start(self, status: int, headers: tuple[Header, ...], *, length_bytes: int | None = None) -> None:
        """Of HTTP's headers, those that tell of the request become metadata; `headers` tell of the body's form."""
        self.started = True
        self._head = self.metadata()

    def metadata(self) -> Metadata:
        """That tell of the request, as things stand now."""
        told = [
            (name.decode("ascii"), plain(value.decode("latin-1"), most_characters=len(value)))
            for name, value in (*self.standing_headers, *self.late_headers())
            if name.startswith(_OURS)
        ]
        return (*told, ("x-request-id", self.request_id))

    async def send(self, data: bytes, *, last: bool) -> None:
        """Events of a stream. Waits while the client takes none; does nothing once it has gone."""
        for event in events_of(data):
            await self._write(await self._encoded(event))
        self.answered |= last

    @property
    def takes_more(self) -> bool:
        """Never: that a message can leave at once is not known before it has left."""
        return False

    def push(self, data: bytes) -> None:
        raise NotImplementedError("a call's messages are sent by `send` only")

    async def respond(self, status: int, body: bytes, *headers: Header) -> None:
        self.start(status, headers)
        await self._write(await self._encoded(body))
        self.answered = True

    async def respond_error(self, error: ApiError, *headers: Header) -> None:
        self.failure = error

    def error_event(self, error: ApiError) -> bytes:
        """Nothing: it is the call's status."""
        self.failure = error
        return b""

    def abort(self) -> None:
        """Give up a client that takes no data."""
        self.given_up = True
        if self._writer is not None:
            self._writer.cancel()
        else:
            self.lose_client()

    def lose_client(self) -> None:
        """The call was cancelled, or its deadline is over."""
        self.gone = True
        if self.on_gone is not None and not self.answered:
            self.on_gone()

    def forget(self) -> None:
        """The handler has ended. What it hung on here would be a cycle for the collector."""
        self.on_gone = None
        self.late_headers = tuple

    async def _encoded(self, answer: bytes) -> bytes:
        """The message of an answer's JSON; of a long one (log-probabilities of a prompt) in a thread."""
        return await self._text.run(
            lambda: self._method.answer(answer).SerializeToString(), characters=len(answer) // _BYTES_PER_CHARACTER
        )

    async def _write(self, message: bytes) -> None:
        if self.gone:
            return
        self._writer = asyncio.current_task()
        try:
            if not self.head_sent:
                self.head_sent = True
                await self._context.send_initial_metadata(self._head)
            await self._context.write(message)
        except asyncio.CancelledError:
            if not self.given_up or self._writer is None:
                raise
            self._writer.uncancel()
            self.lose_client()
        except (grpc.aio.BaseError, asyncio.InvalidStateError):
            # The call ended while it was written to.
            self.lose_client()
        finally:
            self._writer = None


def _headers_of(context: Context) -> dict[bytes, bytes]:
    """Metadata as HTTP's headers; the call's deadline is the request's, where that is not sooner."""
    headers: dict[bytes, bytes] = {}
    for name, value in context.invocation_metadata() or ():
        if isinstance(value, str):
            headers[name.encode("latin-1", "replace")] = value.encode("latin-1", "replace")
    remaining_s = context.time_remaining()
    if remaining_s is not None:
        remaining_ms = max(1, int(remaining_s * 1000))
        said = headers.get(_TIMEOUT, b"")
        sooner = not said or (said.isdigit() and len(said) <= _TIMEOUT_DIGITS and int(said) > remaining_ms)
        if sooner and remaining_ms < 10**_TIMEOUT_DIGITS:
            headers[_TIMEOUT] = b"%d" % remaining_ms
    return headers
