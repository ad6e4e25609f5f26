"""`antiphon serve` as processes, and what its workers say of themselves."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
import urllib.request
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from antiphon_policy.latency import StepModel

_START_S = 300.0
_END_S = 60.0
_READY = re.compile(r"Point any OpenAI client at (\S+)/v1")
_MODEL = re.compile(r"Antiphon serves (\S+) with")
_STATUS = re.compile(r"worker ready worker_id=(\S+) role=(\S+) .*status=(\S+)")
_STEPS_MS = re.compile(r"^antiphon_engine_step_milliseconds_sum (\S+)$", re.MULTILINE)
_COEFFICIENTS = ("base_ms", "per_new_token_ms", "per_token_context_ms", "per_sequence_ms", "per_kv_token_ms")


@dataclass(frozen=True)
class WorkerSays:
    role: str
    step: StepModel
    samples: int
    relative_error: float
    link_gigabytes_per_s: float
    """The slowest that was measured; 0: none."""
    steps_ms: float
    """That its engine has spent in steps so far."""


@dataclass(frozen=True)
class House:
    url: str
    model: str
    log: Path

    async def workers(self) -> list[WorkerSays]:
        """As of now, from their status pages."""
        found = _STATUS.findall(await asyncio.to_thread(self.log.read_text))
        return [await asyncio.to_thread(_worker, role, address) for _, role, address in found]


def _worker(role: str, address: str) -> WorkerSays:
    page: dict[str, Any] = msgspec.json.decode(_page(address, "status"))
    steps_ms = _STEPS_MS.search(_page(address, "metrics").decode())
    fit = page["step_model"]
    speeds = [link["gigabytes_per_s"] for link in page["links"] if link["gigabytes_per_s"] > 0.0]
    return WorkerSays(
        role=role,
        step=StepModel(**{name: fit[name] for name in _COEFFICIENTS}),
        samples=fit["samples"],
        relative_error=fit["relative_error"],
        link_gigabytes_per_s=min(speeds, default=0.0),
        steps_ms=float(steps_ms.group(1)) if steps_ms is not None else 0.0,
    )


def _page(address: str, name: str) -> bytes:
    with urllib.request.urlopen(f"http://{address}/{name}", timeout=60) as answer:
        content: bytes = answer.read()
        return content


@contextlib.asynccontextmanager
async def started(arguments: Sequence[str], log: Path) -> AsyncIterator[House]:
    """Ended with the block."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("ANTIPHON_", "OTEL_"))}
    # Elsewhere a silence of 1.5 s is a death; on a machine that others use too it is a slow moment.
    patience = ("--lost-after-ms", "30000", "--queue-timeout-s", "600")
    command = [sys.executable, "-m", "antiphon", "serve", "--port", "0", *patience, *arguments]
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *command, stdout=output, stderr=output, start_new_session=True, env=environment
        )
    try:
        yield await _until_ready(process, log)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)
        try:
            async with asyncio.timeout(_END_S):
                await process.wait()
        except TimeoutError:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


async def _until_ready(process: asyncio.subprocess.Process, log: Path) -> House:
    async with asyncio.timeout(_START_S):
        while True:
            said = await asyncio.to_thread(log.read_text)
            if process.returncode is not None:
                raise RuntimeError(f"antiphon serve ended with {process.returncode}:\n{said[-3000:]}")
            url, model = _READY.search(said), _MODEL.search(said)
            if url is not None and model is not None:
                return House(url.group(1), model.group(1), log)
            await asyncio.sleep(0.2)
