"""The lives of a worker whose engine is spread over ranks.

A rank that dies takes the engine with it, and the worker's membership: its record is withdrawn and its streams end, as
if the process had died. But the process is what holds the Ray cluster that other machines have joined. So it goes on:
the ranks are started anew, all of them, and the worker lives again, under its name, as another incarnation. Between
lives that end soon it waits longer and longer. Only what cannot be mended by waiting ends the process: a first start
that fails, and an error that is no lost rank.

Whenever there is no worker there is a page that says so, with what is in the way.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import random
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import uvloop
from antiphon_engine import BlockEngine
from antiphon_engine.parallel import ParallelShape
from antiphon_telemetry.exit import ExitCode

from antiphon_worker.end_requests import EndRequests
from antiphon_worker.engines import gang_settings, scheduler_config
from antiphon_worker.errors import EngineLost, WorkerStartError
from antiphon_worker.identity import new_identity
from antiphon_worker.last_words import GANG_UNSCHEDULABLE, leave_last_words
from antiphon_worker.options import WorkerOptions
from antiphon_worker.service import ServiceFactory
from antiphon_worker.waiting_page import Waiting, waiting_page

if TYPE_CHECKING:
    from antiphon_engine.gang import RayCluster

log = logging.getLogger("antiphon.worker")

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
HEALTHY_AFTER_S = 120.0
"""A life of that length is no failed start: the next pause is the first one again."""
ENGINE_CLOSE_S = 20.0


def pause_s(failures: int, jitter: float) -> float:
    """How long to wait after so many lives that ended soon (from 1); `jitter` from 0 to 1 takes up to a quarter off."""
    return min(FIRST_PAUSE_S * 2.0 ** (failures - 1), LONGEST_PAUSE_S) * (1.0 - 0.25 * jitter)


def run_with_ranks(options: WorkerOptions, roles: Sequence[ServiceFactory], shape: ParallelShape) -> int:
    """Until told to end; the exit code. Raises WorkerStartError."""
    scheduler_config(options)  # refused before a model is looked at
    if not options.worker_id:  # its name is the same in all lives
        options = dataclasses.replace(options, worker_id=new_identity(options).worker_id)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_lives(options, roles, shape))


async def _lives(options: WorkerOptions, roles: Sequence[ServiceFactory], shape: ParallelShape) -> int:
    from antiphon_engine.gang import GangStartError, GangStopped, GangUnschedulable, RayCluster

    from antiphon_worker.ray_options import cluster_settings
    from antiphon_worker.runtime import live

    stop = threading.Event()
    asked = asyncio.Event()
    requests = EndRequests()

    def end() -> None:
        stop.set()
        asked.set()

    cluster = RayCluster(cluster_settings(options))
    waiting = Waiting(f"starting {shape.ranks} ranks ({shape})")
    failures = 0
    lived = False
    try:
        while True:
            requests.heard_by(end)
            async with waiting_page(options, waiting):
                if failures:
                    await _pause(failures, asked)
                if asked.is_set():
                    return ExitCode.OK
                try:
                    engine = await asyncio.to_thread(_start, options, shape, cluster, waiting, stop)
                except GangStopped:
                    return ExitCode.OK
                except GangStartError as error:
                    no_place = GANG_UNSCHEDULABLE if isinstance(error, GangUnschedulable) else ""
                    if not lived:
                        if no_place:
                            leave_last_words(f"{no_place}{error}")
                        raise WorkerStartError(f"{no_place}{error}", ExitCode(error.exit_code)) from error
                    log.error("the ranks cannot be started again: %s", error)
                    waiting.problem = f"{no_place}{error}"
                    failures += 1
                    continue
            lived = True
            began = time.monotonic()
            try:
                return await live(options, roles, engine, requests)
            except EngineLost as lost:
                healthy = time.monotonic() - began >= HEALTHY_AFTER_S
                failures = 1 if healthy else failures + 1
                waiting = Waiting(f"starting {shape.ranks} ranks ({shape}) again", str(lost))
            finally:
                await asyncio.to_thread(engine.close, ENGINE_CLOSE_S)
    finally:
        requests.heard_by(end)
        await asyncio.to_thread(cluster.close)


async def _pause(failures: int, asked: asyncio.Event) -> None:
    for_s = pause_s(failures, random.random())
    log.warning("the ranks are started again in %.1f s", for_s)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(for_s):
            await asked.wait()


def _start(
    options: WorkerOptions, shape: ParallelShape, cluster: RayCluster, waiting: Waiting, stop: threading.Event
) -> BlockEngine:
    """The engine, loaded and not started. Raises GangStartError, GangStopped, WorkerStartError."""
    from antiphon_engine.gang import GangExecutor

    def progress(line: str) -> None:
        log.info("%s", line)
        waiting.phase = line

    def problem(sentence: str) -> None:
        waiting.problem = f"{GANG_UNSCHEDULABLE}{sentence}" if sentence else ""

    settings = gang_settings(options, shape)
    executor = GangExecutor.start(settings, cluster, progress, stop, problem)
    return BlockEngine(executor, scheduler_config(options))
