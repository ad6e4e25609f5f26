"""An OpenAI server that keeps the last body of each path and answers with canned bytes: what a router sent on, it has.

Runs in a thread of `run.py`. Routers ask servers what they are; those pages are answered too.
"""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

MODEL = "mock"
_USAGE = {"prompt_tokens": 2, "completion_tokens": 4, "total_tokens": 6}
_CARD = {"model_path": MODEL, "served_model_name": MODEL, "is_generation": True, "dp_size": 1, "version": "0.0"}
_PAGES: dict[str, Any] = {
    "/v1/models": {"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "vllm", "created": 1}]},
    "/model_info": _CARD,
    "/get_model_info": _CARD,
    "/server_info": _CARD,
    "/get_server_info": _CARD,
    "/v1/loads": {"loads": [], "aggregate": {}},
    "/get_load": {"load": 0},
    "/version": {"version": "0.0"},
}


class Recorder:
    """`seen` has, by path, the last body that came (None: one that is not JSON)."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._thread = threading.Thread(target=self._server.serve_forever, name="recorder", daemon=True)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _answer(path: str) -> dict[str, Any]:
    common = {"id": "answer", "created": 1790000000, "model": MODEL, "usage": _USAGE}
    if path == "/v1/chat/completions":
        choice = {"index": 0, "finish_reason": "length", "message": {"role": "assistant", "content": "a b c d"}}
        return {**common, "object": "chat.completion", "choices": [choice]}
    choice = {"index": 0, "finish_reason": "length", "text": "a b c d", "logprobs": None}
    return {**common, "object": "text_completion", "choices": [choice]}


def _handler(recorder: Recorder) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._send(_PAGES.get(self.path.partition("?")[0], {"status": "ok"}))

        def do_POST(self) -> None:
            path = self.path.partition("?")[0]
            raw = self.rfile.read(int(self.headers.get("content-length") or 0))
            try:
                recorder.seen[path] = json.loads(raw)
            except ValueError:
                recorder.seen[path] = None
            if isinstance(recorder.seen[path], dict) and recorder.seen[path].get("stream") is True:
                self._send_raw(b"data: [DONE]\n\n", "text/event-stream")
            elif path in ("/v1/chat/completions", "/v1/completions"):
                self._send(_answer(path))
            else:
                self._send({"status": "ok"})

        def _send(self, page: Any) -> None:
            self._send_raw(json.dumps(page).encode(), "application/json")

        def _send_raw(self, body: bytes, kind: str) -> None:
            self.send_response(200)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Says nothing."""

    return Handler
