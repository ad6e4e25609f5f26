"""`antiphon fetch` against a stand-in of the hub: what arrives, what never half arrives, and what it says."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from antiphon.fetch import fetch
from antiphon.fetch_errors import FetchError
from antiphon_operator.render.weights import read_source_result
from antiphon_telemetry.exit import ExitCode
from huggingface_hub import close_session

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
WANTED = {"config.json", "model.safetensors", "tokenizer.json"}


class Hub(ThreadingHTTPServer):
    """As much of the hub as fetching a model needs. `org/tiny` is public, `org/gated` and `org/private` are not."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Request)
        self.files = dict(FILES)
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
        elif match[2] not in (None, "main", COMMIT):
            self._refuse(404, "RevisionNotFound")
        else:
            files = {"pytorch_model.bin": b"a pickle"} if match[1] == "org/pickled" else self.server.files
            siblings = [{"rfilename": name, "size": len(body), "blobId": "0"} for name, body in files.items()]
            self._answer(200, json.dumps({"id": match[1], "sha": COMMIT, "siblings": siblings}).encode())

    def _file(self, *, with_body: bool) -> None:
        match = re.fullmatch(rf"/org/(?:tiny|private)/resolve/{COMMIT}/(.+)", self.path)
        body = self.server.files.get(match[1]) if match else None
        if match is None or body is None:
            self._refuse(404, "EntryNotFound")
            return
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha1(body).hexdigest()}"'}
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


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf-home"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def folder_in(to: Path) -> Path:
    return to / f"org--tiny--{COMMIT}"


def start(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "antiphon", "fetch", *arguments]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ.copy())


def visible(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if not path.name.startswith(".")}


def test_safetensors_and_json_arrive_and_never_pickles_code_or_a_second_copy(hub: Hub, tmp_path: Path) -> None:
    told = json.loads(fetch("hf://org/tiny", "main", tmp_path / "models"))
    folder = folder_in(tmp_path / "models")
    assert told == {
        "revision": COMMIT,
        "size_bytes": sum(len(FILES[name]) for name in WANTED),
        "path": str(folder),
    }
    assert {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()} == {
        name: FILES[name] for name in WANTED
    }
    assert visible(tmp_path / "models") == {folder.name}


def test_resolving_says_the_same_and_downloads_nothing(hub: Hub, tmp_path: Path) -> None:
    told = fetch("hf://org/tiny", "", tmp_path / "models", resolve_only=True)
    assert not (tmp_path / "models").exists()
    assert told == fetch("hf://org/tiny", "", tmp_path / "models")


def test_the_operator_reads_what_a_resolving_job_says(hub: Hub) -> None:
    weights = read_source_result(fetch("hf://org/tiny", "", Path("/models"), resolve_only=True))
    assert (weights.revision, weights.path) == (COMMIT, f"/models/{folder_in(Path()).name}")
    assert weights.size_bytes == sum(len(FILES[name]) for name in WANTED)


