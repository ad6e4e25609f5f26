"""`antiphon fetch hf://org/name --to FOLDER`: the weights of a model, in a folder named by its commit.

`hf://org/name/file.gguf` is one file of a repository: it lies by itself in the folder `org--name--file.gguf--<commit>`.

Run by the operator in an init container or a Job, and useful by hand. The folder `FOLDER/org--name--<commit>` appears
all at once: files are downloaded beside it, flushed to disk, and then the folder is renamed. So whoever sees it sees
all of it; a run that was killed leaves only a hidden folder, whose whole files the next one keeps. Two at once: the
second waits for the first, and where the file system knows no locks each downloads for itself and one renames.

Of a repository only safetensors, JSON, tokenizer and text files are taken, never pickles or code. What may fail is a
`FetchError`, whose message says which field of the Model to look at and whose exit code says whether starting again may
help.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import fcntl
import fnmatch
import json
import os
import re
import secrets
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from antiphon_telemetry.exit import ExitCode, leave

from antiphon.fetch_errors import MODEL, FetchError, Wording, explained

if TYPE_CHECKING:
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import ModelInfo

TAKEN = ("*.safetensors", "*.json", "*.txt", "*.jinja", "*.tiktoken", "tokenizer.model", "*.spm")
"""Of the files at the top of a repository."""
LEFT = ("consolidated*.safetensors", "training_args*", ".*")
"""`consolidated` files hold the same weights a second time."""

_NAME = r"[A-Za-z0-9._-]+"
PLACE = rf"({_NAME}/{_NAME})(?:/((?:{_NAME}/)*{_NAME}\.gguf))?"
"""A repository, and maybe one file of it."""
_URI = re.compile(rf"^hf://{PLACE}$")
_COMMIT = re.compile(r"^[0-9a-f]{40}$")
_PART = re.compile(r"-\d{5}-of-(\d{5})\.gguf$")
_SHOWN = 5
"""Files of a repository that a sentence names."""
_REQUEST_TIMEOUT_S = 30.0
_AT_ONCE = 4
_PROGRESS_S = 10.0
_SPARE_BYTES = 64 * 1024 * 1024
_USUAL_CERTIFICATES = (
    Path("/etc/ssl/certs/ca-certificates.crt"),
    Path("/etc/pki/tls/certs/ca-bundle.crt"),
    Path("/etc/ssl/cert.pem"),
)
_LONGEST_MESSAGE = 4000
"""Kubernetes keeps 4,096 bytes of a termination message."""


@dataclass(frozen=True, slots=True)
class Found:
    """A model as the hub has it."""

    repository: str
    commit: str
    sizes: dict[str, int]
    """Bytes of each file that is taken, by name."""

    file: str = ""
    """The one that is served; empty: the whole folder is."""

    @property
    def size_bytes(self) -> int:
        return sum(self.sizes.values())


def fetch_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="antiphon fetch",
        description="Downloads a model's weights into a folder named by its commit. "
        "HF_TOKEN and HF_ENDPOINT are honoured.",
        allow_abbrev=False,
    )
    parser.add_argument("uri", help="hf://org/name, or hf://org/name/file.gguf for one file of it")
    parser.add_argument("--revision", default="", help="branch, tag or commit (default: the main branch)")
    parser.add_argument("--to", required=True, type=Path, help="folder in which the model's own folder is made")
    parser.add_argument("--resolve-only", action="store_true", help="say which commit and how large, download nothing")
    parser.add_argument(
        "--termination-log", type=Path, help='file to write {"revision", "size_bytes", "path"}, or the error, to'
    )
    return parser


def run_fetch(arguments: Sequence[str]) -> int:
    """The command; its exit code."""
    given = fetch_parser().parse_args(arguments)
    # The first process of a container ignores signals that it has no handler for.
    signal.signal(signal.SIGTERM, _told_to_end)
    try:
        message, code = fetch(given.uri, given.revision, given.to, resolve_only=given.resolve_only), ExitCode.OK
    except FetchError as error:
        message, code = str(error), error.exit_code
    _say(message)
    if given.termination_log is not None:
        try:
            given.termination_log.write_text(message[:_LONGEST_MESSAGE])
        except OSError as error:
            _say(f"{given.termination_log} cannot be written: {error}")
            code = code or ExitCode.FAILURE
    return code


def fetch(uri: str, revision: str, to: Path, *, resolve_only: bool = False, wording: Wording = MODEL) -> str:
    """Fetch (or only find) the model; what was found, as one line of JSON. Raises FetchError, in this wording."""
    match = _URI.match(uri)
    if match is None:
        raise FetchError(
            f"{uri!r} is not `hf://org/name` or `hf://org/name/file.gguf`: correct {wording.uri}", ExitCode.BAD_INPUT
        )
    repository, file = match[1], match[2] or ""
    if not resolve_only and _COMMIT.match(revision) and (folder := _folder(to, repository, revision, file)).is_dir():
        return _told(revision, _bytes_below(folder), folder / file)
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    _trust_the_usual_too(wording)
    from huggingface_hub import HfApi

    hub = HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None, library_name="antiphon")
    with explained(repository, revision, hub.endpoint, wording):
        info = hub.model_info(repository, revision=revision or None, files_metadata=True, timeout=_REQUEST_TIMEOUT_S)
        found = _find(repository, file, info, wording)
    folder = _folder(to, repository, found.commit, file)
    _say(f"{repository} at {revision or 'its main branch'}: commit {found.commit}, {_gigabytes(found.size_bytes)}")
    if not resolve_only:
        with explained(repository, revision, hub.endpoint, wording):
            _bring(hub, found, folder, wording)
    return _told(found.commit, found.size_bytes, folder / file)


def _trust_the_usual_too(wording: Wording) -> None:
    """SSL_CERT_FILE names the Model's own certificates; they are to count beside the image's, not instead of them."""
    own = os.environ.get("SSL_CERT_FILE")
    usual = next((path for path in _USUAL_CERTIFICATES if path.is_file()), None)
    if not own or usual is None:
        return
    try:
        both = usual.read_bytes() + b"\n" + Path(own).read_bytes()
    except OSError as error:
        raise FetchError(
            f"the certificates cannot be read: {error}: correct {wording.certificates}", ExitCode.BAD_INPUT
        ) from error
    together = Path(tempfile.mkdtemp(prefix="antiphon-")) / "ca.crt"
    together.write_bytes(both)
    os.environ["SSL_CERT_FILE"] = os.environ["REQUESTS_CA_BUNDLE"] = str(together)


def _folder(to: Path, repository: str, commit: str, file: str) -> Path:
    return to / folder_name(repository, commit, file)


def folder_name(repository: str, commit: str, file: str = "") -> str:
    """Of the folder that holds this commit of a repository, or one file of it, wherever it was fetched to."""
    parts = (repository, file, commit) if file else (repository, commit)
    return "--".join(part.replace("/", "--") for part in parts)


def _told(commit: str, size_bytes: int, path: Path) -> str:
    return json.dumps({"revision": commit, "size_bytes": size_bytes, "path": str(path)})


def _find(repository: str, file: str, info: ModelInfo, wording: Wording) -> Found:
    """Raises FetchError if the repository has not what is served."""
    sizes = {one.rfilename: one.size or 0 for one in info.siblings or ()}
    ggufs = sorted(name for name in sizes if name.endswith(".gguf"))
    if file:
        if file not in sizes:
            raise FetchError(
                f"{repository} has no file {file}: correct {wording.uri}{_among(ggufs)}", ExitCode.BAD_INPUT
            )
        if parts := _PART.search(file):
            raise FetchError(
                f"{file} is one of {int(parts[1])} parts of a model, which are not served: name a GGUF file that is "
                f"whole in {wording.uri}",
                ExitCode.BAD_INPUT,
            )
        return Found(repository, str(info.sha), {file: sizes[file]}, file)
    taken = {name: size for name, size in sizes.items() if _is_taken(name)}
    if info.sha is None or not any(name.endswith(".safetensors") for name in taken):
        what = "in safetensors format" if not ggufs else f"with them, or one of its GGUF files,{_among(ggufs)[1:]},"
        raise FetchError(
            f"{repository} has no safetensors files (pickles are not loaded): name a repository {what} in "
            f"{wording.uri}",
            ExitCode.BAD_INPUT,
        )
    return Found(repository, info.sha, taken)


def _among(names: Sequence[str]) -> str:
    """For the end of a sentence."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"; it has {', '.join(names[:_SHOWN])}{more}" if names else ""


