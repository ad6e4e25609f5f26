"""`antiphon worker --ray-join HOST:PORT`: this machine's devices for the ranks of a worker elsewhere.

It has no engine, serves no requests and is no member of anything; it has a status page as every worker has, for probes.
"""

from __future__ import annotations

import asyncio
import threading

import uvloop
from antiphon_telemetry.exit import ExitCode

from antiphon_worker.end_requests import EndRequests
from antiphon_worker.errors import WorkerStartError
from antiphon_worker.options import WorkerOptions
from antiphon_worker.waiting_page import Waiting, waiting_page


def run_join(options: WorkerOptions) -> int:
    """Until told to end; the exit code. Raises WorkerStartError: no head came, or it went."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_join(options))


async def _join(options: WorkerOptions) -> int:
    from antiphon_engine.gang import GangStartError, join_cluster

    from antiphon_worker.ray_options import log, node_ip, token_file

    stop = threading.Event()
    waiting = Waiting(f"waiting for the head {options.ray_join}")
    EndRequests().heard_by(stop.set)

    def progress(line: str) -> None:
        log.info("%s", line)
        waiting.phase = line

    def joined() -> None:
        waiting.ready = True

    async with waiting_page(options, waiting):
        try:
            await asyncio.to_thread(
                join_cluster,
                options.ray_join,
                node_ip=node_ip(options),
                token_file=token_file(options),
                node_ranks=options.ray_node_ranks,
                join_s=options.ray_wait_s,
                progress=progress,
                joined=joined,
                stop=stop,
            )
        except GangStartError as error:
            raise WorkerStartError(str(error), ExitCode(error.exit_code)) from error
    return ExitCode.OK
