"""The status page of a worker that does not serve yet, or not again: alive, not ready, and why."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from antiphon_telemetry.exit import ExitCode
from antiphon_telemetry.status import StatusServer

from antiphon_worker.errors import WorkerStartError
from antiphon_worker.options import WorkerOptions


@dataclasses.dataclass(slots=True)
class Waiting:
    """What the page shows; changed from any thread."""

    phase: str
    """One line."""
    problem: str = ""
    """What is in the way, such as where ranks find no place. Empty: nothing that is known."""
    ready: bool = False


@asynccontextmanager
async def waiting_page(options: WorkerOptions, waiting: Waiting) -> AsyncIterator[None]:
    """/health says 200 and /ready 503 with the reason, until this is left. Raises WorkerStartError."""
    page = StatusServer(
        options.host,
        options.status_port,
        ready=lambda: (waiting.ready, waiting.problem or waiting.phase),
        detail=lambda: {"model": options.name or options.model, **dataclasses.asdict(waiting)},
    )
    try:
        await page.start()
    except OSError as error:
        raise WorkerStartError(
            f"the status port {options.host}:{options.status_port} is not to be had ({error.strerror}): "
            "choose another --status-port",
            ExitCode.UNAVAILABLE,
        ) from error
    try:
        yield
    finally:
        await page.close()