def _is_taken(name: str) -> bool:
    def matches(patterns: Sequence[str]) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)

    return "/" not in name and matches(TAKEN) and not matches(LEFT)


def _bring(hub: HfApi, found: Found, folder: Path, wording: Wording) -> None:
    """Download beside `folder`, then make it appear."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _alone(folder) as partial:
        if folder.is_dir():
            _say(f"{folder} is there already")
            return
        partial.mkdir(exist_ok=True)
        for piece in partial.rglob("*.incomplete"):  # of a run that was killed: the client begins a file anew
            piece.unlink()
        missing = found.size_bytes - _bytes_below(partial)
        free = shutil.disk_usage(partial).free
        if missing + _SPARE_BYTES > free:
            raise FetchError(
                f"{_gigabytes(missing)} are still to be written below {folder.parent}, where {_gigabytes(free)} are "
                f"free: {wording.room}",
                ExitCode.FAILURE,
            )
        _download(hub, found, partial)
        shutil.rmtree(partial / ".cache", ignore_errors=True)  # the hub client's notes
        _flush(partial)
        try:
            partial.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another one, without locks, was first
                raise
            shutil.rmtree(partial)
        _flush_entry(folder.parent)


def _download(hub: HfApi, found: Found, partial: Path) -> None:
    """All files, a few at once; the first failure ends it."""
    workers = concurrent.futures.ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="fetch")
    try:
        running = {
            workers.submit(hub.hf_hub_download, found.repository, name, revision=found.commit, local_dir=partial): name
            for name in sorted(found.sizes, key=lambda name: -found.sizes[name])
        }
        left = set(running)
        while left:
            done, left = concurrent.futures.wait(left, _PROGRESS_S, concurrent.futures.FIRST_COMPLETED)
            for one in done:
                one.result()
                _say(f"{running[one]} is here, {len(left)} files to go")
            if not done:
                _say(f"{_gigabytes(_bytes_below(partial))} of {_gigabytes(found.size_bytes)}")
    finally:
        workers.shutdown(wait=False, cancel_futures=True)
    for name, size in found.sizes.items():
        if (partial / name).stat().st_size != size:
            (partial / name).unlink()
            raise FetchError(f"{name} has not the size that the hub names: fetch again", ExitCode.UNAVAILABLE)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[Path]:
    """The folder to download into, which nobody else writes to.

    The kernel gives the lock back when its holder ends, however it ends.
    """
    lock_file = folder.with_name(f".{folder.name}.lock")
    with lock_file.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say(f"another one fetches {folder.name}: waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            _say(f"no locks on this file system ({error}): fetching apart")
            yield folder.with_name(f".{folder.name}.partial-{secrets.token_hex(4)}")
            return
        yield folder.with_name(f".{folder.name}.partial")


def _flush(folder: Path) -> None:
    for path in folder.rglob("*"):
        _flush_entry(path)
    _flush_entry(folder)


def _flush_entry(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _bytes_below(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # renamed while we look
            total += path.stat().st_size if path.is_file() else 0
    return total


def _told_to_end(number: int, frame: Any) -> None:
    _say("told to end: what is here is kept for the next time")
    leave(ExitCode.FAILURE)


def _gigabytes(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.2f} GB"


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
