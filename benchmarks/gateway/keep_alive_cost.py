"""What it costs to keep silent streams alive: the sweep's look at each of 5,000, and a comment where one is due.

    python -m benchmarks.gateway.keep_alive_cost

The least and the median of the rounds are told, in microseconds of one stream.
"""

from __future__ import annotations

import statistics
import time
from typing import cast

from antiphon_gateway.http import Request
from antiphon_gateway.keep_alive import KeepAlive
from antiphon_gateway.protocol import Connection

STREAMS = 5000
ROUNDS = 40


class Wire:
    """What takes the bytes, at no cost."""

    date_line = b"date: Mon, 30 Nov 2026 00:00:00 GMT\r\n"
    write_paused = False

    def write(self, data: bytes) -> None:
        pass


def streams() -> list[Request]:
    wire = cast(Connection, Wire())
    return [Request(wire, "POST", "/v1/completions", {}) for _ in range(STREAMS)]


def sweep(keeper: KeepAlive, requests: list[Request], now: float) -> float:
    """Microseconds a stream."""
    began = time.perf_counter()
    for request in requests:
        keeper.look(request, now, 100.0, begun=True)
    return (time.perf_counter() - began) / len(requests) * 1e6


def main() -> None:
    keeper = KeepAlive(15.0, 45.0)
    requests = streams()
    nothing_due, all_spoke, all_due = [], [], []
    for round_number in range(ROUNDS):
        now = 1000.0 + 100.0 * round_number
        all_due.append(sweep(keeper, requests, now))
        nothing_due.append(sweep(keeper, requests, now + 1.0))
        for request in requests:
            request.push(b"data: {}\n\n")
        all_spoke.append(sweep(keeper, requests, now + 2.0))
    for name, costs in (("nothing is due", nothing_due), ("all have spoken", all_spoke), ("all are due", all_due)):
        least, median = min(costs), statistics.median(costs)
        print(f"{name:16} {least:.2f} us, median {median:.2f} us; {STREAMS} streams: {median * STREAMS / 1000:.1f} ms")


if __name__ == "__main__":
    main()
