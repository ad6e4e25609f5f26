"""The tables of the README, from results side by side.

python -m benchmarks.index_redis.table results/before.json results/after.json
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Found = dict[str, Any]


def rows() -> list[tuple[str, Callable[[Found], float | None]]]:
    """(What, how to get it from one run's results.)"""
    listed: list[tuple[str, Callable[[Found], float | None]]] = [
        ("one set written: longest script, ms", _large("written", "longest_ms")),
        ("one set read: longest script, ms", _large("read", "longest_ms")),
        ("fleet starts: longest script, ms", lambda run: run["fleet starts"]["longest_ms"]),
        ("gateway starts: seconds until it knows all", _starts(lambda one: one["took_s"])),
        ("gateway starts: CPU seconds of the gateway", _starts(lambda one: one["reader"]["cpu_s"])),
        ("gateway starts: longest script, ms", _starts(lambda one: one["longest_ms"])),
        ("Valkey restarted empty: seconds until all sets are written", _restarted("all_written_after_s")),
        ("Valkey restarted empty: longest script, ms", _restarted("longest_ms")),
        ("memory of Valkey, MB", lambda run: run["changes 0/s"]["memory_bytes"] / 1e6),
        ("memory of the gateway's process, MB", lambda run: run["changes 0/s"]["reader_rss_bytes"] / 1e6),
    ]
    for per_s in (0, 500, 2000, 4000):
        for what, key, factor in (
            ("changes that were made, 1/s", "changes_per_s", 1.0),
            ("events, 1/s", "events_per_s", 1.0),
            ("CPU of Valkey, %", "server_cpu_share", 100.0),
            ("CPU of the gateway, %", "reader_cpu_share", 100.0),
            ("age of the news of a worker that changes 5 times a second, median ms", "age_ms_median", 1.0),
            ("longest script, ms", "longest_ms", 1.0),
        ):
            listed.append((f"{per_s} changes/s: {what}", _following(f"changes {per_s}/s", key, factor)))
    return listed


def _large(side: str, key: str) -> Callable[[Found], float]:
    return lambda run: statistics.median(one[side][key] for one in run["one large set"])


def _starts(pick: Callable[[Found], float]) -> Callable[[Found], float]:
    return lambda run: statistics.median(pick(one) for one in run["gateway starts"])


def _restarted(key: str) -> Callable[[Found], float]:
    return lambda run: float(run["restarted empty"][key])


def _following(phase: str, key: str, factor: float) -> Callable[[Found], float | None]:
    def pick(run: Found) -> float | None:
        found = run.get(phase, {}).get(key)
        return None if found is None else found * factor

    return pick


def main(paths: Sequence[str]) -> None:
    runs = [json.loads(Path(path).read_text()) for path in paths]
    print("| |", " | ".join(Path(path).stem for path in paths), "|")
    print("|---|" + "---|" * len(runs))
    print("| load average before |", " | ".join(f"{run['about']['load_before'][0]:.1f}" for run in runs), "|")
    for what, pick in rows():
        figures = [pick(run) for run in runs]
        if any(figure is not None for figure in figures):
            print(f"| {what} |", " | ".join("-" if one is None else f"{one:.3g}" for one in figures), "|")
    equal = [run["equal"] and all(one["equal"] for one in run["one large set"]) for run in runs]
    print("| mirror equal to all workers at the end |", " | ".join("yes" if one else "no" for one in equal), "|")


if __name__ == "__main__":
    main(sys.argv[1:])
