"""An engine whose thread dies takes its worker along: gateways hear it at once, the exit code is 1."""

from __future__ import annotations

import sys
from pathlib import Path

from antiphon_proto import worker_pb2 as wire

from tests.support.workers import TIMED, AttachClient, Workers, prompt_of, within

BROKEN_WORKER = """
import sys
from antiphon.__main__ import main
from antiphon_engine import TimedExecutor

executes = TimedExecutor.execute

def execute(self, step):
    if any(len(part.tokens) == 13 for part in step):
        raise SystemError("the device fell off the bus")
    return executes(self, step)

TimedExecutor.execute = execute
main(["worker", *sys.argv[1:]])
"""


async def test_a_dead_engine_ends_the_worker(tmp_path: Path):
    async with Workers(tmp_path, *TIMED, command=(sys.executable, "-c", BROKEN_WORKER)) as workers:
        worker = await workers.start("--role", "both")
        async with AttachClient(worker) as client:
            fine = await client.run(client.submission(prompt_of(20)))
            assert len(fine.token_ids) == 8
            for number in range(2):
                failed = await client.run(client.submission(prompt_of(13, seed=number)))
                assert failed.finish == wire.Finish.FINISH_ERROR
                assert "the device fell off the bus" in failed.error
            # With the third failed step in a row the engine gives up.
            await client.submit(client.submission(prompt_of(13, seed=2)))
            await within(10, client.broken)
        assert await within(20, worker.process.wait()) == 1
        assert "the engine's thread died" in worker.log
