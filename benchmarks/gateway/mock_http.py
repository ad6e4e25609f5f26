"""OpenAI servers that answer at once: what routers that speak HTTP to their workers are given instead of engines.

Each of the `--workers` listens on a port of its own and answers chat and completions, whole or streamed, with canned
bytes: as many events as tokens were asked for, one each `--step-ms` (0: all at once, in a write each). Routers ask
servers what they are; those paths are answered too. Prints the addresses, ends with its standard input.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from typing import Any

import httptools
import msgspec
import uvloop

MODEL = "mock"
_PAGES = {
    b"/v1/models": {"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "vllm", "created": 1}]},
    b"/model_info": {"model_path": MODEL, "served_model_name": MODEL, "is_generation": True},
    b"/get_model_info": {"model_path": MODEL, "served_model_name": MODEL, "is_generation": True},
    b"/server_info": {"model_path": MODEL, "served_model_name": MODEL, "dp_size": 1, "version": "0.0"},
    b"/get_server_info": {"model_path": MODEL, "served_model_name": MODEL, "dp_size": 1, "version": "0.0"},
    b"/v1/loads": {"loads": [], "aggregate": {}},
    b"/get_load": {"load": 0},
    b"/version": {"version": "0.0"},
}
_COMMON = {"id": "answer-0123456789abcdef0123456789abcdef", "created": 1790000000, "model": MODEL}
_USAGE = {"prompt_tokens": 320, "completion_tokens": 16, "total_tokens": 336}
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"cache-control: no-cache\r\ntransfer-encoding: chunked\r\n\r\n"
)


class _Body(msgspec.Struct):
    max_tokens: int
    stream: bool = False


def _event(object_: str, choice: dict[str, Any]) -> bytes:
    event = b"data: " + msgspec.json.encode({**_COMMON, "object": object_, "choices": [choice]}) + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(event), event)


_EVENTS = {
    True: _event("chat.completion.chunk", {"index": 0, "delta": {"content": " fox"}, "finish_reason": None}),
    False: _event("text_completion", {"index": 0, "text": " fox", "logprobs": None, "finish_reason": None}),
}
_LASTS = {
    True: _event("chat.completion.chunk", {"index": 0, "delta": {"content": " fox"}, "finish_reason": "length"}),
    False: _event("text_completion", {"index": 0, "text": " fox", "logprobs": None, "finish_reason": "length"}),
}
_END = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


def _whole(chat: bool, tokens: int) -> bytes:
    text = " fox" * tokens
    said: dict[str, Any] = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
    object_ = "chat.completion" if chat else "text_completion"
    choice = {"index": 0, "finish_reason": "length", **said}
    return msgspec.json.encode({**_COMMON, "object": object_, "choices": [choice], "usage": _USAGE})


class _Connection(asyncio.Protocol):
    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._parser = httptools.HttpRequestParser(self)
        self._parts: list[bytes] = []
        self._path = b""
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._path = url.partition(b"?")[0]

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)

    def on_message_complete(self) -> None:
        raw = b"".join(self._parts)
        self._parts.clear()
        if not self._path.endswith(b"/completions"):
            self._answer(msgspec.json.encode(_PAGES.get(self._path, {"status": "ok"})))
            return
        chat = self._path.endswith(b"/chat/completions")
        body = msgspec.json.decode(raw, type=_Body)
        if not body.stream:
            self._answer(_whole(chat, body.max_tokens))
            return
        self._transport.write(_STREAM_HEAD)
        if self._step_s:
            asyncio.get_running_loop().call_later(self._step_s, self._token, chat, body.max_tokens)
        else:
            for left in range(body.max_tokens, 0, -1):
                self._token(chat, left)

    def _token(self, chat: bool, left: int) -> None:
        self._transport.write(_EVENTS[chat] if left > 1 else _LASTS[chat] + _END)
        if self._step_s and left > 1:
            asyncio.get_running_loop().call_later(self._step_s, self._token, chat, left - 1)

    def _answer(self, body: bytes) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
        self._transport.write(head + body)


async def _serve(count: int, step_s: float) -> None:
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(lambda: _Connection(step_s), "127.0.0.1", 0) for _ in range(count)]
    addresses = [f"127.0.0.1:{server.sockets[0].getsockname()[1]}" for server in servers]
    print(json.dumps({"model": MODEL, "addresses": addresses}), flush=True)
    await asyncio.to_thread(sys.stdin.read)  # Until whoever started it closes the pipe, or ends.
    for server in servers:
        server.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--step-ms", type=float, default=0.0)
    given = parser.parse_args()
    uvloop.run(_serve(given.workers, given.step_ms / 1000))
