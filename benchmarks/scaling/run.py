"""All loads under all scaling policies, beside the oracle: the study of docs/simulator.md, section Scaling.

    python benchmarks/scaling/run.py --traces FOLDER                                     # what has no result yet
    python benchmarks/scaling/run.py --traces FOLDER --policy antiphon --again           # one policy anew, on all loads
    python benchmarks/scaling/run.py --traces FOLDER --only step azure_conv --seeds 3

Each load's object (as `antiphon simulate autoscale --json` prints it) goes to results/LOAD.json, further seeds to
results/LOAD-SEED.json, and its oracle to results/oracle, from where it is taken as long as load and setting are the
same: a policy that is run again costs its own run. Policies that are not run again keep their figures, if they are
beside the same oracle. results/table.md and the README's results are written from the objects (`tables.py`).

Antiphon's decisions are written down with their inputs while it runs, read again and made again (`antiphon simulate
replay`); how many came to the same result stands in its object (`replayed`). Of more than `MOST_REPLAYED`, every so
manyth is made again. Those of `KEPT` are kept:

    antiphon simulate replay benchmarks/scaling/results/decisions-spike.jsonl.xz

One rule says how large every load is: its mean work keeps `BUSY_WORKERS` workers of both pools together busy (`--load`:
its highest rate; traces: so many copies; ServeGen: its mean rate). Pools may be as large as 64 each, so bounds never
decide. Goal, site, interval and timing are the same for all but ServeGen's weeks: these would be tens of millions of
requests, so they are served by slow workers (timing `demo`) with a wider goal, and an hour passes in 100 s.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import io
import json
import lzma
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from antiphon_simulate.autoscale.command import run_autoscale
from antiphon_simulate.autoscale.registry import NAMES
from antiphon_simulate.autoscale.replay import replay

HERE = Path(__file__).parent
RESULTS = HERE / "results"
OURS = "antiphon"
KEPT = "spike"
MOST_REPLAYED = 500
BUSY_WORKERS = "2"
GOAL = "ttft=500ms,perThousand=100ms,tpot=40ms"
SLOW = ("--timing", "demo", "--sla", "ttft=2s,perThousand=1s,tpot=80ms")
SAME = (
    *("--busy-workers", BUSY_WORKERS, "--max-prefill", "64", "--max-decode", "64"),
    *("--interval", "10s", "--oracle-runs", "14", "--json"),
)
LOADS: dict[str, tuple[str, ...]] = {
    "constant": ("--load", "constant"),
    "step": ("--load", "step"),
    "ramp": ("--load", "ramp"),
    "spike": ("--load", "spike"),
    "sawtooth": ("--load", "sawtooth"),
    "azure_code": ("--trace", "azure2023_code.csv"),
    "azure_conv": ("--trace", "azure2023_conv.csv"),
    "mooncake": ("--trace", "mooncake_conversation.jsonl.gz"),
    "servegen": ("--trace", "servegen_rate_10min.csv", "--model", "m-large", "--hour", "100s", *SLOW),
    "step_failures": ("--load", "step", "--mean-life-hours", "2"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True, help="the folder with the traces")
    parser.add_argument("--only", nargs="+", choices=list(LOADS), default=list(LOADS))
    parser.add_argument("--policy", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--seeds", type=int, default=1, help="of the generated loads (default: 1)")
    parser.add_argument("--again", action="store_true", help="also what has a result")
    given = parser.parse_args()
    (RESULTS / "oracle").mkdir(parents=True, exist_ok=True)
    for seed in range(given.seeds):
        for name in given.only:
            if seed and "--load" not in LOADS[name]:
                continue
            status = _run(name, seed, given.traces, given.policy, again=given.again)
            if status:
                return status
    return 0


def _run(name: str, seed: int, traces: Path, policies: list[str], *, again: bool) -> int:
    title = name if not seed else f"{name}-{seed}"
    path = RESULTS / f"{title}.json"
    before = _read(path)
    missing = policies if again or before is None else [one for one in policies if one not in before["policies"]]
    if not missing:
        return 0
    words = [str(traces / word) if word.endswith((".csv", ".gz")) else word for word in LOADS[name]]
    if "--sla" not in words:
        words += ["--sla", GOAL]
    words += [
        *SAME,
        "--oracle",
        str(RESULTS / "oracle" / f"{title.removesuffix('_failures')}.json"),
        "--seed",
        str(seed),
    ]
    began, out = time.monotonic(), io.StringIO()
    with tempfile.TemporaryDirectory() as folder:
        decisions = Path(folder) / "decisions.jsonl.gz"
        with contextlib.redirect_stdout(out):
            status = run_autoscale([*words, "--policy", *missing, "--decisions", str(decisions)])
        if status:
            return status
        told, before = json.loads(out.getvalue()), _read(path)
        if OURS in missing:
            told["policies"][OURS]["replayed"] = _replayed(decisions)
            if title == KEPT:
                _keep(decisions)
    if before is not None and before["oracle"].get("key") == told["oracle"]["key"]:
        both = {**before["policies"], **told["policies"]}
        told["policies"] = {policy: both[policy] for policy in NAMES if policy in both}
    path.write_text(json.dumps(told, indent=1) + "\n")
    print(f"{title}: {time.monotonic() - began:.0f} s", file=sys.stderr)
    return 0


def _replayed(decisions: Path) -> dict[str, int]:
    with gzip.open(decisions, "rb") as file:
        count = sum(1 for _ in file)
    found = replay(decisions, every=-(-count // MOST_REPLAYED))
    return {
        "decisions": count,
        "made_again": found.decisions,
        "equal": found.decisions - len(found.differences),
    }


def _keep(decisions: Path) -> None:
    """One decision's window is nearly the next one's, so a compressor that looks far back makes them small."""
    path = RESULTS / f"decisions-{KEPT}.jsonl.xz"
    with gzip.open(decisions, "rb") as whole, lzma.open(path, "wb") as kept:
        shutil.copyfileobj(whole, kept)


def _read(path: Path) -> dict[str, Any] | None:
    found: dict[str, Any] | None = json.loads(path.read_text()) if path.exists() else None
    return found


if __name__ == "__main__":
    sys.exit(main())