def test_what_is_there_is_not_fetched_again_and_needs_no_network(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = fetch("hf://org/tiny", "main", tmp_path)
    count = len(hub.downloads)
    assert fetch("hf://org/tiny", "main", tmp_path) == first
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert fetch("hf://org/tiny", COMMIT, tmp_path) == first
    assert len(hub.downloads) == count


def test_a_token_is_used(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FetchError, match=r"spec\.source\.secretRef") as caught:
        fetch("hf://org/private", "main", tmp_path)
    assert caught.value.exit_code == ExitCode.BAD_INPUT
    monkeypatch.setenv("HF_TOKEN", "good")
    assert json.loads(fetch("hf://org/private", "main", tmp_path))["revision"] == COMMIT


@pytest.mark.parametrize(
    ("uri", "revision", "sentence", "code"),
    [
        ("hf://org/missing", "main", r"no such model org/missing .*: correct spec\.source\.uri", ExitCode.BAD_INPUT),
        ("hf://org/gated", "main", r"is gated: accept its terms .* spec\.source\.secretRef", ExitCode.BAD_INPUT),
        ("hf://org/wrong-token", "main", r"refuses the token .* spec\.source\.secretRef", ExitCode.BAD_INPUT),
        ("hf://org/tiny", "v9", r"no such revision 'v9' .* spec\.source\.revision", ExitCode.BAD_INPUT),
        ("hf://org/pickled", "main", r"no safetensors files", ExitCode.BAD_INPUT),
        ("hf://org/broken", "main", r"answers 500", ExitCode.UNAVAILABLE),
        ("pvc://claim", "", r"is not `hf://org/name`", ExitCode.BAD_INPUT),
    ],
)
def test_each_refusal_names_the_field_to_look_at(
    hub: Hub, tmp_path: Path, uri: str, revision: str, sentence: str, code: ExitCode
) -> None:
    with pytest.raises(FetchError, match=sentence) as caught:
        fetch(uri, revision, tmp_path)
    assert caught.value.exit_code == code
    assert visible(tmp_path) <= {"hf-home"}


def test_no_network_is_told_from_a_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(FetchError, match=r"cannot be reached .* spec\.proxy") as caught:
        fetch("hf://org/tiny", "main", tmp_path)
    assert caught.value.exit_code == ExitCode.UNAVAILABLE


def test_too_little_space_is_told_before_anything_is_downloaded(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("antiphon.fetch.shutil.disk_usage", lambda path: usage)
    with pytest.raises(FetchError, match=r"are free: make the claim larger"):
        fetch("hf://org/tiny", "main", tmp_path)
    assert not hub.downloads
    assert not folder_in(tmp_path).exists()


def test_a_killed_download_leaves_no_folder_and_the_next_one_keeps_its_whole_files(hub: Hub, tmp_path: Path) -> None:
    hub.hold_half.set()
    with start("hf://org/tiny", "--revision", "main", "--to", str(tmp_path)) as process:
        assert hub.half_sent.wait(60)
        assert process.stderr is not None
        arrived = 0
        while arrived < len(WANTED) - 1:
            arrived += " is here" in process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == ExitCode.FAILURE
    assert not folder_in(tmp_path).exists()
    hub.hold_half.clear()
    count = len(hub.downloads)
    fetch("hf://org/tiny", "main", tmp_path)
    assert (folder_in(tmp_path) / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert hub.downloads[count:] == ["model.safetensors"]


def test_two_at_once_end_well_and_download_once(hub: Hub, tmp_path: Path) -> None:
    log = tmp_path / "termination"
    arguments = ("hf://org/tiny", "--to", str(tmp_path / "models"), "--termination-log")
    with start(*arguments, f"{log}-1") as one, start(*arguments, f"{log}-2") as two:
        assert (one.wait(60), two.wait(60)) == (ExitCode.OK, ExitCode.OK)
    told = Path(f"{log}-1").read_text()
    assert told == Path(f"{log}-2").read_text()
    assert json.loads(told)["path"] == str(folder_in(tmp_path / "models"))
    assert sorted(hub.downloads) == sorted(WANTED)
    assert visible(tmp_path / "models") == {folder_in(tmp_path).name}


def test_the_error_and_its_code_reach_the_termination_log(hub: Hub, tmp_path: Path) -> None:
    log = tmp_path / "termination"
    arguments = ("hf://org/gated", "--to", str(tmp_path), "--termination-log", str(log))
    with start(*arguments) as process:
        assert process.wait(60) == ExitCode.BAD_INPUT
    assert "org/gated is gated" in log.read_text()


def test_the_models_certificates_count_beside_the_usual_ones(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, usual = tmp_path / "own.crt", tmp_path / "usual.crt"
    own.write_text("own")
    usual.write_text("usual")
    monkeypatch.setattr("antiphon.fetch._USUAL_CERTIFICATES", (tmp_path / "nowhere", usual))
    monkeypatch.setenv("SSL_CERT_FILE", str(own))
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(own))
    close_session()  # of the client, which has read them already
    with pytest.raises(FetchError, match=r"spec\.caBundle"):  # for these are no certificates
        fetch("hf://org/tiny", "main", tmp_path, resolve_only=True)
    assert Path(os.environ["SSL_CERT_FILE"]).read_text().split() == ["usual", "own"]
