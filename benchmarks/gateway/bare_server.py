"""The limit that the gateway is held against: what uvloop and httptools cost with next to nothing on top.

Parses the request's head and its JSON body, and answers with canned bytes: a whole answer, or `max_tokens` events
(each a chunk and a write of its own) at the pace of one shared tick, as the steps of a worker come. No template,
tokenizer, block hashes, routing, worker, metrics, deadlines, or backpressure.

    python -m benchmarks.gateway.bare_server --step-ms 5        # writes its port to the standard output
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from typing import Any

import httptools
import msgspec
import uvloop

_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\n"
    b"x-request-id: req-00000000000000000000000000000000\r\ntransfer-encoding: chunked\r\n\r\n"
)
_WHOLE_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
_WHOLE = (
    b'{"id":"chatcmpl-00000000000000000000000000000000","object":"chat.completion","created":1700000000,'
    b'"model":"timed","choices":[{"index":0,"message":{"content":"a","role":"assistant","refusal":null},'
    b'"logprobs":null,"finish_reason":"length"}],"usage":{"prompt_tokens":2200,"completion_tokens":1,'
    b'"total_tokens":2201,"prompt_tokens_details":{"cached_tokens":0}}}'
)
_EVENT = (
    b'data: {"id":"chatcmpl-00000000000000000000000000000000","object":"chat.completion.chunk","created":1700000000,'
    b'"model":"timed","choices":[{"index":0,"delta":{"content":"a"},"logprobs":null,"finish_reason":null}]}\n\n'
)
_DONE = b"data: [DONE]\n\n"


class _Body(msgspec.Struct):
    max_tokens: int
    stream: bool = False


class _Ticker:
    """One tick a step while there is anybody to write to."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._streams: list[tuple[_Connection, int]] = []
        self._running = False

    def add(self, connection: _Connection, tokens: int) -> None:
        self._streams.append((connection, tokens))
        if not self._running:
            self._running = True
            asyncio.get_running_loop().call_later(self._step_s, self._tick)

    def _tick(self) -> None:
        streams, self._streams = self._streams, []
        for connection, tokens in streams:
            connection.token(last=tokens == 1)
            if tokens > 1:
                self._streams.append((connection, tokens - 1))
        self._running = bool(self._streams)
        if self._running:
            asyncio.get_running_loop().call_later(self._step_s, self._tick)


class _Connection(asyncio.Protocol):
    def __init__(self, ticker: _Ticker) -> None:
        self._ticker = ticker
        self._parser = httptools.HttpRequestParser(self)
        self._parts: list[bytes] = []
        self._stream = False
        self._begun = False
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)

    def on_message_complete(self) -> None:
        body = msgspec.json.decode(b"".join(self._parts), type=_Body)
        self._parts.clear()
        self._stream, self._begun = body.stream, False
        self._ticker.add(self, body.max_tokens)

    def token(self, *, last: bool) -> None:
        if not self._stream:
            if last:
                self._transport.write(_WHOLE_HEAD % len(_WHOLE) + _WHOLE)
            return
        data = _EVENT + _DONE if last else _EVENT
        framed = b"%x\r\n%b\r\n" % (len(data), data)
        if last:
            framed += b"0\r\n\r\n"
        if not self._begun:
            self._begun = True
            framed = _STREAM_HEAD + framed
        self._transport.write(framed)


async def _serve(step_s: float) -> None:
    ticker = _Ticker(step_s)
    server = await asyncio.get_running_loop().create_server(lambda: _Connection(ticker), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)  # Until whoever started it closes the pipe, or ends.
    server.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step-ms", type=float, default=5.0)
    uvloop.run(_serve(parser.parse_args().step_ms / 1000))
