"""Decode workers are taken away under streaming load: no stream ends without a word, and none is altered.

A small version of `benchmarks/moves`, which does it a hundred times. Real processes with the timed engine, whose
answers are a function of the request and which checks every KV block that it uses: a block that was pulled wrongly
after a move would fail its step.

See ai-dynamo/dynamo#13565 (scale-down cuts what runs) and the fault seen in ai-dynamo 1.6.1 (usage after a migration
counts tokens twice).
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support.house import House
from tests.support.moving import MovingLoad, asked, busiest, moves, references
from tests.support.workers import TIMED

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

_OPTIONS = ("--timed-base-ms", "10", "--kv-blocks", "1024", "--max-batch-tokens", "256", "--drain-timeout-s", "0.1")
_KINDS: tuple[dict[str, Any], ...] = ({}, {"logprobs": 2}, {"n": 2}, {"stop": "CUT", "logprobs": 1})


async def test_streams_outlive_the_workers_that_began_them(tmp_path: Path) -> None:
    async with House(tmp_path, *TIMED, *_OPTIONS) as house:
        prefill, *decode = await house.start_workers(("--role", "prefill"), *[("--role", "decode")] * 4)
        await house.start_gateway()
        await house.until_ready(prefill=1, decode=4)
        asks = asked(12, longest=120, kinds=_KINDS)
        await references(house, asks, at_once=8)
        load = MovingLoad(house, asks, lanes=8)
        async with load.running():
            for number in (signal.SIGTERM, signal.SIGKILL):
                leaving = await busiest(decode)
                decode.remove(leaving)
                leaving.send_signal(number)
                assert await leaving.process.wait() == (0 if number is signal.SIGTERM else -signal.SIGKILL)
        told = load.tally
        assert (told.silent, told.altered, told.errors) == (0, 0, 0), told.notes
        assert told.complete == told.streams > 8
        by_reason = await moves(house)
        assert by_reason["drained"] > 0
        assert by_reason["lost"] > 0
        assert by_reason["failed"] == 0
        await house.until_gateway_is_at_rest()
        for worker in (prefill, *decode):
            await worker.until_idle(20)
