"""How long each script of the index keeps Valkey from everybody else: alone, at the sizes that are used.

    python -m benchmarks.index_redis.scripts

Seen by one client over a local socket, so with its round trip in it; the least of many tries, which a busy machine
moves least. The last rows are what the pages and parts avoid: the same work in one script.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import redis
from antiphon_kvtransfer import _scripts
from antiphon_kvtransfer.announcer import PART_HASHES
from antiphon_kvtransfer.cluster import HASHES_AT_ONCE, WORKERS_AT_ONCE
from antiphon_kvtransfer.keys import ModelKeys
from antiphon_kvtransfer.records import encode_record

from benchmarks.index_redis.fleet import record_of
from tests.support.valkey import Valkey

WORKERS = 1000
BLOCKS = 1000
LARGE = 100_000
TTL_MS = 600_000
EVENTS_KEPT = 20_000
KEYS = ModelKeys("benchmark")


def heartbeat(client: Any, worker_id: str) -> None:
    own = (KEYS.record(worker_id), KEYS.index(worker_id), KEYS.blocks(worker_id), KEYS.workers, KEYS.events)
    value = encode_record(record_of("w0", "benchmark", BLOCKS))
    client.eval(_scripts.HEARTBEAT, 5, *own, worker_id, "i", 1, value, TTL_MS, TTL_MS, EVENTS_KEPT)


def write_all(client: Any, worker_id: str, sequence: int, packed: bytes) -> None:
    keys = (KEYS.index(worker_id), KEYS.blocks(worker_id), KEYS.events, KEYS.part(worker_id, "p"))
    about = (worker_id, "i", 1, sequence, packed, len(packed) // 16, "p", TTL_MS, EVENTS_KEPT)
    assert client.eval(_scripts.WRITE_ALL, 4, *keys, *about) == [0]


def look(client: Any, page: int) -> Any:
    keys = (KEYS.workers, KEYS.events, KEYS.model_record)
    return client.eval(_scripts.READ_WORKERS, 3, *keys, KEYS.record_prefix, KEYS.index_prefix, page)


def read_page(client: Any, worker_id: str, page: int) -> Any:
    return client.eval(_scripts.READ_PAGE, 2, KEYS.index(worker_id), KEYS.blocks(worker_id), 0, page)


def main() -> None:
    sequence = 1

    def next_sequence() -> int:
        nonlocal sequence
        sequence += 1
        return sequence

    def delta(client: Any) -> None:
        keys = (KEYS.index("w1"), KEYS.blocks("w1"), KEYS.events)
        at = next_sequence()
        words = ("w1", "i", at - 1, at, os.urandom(80), os.urandom(80), TTL_MS, EVENTS_KEPT)
        assert client.eval(_scripts.WRITE_DELTA, 3, *keys, *words) == [0]

    def part(client: Any) -> None:
        client.eval(_scripts.WRITE_PART, 1, KEYS.part("w0", os.urandom(8).hex()), os.urandom(16 * PART_HASHES), 1000)

    with Valkey(unix=True) as server, redis.Redis.from_url(server.url, protocol=2) as client:
        for number in range(WORKERS):
            heartbeat(client, f"w{number}")
            write_all(client, f"w{number}", sequence, os.urandom(16 * BLOCKS))
        heartbeat(client, "large")
        write_all(client, "large", sequence, os.urandom(16 * LARGE))
        measured: list[tuple[str, Callable[[], object]]] = [
            ("heartbeat", lambda: heartbeat(client, "w1")),
            ("delta of 5 stored and 5 removed", lambda: delta(client)),
            (f"a page of a look, {WORKERS_AT_ONCE} of {WORKERS} workers", lambda: look(client, WORKERS_AT_ONCE)),
            (f"a page of a set, {HASHES_AT_ONCE} hashes", lambda: read_page(client, "large", HASHES_AT_ONCE)),
            (f"a part of a set, {PART_HASHES} hashes", lambda: part(client)),
            (f"a whole look at {WORKERS} workers", lambda: look(client, WORKERS)),
            (f"a whole set read, {LARGE} hashes", lambda: read_page(client, "large", 10 * LARGE)),
            (
                f"a whole set written, {LARGE} hashes",
                lambda: write_all(client, "large", next_sequence(), os.urandom(16 * LARGE)),
            ),
        ]
        print("| script | ms |\n|---|---|")
        for what, run in measured:
            taken_ms = []
            for _ in range(40):
                started = time.perf_counter()
                run()
                taken_ms.append((time.perf_counter() - started) * 1000)
            print(f"| {what} | {min(taken_ms):.2f} |")


if __name__ == "__main__":
    main()
