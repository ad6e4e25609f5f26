"""From a flight to the client: as a stream of server-sent events, or as one whole answer.

Nothing is sent before the first token is there, so that a failure until then has a status of its own (and may be
tried elsewhere); only one that waits long is kept alive (`keep_alive`), and fails with an event then. A stream that
fails later ends with an error event, never in silence. While the client takes no data, the flight collects a bounded
number of steps; the event loop and the worker's stream go on.

The handler sends the first and the last event of a stream, and what had to be collected. All others are written as
they come from the worker, without waking it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from antiphon_proto import worker_pb2 as pb

from antiphon_gateway.answers import Renderer, TellsFailure
from antiphon_gateway.client_request import ClientRequest
from antiphon_gateway.errors import ApiError
from antiphon_gateway.flight import Choice, Flight
from antiphon_gateway.http import EVENT_STREAM_HEADERS, JSON_TYPE, ClientGone

log = logging.getLogger("antiphon.gateway")


class Presence:
    """Whether the client is there, from when its body has been read. Owned by the handler."""

    def __init__(self, request: ClientRequest) -> None:
        self.request = request
        self._flight: Flight | None = None
        self._left: asyncio.Future[None] | None = None
        request.on_gone = self._client_left

    def follow(self, flight: Flight) -> None:
        """Tell this flight when the client has gone. Raises ClientGone if it has already."""
        if self.request.gone:
            raise ClientGone
        self._flight = flight

    async def until(self, event: asyncio.Future[None], timeout_s: float) -> bool:
        """Wait for it as long as the client is there; False when the time is up. Raises ClientGone."""
        if self.request.gone:
            raise ClientGone
        self._left = asyncio.get_running_loop().create_future()
        await asyncio.wait({event, self._left}, timeout=max(0.0, timeout_s), return_when=asyncio.FIRST_COMPLETED)
        self._left = None
        if self.request.gone:
            raise ClientGone
        return event.done()

    def _client_left(self) -> None:
        if self._left is not None and not self._left.done():
            self._left.set_result(None)
        if self._flight is not None:
            self._flight.client_gone()


async def send_stream(request: ClientRequest, flight: Flight, renderer: Renderer) -> ApiError | None:
    """Stream the answer to its end; the error that ended it early, which the client was told.

    Raises ApiError if it failed before anything was told, and ClientGone.
    """
    told = False
    try:
        while True:
            await flight.wait()
            ready = [(choice, step) for choice in flight.take_ready() for step in choice.take()]
            # As of these steps: more may come while they are told.
            failure = flight.failure
            ended = failure is not None or not flight.open_choices
            if flight.scores and not told:
                events = await asyncio.to_thread(_taken, renderer, ready)
            else:
                events = _taken(renderer, ready)
            if not told:
                if failure is not None:
                    raise failure
                if not ended and not any(events):
                    continue
                told = True
                if not request.started:  # else it has been kept alive
                    request.start(200, EVENT_STREAM_HEADERS)
            if failure is not None:
                events.append(
                    renderer.failed(failure) if isinstance(renderer, TellsFailure) else request.error_event(failure)
                )
            elif ended:
                events.append(renderer.end(flight))
            data = b"".join(events)
            if data:
                flight.writing_since = time.monotonic()
                await request.send(data, last=ended)
                flight.writing_since = 0.0
            if ended:
                return failure
            flight.direct = flight.direct or _sender(request, renderer)
    finally:
        flight.direct = None


def _taken(renderer: Renderer, steps: Sequence[tuple[Choice, pb.RequestStep]]) -> list[bytes]:
    return [renderer.take(choice, step) for choice, step in steps]


def _sender(request: ClientRequest, renderer: Renderer) -> Callable[[Choice, pb.RequestStep], bool]:
    """What sends steps of a stream that has begun, as they come."""

    def send(choice: Choice, step: pb.RequestStep) -> bool:
        if not request.takes_more:
            return False
        try:
            data = renderer.take(choice, step)
        except Exception:
            # Not here, on the stream that all of the worker's requests share: the handler meets it again.
            log.warning("request %s: a step cannot be told", request.request_id, exc_info=True)
            return False
        if data:
            request.push(data)
        return True

    return send


async def send_whole(request: ClientRequest, flight: Flight, renderer: Renderer) -> None:
    """Send the answer when it is complete. Raises ApiError and ClientGone, having sent nothing."""
    while flight.open_choices and flight.failure is None:
        await flight.wait()
    if flight.failure is not None:
        raise flight.failure
    whole = await asyncio.to_thread(renderer.whole, flight) if flight.scores else renderer.whole(flight)
    await request.respond(200, whole, JSON_TYPE)
