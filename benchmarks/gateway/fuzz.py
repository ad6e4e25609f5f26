"""Half-right bodies by the ten thousand against a whole house: a gateway, a prefill worker and a decode worker.

Each body (`tests.support.fuzzed_bodies`) has to be served or refused: an answer of 500 or above, or a stream that ends
in an error, ends the run with the body in the message. Afterwards the workers must be the same processes as before,
with as many free blocks, and the gateway must be at rest. Options behind `--` go to the workers, in place of those of
the timed engine.

    python -m benchmarks.gateway.fuzz --bodies 20000
    python -m benchmarks.gateway.fuzz --bodies 500 -- FOLDER --engine torch --transport tcp
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.support.fuzzed_bodies import Fuzzed, fuzzed, is_fault
from tests.support.house import House
from tests.support.workers import TIMED, WorkerProcess

BATCH = 40
CLIENTS = 8
ANSWER_DEADLINE_S = 120
QUICK = (*TIMED, "--timed-base-ms", "1", "--max-context-tokens", "512")

GATEWAY = ("--trust-request-chat-template", "--heartbeat-ms", "2000", "--lost-after-ms", "10000")
"""A machine that is busy with something else pauses its processes: who is silent for a second is not lost by that."""


class FaultFound(RuntimeError):
    """A body was answered as none may be; the message has both."""


class Clients:
    """As many connections as threads, each kept alive."""

    def __init__(self, url: str) -> None:
        self.statuses: Counter[int] = Counter()
        self._address = urlsplit(url).netloc
        self._own = threading.local()
        self._pool = ThreadPoolExecutor(CLIENTS)

    def send_all(self, bodies: Sequence[Fuzzed]) -> None:
        """Raises FaultFound."""
        self.statuses.update(self._pool.map(self._send, bodies))

    def close(self) -> None:
        self._pool.shutdown()

    def _send(self, body: Fuzzed) -> int:
        if not hasattr(self._own, "connection"):
            self._own.connection = http.client.HTTPConnection(self._address, timeout=ANSWER_DEADLINE_S)
        try:
            self._own.connection.request("POST", body.path, body.raw)
            response = self._own.connection.getresponse()
        except (ConnectionError, http.client.RemoteDisconnected):
            # Idle for longer than the gateway keeps it: others of the batch took their time.
            self._own.connection.close()
            self._own.connection.request("POST", body.path, body.raw)
            response = self._own.connection.getresponse()
        answer = response.read()
        if is_fault(response.status, answer):
            raise FaultFound(f"{body} was answered {response.status}: {answer[:2000]!r}")
        return int(response.status)


def send_drawn(url: str, model: str, bodies: int, start: int) -> Counter[int]:
    """How often each status came. Raises FaultFound."""
    clients = Clients(url)

    @seed(start)
    @settings(
        max_examples=-(-bodies // BATCH),
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(fuzzed(model), min_size=BATCH, max_size=BATCH))
    def send(drawn: list[Fuzzed]) -> None:
        clients.send_all(drawn)

    try:
        send()
    finally:
        clients.close()
    return clients.statuses


async def state_of(workers: Sequence[WorkerProcess]) -> list[dict[str, Any]]:
    """What must be the same before and after."""
    return [
        {
            "worker": worker.worker_id,
            "pid": worker.ready.pid,
            "ended": worker.process.returncode is not None,
            "blocks_free": await worker.metric("antiphon_blocks_free"),
        }
        for worker in workers
    ]


async def fuzz(bodies: int, start: int, worker_options: Sequence[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="gateway-fuzz-") as folder:
        async with House(Path(folder), *(worker_options or QUICK)) as house:
            workers = await house.start_workers(("--role", "prefill"), ("--role", "decode"))
            await house.start_gateway(*GATEWAY)
            await house.until_ready(prefill=1, decode=1)
            before = await state_of(workers)
            began = time.monotonic()
            statuses = await asyncio.to_thread(send_drawn, house.url, house.model, bodies, start)
            seconds = time.monotonic() - began
            await house.until_gateway_is_at_rest()
            after = await state_of(workers)
            return {
                "bodies": statuses.total(),
                "seed": start,
                "seconds": round(seconds, 1),
                "statuses": {str(status): count for status, count in sorted(statuses.items())},
                "state_as_before": before == after,
                "before": before,
                "after": after,
            }


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="fuzz a gateway with workers")
    parser.add_argument("--bodies", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="write the result here, as JSON")
    own, _, theirs = " ".join(arguments).partition(" -- ")
    options = parser.parse_args(own.split())
    found = asyncio.run(fuzz(options.bodies, options.seed, theirs.split()))
    text = json.dumps(found, indent=2)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n")
    return 0 if found["state_as_before"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
