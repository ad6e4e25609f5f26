"""What a worker says of itself on its `/status` page: whether it is idle, what its links run on, what is in its way.

Asked by the pod's address, for pods that the planner wants. A worker is idle when it does nothing for anybody: no
request, no prefill for a peer, nothing queued in its engine, no block pinned for a peer. An answer that lacks a field
is refused rather than taken for idle: a replica is deleted on this word. A worker whose ranks are being started has
another page, with what it waits for, and nothing to do.
"""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec

from antiphon_operator.names import STATUS_PORT
from antiphon_operator.plan.observed import Object, WorkerView
from antiphon_operator.runtime.pages import PageError, Pages


class _Link(msgspec.Struct):
    transport: str = ""
    up: bool = True


class _Status(msgspec.Struct):
    """The fields of the page that count here; see `docs/worker.md`. None: not there."""

    running: int | None = None
    waiting: int | None = None
    active_requests: int | None = None
    pins: int | None = None
    prefill_runs: int = 0
    """Only roles that compute for others have it."""
    links: tuple[_Link, ...] = ()
    phase: str | None = None
    """Of a worker whose ranks are being started, and of no other."""
    problem: str = ""

    @property
    def work(self) -> tuple[int | None, ...]:
        return self.running, self.waiting, self.active_requests, self.pins, self.prefill_runs


class Workers:
    """Reads workers' pages until closed."""

    def __init__(self, *, port: int = STATUS_PORT, pages: Pages | None = None) -> None:
        self._port = port
        self._pages = pages or Pages()

    async def ask(self, pod: Object) -> WorkerView | None:
        """None: the pod has no address (yet, or any more). Raises PageError, which is an OSError."""
        status = pod.get("status") or {}
        address = str(status.get("podIP") or "")
        if not address:
            return None
        asked_at = datetime.now(UTC)
        url = f"http://{in_url(address)}:{self._port}/status"
        page = await self._pages.read(url, _Status)
        if page.phase is not None:
            return WorkerView(asked_at=asked_at, idle=True, problem=page.problem)
        if None in page.work:
            raise PageError(f"{url} is not the page it should be: it does not say what the worker does")
        transports = sorted({link.transport for link in page.links if link.up and link.transport})
        return WorkerView(asked_at=asked_at, idle=not any(page.work), links=tuple(transports))

    async def close(self) -> None:
        await self._pages.close()


def in_url(address: str) -> str:
    return f"[{address}]" if ":" in address else address
