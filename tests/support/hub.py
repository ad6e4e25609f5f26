"""A stand-in of the Hugging Face hub, with as much of it as fetching a model needs."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b'{"model_type": "tiny"}',
    "model.safetensors": bytes(range(256)) * 1024,
    "tokenizer.json": b"{}",
    "pytorch_model.bin": b"a pickle",
    "consolidated.safetensors": b"the same weights again",
    "modeling_tiny.py": b"import os",
    "onnx/model.onnx": b"other weights",
    ".gitattributes": b"",
}


class Hub(ThreadingHTTPServer):
    """As much of the hub as fetching a model needs. `org/tiny` is public, `org/gated` and `org/private` are not."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Request)
        self.files = dict(FILES)
        self.commit = COMMIT
        """Of the main branch; the only one it has."""
        self.downloads: list[str] = []
        """The file of each GET."""
        self.hold_half = threading.Event()
        """While set, large files stop in the middle."""
        self.half_sent = threading.Event()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Request(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._file(with_body=False)

    def do_GET(self) -> None:
        match = re.fullmatch(r"/api/models/(org/[^/?]+)(?:/revision/([^/?]+))?(?:\?.*)?", self.path)
        if match is None:
            self._file(with_body=True)
        elif match[1] == "org/gated":
            self._refuse(403, "GatedRepo")
        elif match[1] == "org/private" and self.headers.get("Authorization") != "Bearer good":
            self._refuse(401, "RepoNotFound")
        elif match[1] == "org/wrong-token":
            self._refuse(401, "", "Invalid credentials in Authorization header")
        elif match[1] == "org/broken":
            self._refuse(500, "")
        elif match[1] not in ("org/tiny", "org/private", "org/pickled"):
            self._refuse(404, "RepoNotFound")
        elif match[2] not in (None, "main", self.server.commit):
            self._refuse(404, "RevisionNotFound")
        else:
            files = {"pytorch_model.bin": b"a pickle"} if match[1] == "org/pickled" else self.server.files
            siblings = [{"rfilename": name, "size": len(body), "blobId": "0"} for name, body in files.items()]
            self._answer(200, json.dumps({"id": match[1], "sha": self.server.commit, "siblings": siblings}).encode())

    def _file(self, *, with_body: bool) -> None:
        match = re.fullmatch(rf"/org/(?:tiny|private)/resolve/{self.server.commit}/(.+)", self.path)
        body = self.server.files.get(match[1]) if match else None
        if match is None or body is None:
            self._refuse(404, "EntryNotFound")
            return
        headers = {"X-Repo-Commit": self.server.commit, "ETag": f'"{hashlib.sha1(body).hexdigest()}"'}
        if with_body:
            self.server.downloads.append(match[1])
        self._answer(200, body, headers, with_body=with_body)

    def _refuse(self, status: int, code: str, message: str = "") -> None:
        self._answer(status, b"{}", {"X-Error-Code": code, "X-Error-Message": message})

    def _answer(
        self, status: int, body: bytes, headers: dict[str, str] | None = None, *, with_body: bool = True
    ) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            if value:
                self.send_header(name, value)
        self.end_headers()
        if not with_body:
            return
        if len(body) > 100_000 and self.server.hold_half.is_set():
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            self.server.half_sent.set()
            with contextlib.suppress(ConnectionError):
                self.rfile.read(1)  # until the client goes away
            return
        self.wfile.write(body)


@contextlib.contextmanager
def running_hub() -> Iterator[Hub]:
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
