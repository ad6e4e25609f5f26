"""The servers that `peers.py` compares: each with its workers, as processes that it starts and ends.

Peers are installed in virtual environments of their own (`--peers FOLDER`, one folder each); one that is not there is
left out, and the result says so. All of them get four workers that answer at once: the gateway's speak its gRPC
protocol (`mock_worker.py`), those of the routers speak HTTP (`mock_http.py`), Dynamo's are its own mocker.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

WORKERS = 4
START_S = 90.0
_END_S = 10.0


@dataclass(slots=True)
class Target:
    """One server under test."""

    name: str
    pid: int
    port: int
    model: str
    takes_ids: bool = True
    """Whether a completions prompt may be token ids."""
    idle_cpu_s_per_s: float = 0.0

    def cpu_s(self) -> float:
        """CPU time of all threads, user and system, in nanosecond steps (the kernel's clock of another process)."""
        return time.clock_gettime((~self.pid << 3) | 2)

    def memory_bytes(self) -> int:
        """Resident memory."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")


class Stage:
    """Processes that belong together: ended together, their output in files of one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._processes: list[asyncio.subprocess.Process] = []
        self._files: list[IO[bytes]] = []

    async def run(
        self, name: str, *command: str, environment: Mapping[str, str] | None = None, talks: bool = False
    ) -> asyncio.subprocess.Process:
        """Start a process, in a session of its own. `talks`: what it prints is read, and it ends with its input."""
        log = (self.folder / f"{name}.log").open("wb")
        self._files.append(log)
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE if talks else asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE if talks else log,
            stderr=log,
            env={**_clean_environment(), **(environment or {})},
            start_new_session=True,
        )
        self._processes.append(process)
        return process

    def log_of(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")[-3000:]

    async def close(self) -> None:
        for process in reversed(self._processes):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        for process in self._processes:
            try:
                async with asyncio.timeout(_END_S):
                    await process.wait()
            except TimeoutError:
                pass
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        for file in self._files:
            file.close()


@contextlib.asynccontextmanager
async def stage(folder: Path) -> AsyncIterator[Stage]:
    made = Stage(folder)
    try:
        yield made
    finally:
        await made.close()


@dataclass(frozen=True, slots=True)
class Mocks:
    model: str
    addresses: tuple[str, ...]


async def start_mocks(stage: Stage, module: str, *options: str) -> Mocks:
    """`mock_worker` or `mock_http`, as one process."""
    process = await stage.run(
        f"{module}-{len(os.listdir(stage.folder))}",
        *(sys.executable, "-m", f"benchmarks.gateway.{module}", "--workers", str(WORKERS), *options),
        talks=True,
    )
    assert process.stdout is not None
    async with asyncio.timeout(START_S):
        said = json.loads(await process.stdout.readline())
    return Mocks(said["model"], tuple(said["addresses"]))


async def start_gateway(
    stage: Stage,
    name: str,
    mocks: Mocks,
    *options: str,
    tree: Path | None = None,
    port: int = 0,
    python: str = sys.executable,
) -> Target:
    """The gateway of this checkout, or with the packages of another one (`tree`); `python` runs it."""
    ready = stage.folder / f"{name}.json"
    environment = {}
    if tree is not None:
        packages = ("gateway", "policy", "kvtransfer", "proto", "telemetry", "cli", "operator", "worker", "engine")
        environment["PYTHONPATH"] = ":".join(str(tree / package) for package in packages)
    workers = [part for address in mocks.addresses for part in ("--worker", address)]
    process = await stage.run(
        name,
        *(python, "-m", "antiphon", "gateway", "--port", str(port), "--ready-file", str(ready)),
        *workers,
        *options,
        environment=environment,
    )
    async with asyncio.timeout(START_S):
        while not ready.exists():
            if process.returncode is not None:
                raise RuntimeError(f"{name} ended: {stage.log_of(name)}")
            await asyncio.sleep(0.05)
    address = json.loads(ready.read_bytes())["address"]
    await until_answers(f"http://{address}/ready", stage, name)
    await until(lambda: _attached(f"http://{address}/ready"))
    return Target(name, process.pid, int(address.rpartition(":")[2]), mocks.model)


async def until(condition: Callable[[], bool]) -> None:
    """Poll for what a server says of itself."""
    async with asyncio.timeout(START_S):
        while not condition():  # noqa: ASYNC110  # it can only be asked for
            await asyncio.sleep(0.1)


def _attached(url: str) -> bool:
    models = json.loads(_page(url))["models"].values()
    return any(model["both"] + model["decode"] >= WORKERS for model in models)


async def start_router(stage: Stage, name: str, mocks: Mocks, peers: Path) -> Target | None:
    """A Rust router of `ROUTERS`; None: it is not installed."""
    folder, command = ROUTERS[name]
    program = peers / folder / "bin" / command[0]
    if not program.exists():
        return None
    port, metrics = free_port(), free_port()
    process = await stage.run(
        name,
        *(str(program), *command[1:], "--host", "127.0.0.1", "--port", str(port)),
        *("--prometheus-port", str(metrics), "--worker-urls", *(f"http://{address}" for address in mocks.addresses)),
    )
    await until_answers(f"http://127.0.0.1:{port}/health", stage, name)
    await asyncio.sleep(2.0)  # Workers are found to be healthy after the port is open.
    return Target(name, process.pid, port, mocks.model, takes_ids=False)


ROUTERS: Mapping[str, tuple[str, Sequence[str]]] = {
    "smg": ("rust", ("smg", "launch", "--policy", "cache_aware")),
    "vllm-router": ("rust", ("vllm-router", "--policy", "round_robin")),
    "sglang-router": ("sglang", ("python", "-m", "sglang_router.launch_router", "--policy", "cache_aware")),
}
"""Name -> (folder of its environment, command). vllm-router's cache_aware asks workers to tokenise every request."""


async def start_dynamo(stage: Stage, model_dir: Path, peers: Path) -> Target | None:
    """Dynamo's frontend with its KV router, before four of its mock workers; None: it is not installed."""
    python = peers / "dynamo" / "bin" / "python"
    if not python.exists():
        return None
    environment = {"DYN_FILE_KV": str(stage.folder / "dynamo-kv"), "HF_HUB_OFFLINE": "1"}
    found = ("--discovery-backend", "file", "--event-plane", "zmq")
    await stage.run(
        "dynamo-mocker",
        *(str(python), "-m", "dynamo.mocker", "--model-path", str(model_dir), "--model-name", "mock"),
        *("--num-workers", str(WORKERS), "--speedup-ratio", "10000", "--block-size", "16", *found),
        environment=environment,
    )
    port = free_port()
    process = await stage.run(
        "dynamo",
        *(str(python), "-m", "dynamo.frontend", "--router-mode", "kv", "--http-port", str(port), *found),
        environment=environment,
    )
    url = f"http://127.0.0.1:{port}/v1/models"
    await until_answers(url, stage, "dynamo")
    await until(lambda: "mock" in _page(url))
    await asyncio.sleep(2.0)  # All four workers are to be found, not only the first.
    return Target("dynamo", process.pid, port, "mock")


async def until_answers(url: str, stage: Stage, name: str) -> None:
    ends_at = time.monotonic() + START_S
    while True:
        try:
            await asyncio.to_thread(_page, url)
            return
        except OSError as error:
            if time.monotonic() > ends_at:
                raise RuntimeError(f"{name} does not answer at {url} ({error}): {stage.log_of(name)}") from error
        await asyncio.sleep(0.1)


def _page(url: str) -> str:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=5.0) as answer:
        return answer.read().decode()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _clean_environment() -> dict[str, str]:
    """Without what would configure one of the servers, or send requests to a proxy."""
    unwanted = ("ANTIPHON_", "OTEL_", "DYN_", "HTTP_", "HTTPS_", "http_", "https_")
    return {name: value for name, value in os.environ.items() if not name.startswith(unwanted)}
