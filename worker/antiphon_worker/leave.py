"""How a worker that was told to end leaves its requests: what ends in time ends here, the rest goes on elsewhere.

For `--drain-timeout-s`, or until it is told a second time, the worker lets run what runs. What is left then it *gives
back*: gateways have answers continued by another worker, from the tokens that they have (`FINISH_MOVED`), and decode
workers have prompts computed by another one. Whoever goes on pulls the blocks from here, so the worker stays until
nobody has read from it for a moment, and no longer than `READ_S`: whoever comes later computes them again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from antiphon_worker.service import WorkerContext, WorkerService

log = logging.getLogger("antiphon.worker")

QUIET_S = 1.0
"""Nobody has read for so long: those who go on have got what they came for. A gateway places an answer anew within
milliseconds, and pulls take tens of them."""

READ_S = 6.0
"""How long a worker stays for its readers. It ends with this to spare before anybody kills it: pods have 15 s."""


async def leave(context: WorkerContext, services: Sequence[WorkerService], hurry: asyncio.Event) -> None:
    """Return when nothing runs here any more, and nobody reads. `hurry`: do not wait for what runs."""
    timeout_s = context.options.drain_timeout_s
    log.info("draining: %d requests run; waiting up to %.0f s", _active(services), timeout_s)
    waits: set[asyncio.Future[Any]] = {asyncio.ensure_future(_drained(services)), asyncio.ensure_future(hurry.wait())}
    try:
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
    left = _active(services)
    if not left:
        return
    log.info("%d requests are given back, to go on elsewhere", left)
    for service in services:
        service.give_back(f"{context.identity.worker_id} is draining")
    try:
        async with asyncio.timeout(READ_S):
            await context.links.servicer().until_unread(QUIET_S)
            await _drained(services)
    except TimeoutError:
        log.warning("somebody reads from here still; not waiting any longer than %.0f s", READ_S)


async def _drained(services: Sequence[WorkerService]) -> None:
    for service in services:
        await service.drained()


def _active(services: Sequence[WorkerService]) -> int:
    return sum(service.active_requests for service in services)
