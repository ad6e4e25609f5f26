"""`antiphon simulate autoscale`: scaling policies on a trace or a generated load, told as a table or as JSON.

What is wrong with the words or the files is said in a sentence, with exit status 2. Progress goes to stderr.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Sequence
from pathlib import Path

from antiphon_simulate.autoscale.calls import Load
from antiphon_simulate.autoscale.cluster import StarvedError
from antiphon_simulate.autoscale.goal import GoalError
from antiphon_simulate.autoscale.options import (
    add_load_options,
    add_site_options,
    duration,
    read_requests,
    read_setting,
)
from antiphon_simulate.autoscale.records import Setting
from antiphon_simulate.autoscale.reference import (
    Reference,
    ReferenceError,
    find_reference,
    read_reference,
    write_reference,
)
from antiphon_simulate.autoscale.registry import NAMES, UnknownScalerError, describe
from antiphon_simulate.autoscale.replay import DecisionFile, DecisionsError
from antiphon_simulate.autoscale.report import page, table, to_json
from antiphon_simulate.autoscale.study import Study, study
from antiphon_simulate.setup import WorkloadError
from antiphon_simulate.telling import say, tell
from antiphon_simulate.timings import TimingError
from antiphon_simulate.traces import TraceError
from antiphon_simulate.words import at_least

OK = 0
BAD_INPUT = 2
INTERRUPTED = 130

_BAD = (
    TraceError,
    TimingError,
    WorkloadError,
    GoalError,
    UnknownScalerError,
    StarvedError,
    DecisionsError,
    ReferenceError,
)

_EXAMPLES = """\
examples:
  antiphon simulate autoscale --load step --sla ttft=500ms,tpot=40ms
  antiphon simulate autoscale --trace day.csv --rate-scale 4 --sla ttft=500ms,perThousand=60ms,tpot=40ms --out results
  antiphon simulate autoscale --trace servegen_rate_10min.csv --hour 100s --policy antiphon hpa --sla ttft=1s,tpot=50ms
  antiphon simulate autoscale --load spike --busy-workers 3 --oracle spike.json --sla ttft=500ms,tpot=40ms

docs/simulator.md says what is simulated, what is not, and how each figure is defined.
"""


def run_autoscale(arguments: Sequence[str]) -> int:
    """The command; its exit status."""
    return guarded(_parser(), arguments, _autoscale)


def guarded(
    parser: argparse.ArgumentParser, arguments: Sequence[str], call: Callable[[argparse.Namespace], int]
) -> int:
    """What all of these commands do about words and files that are wrong."""
    try:
        given = parser.parse_args(arguments)
    except SystemExit as error:  # argparse, after it has told what is wrong or has shown its help
        return error.code if isinstance(error.code, int) else BAD_INPUT
    try:
        return call(given)
    except _BAD as error:
        say(f"antiphon: {error}")
        return BAD_INPUT
    except KeyboardInterrupt:
        say("antiphon: stopped")
        return INTERRUPTED


def _autoscale(given: argparse.Namespace) -> int:
    out: Path | None = given.out
    if out is not None:  # before minutes of work, not after
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise GoalError(f"--out {out} cannot be made a folder: {error.strerror}") from error
        importlib.import_module("matplotlib")
    names = NAMES if "all" in given.policy else tuple(dict.fromkeys(given.policy))
    for name in names:
        describe(name)  # raises for names that there are not
    setting = read_setting(given)
    load, _ = read_requests(given, setting)
    say(f"{load.name}: {len(load.calls)} requests in {load.span_ms / 1000.0:.0f} s")
    reference = _reference(given, load, setting)
    say(f"oracle: {reference.gpu_hours:.2f} GPU-hours, no schedule for less than {reference.bound_gpu_hours:.2f}")
    with DecisionFile(given.decisions) as decisions:
        found = study(
            load,
            setting,
            names,
            reference,
            seed=given.seed,
            interval_ms=given.interval,
            keep=decisions.keep,
            say=say,
        )
    _tell(found, as_json=given.json, out=out)
    return OK


def _reference(given: argparse.Namespace, load: Load, setting: Setting) -> Reference:
    path: Path | None = given.oracle
    found = read_reference(path, load, setting, given.seed) if path is not None else None
    if found is None:
        found = find_reference(load, setting, runs=given.oracle_runs, seed=given.seed)
        if path is not None:
            write_reference(path, found)
    return found


def _tell(found: Study, *, as_json: bool, out: Path | None) -> None:
    def draw() -> bytes:
        from antiphon_simulate.autoscale.plots import draw

        return draw(found)

    tell(to_json(found), table(found), as_json=as_json, out=out, draw=draw, page=lambda plots: page(found, plots))


def _parser() -> argparse.ArgumentParser:
    names = "\n".join(f"  {name:<13} {describe(name)}" for name in NAMES)
    parser = argparse.ArgumentParser(
        prog="antiphon simulate autoscale",
        description="Runs scaling policies on a load and says what each would have kept and cost, beside an oracle "
        "that sees the future and the best that could be done without seeing it.",
        epilog=f"policies:\n{names}\n\n{_EXAMPLES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_load_options(parser)
    add_site_options(parser)
    add = parser.add_argument
    add("--policy", nargs="+", default=["all"], metavar="NAME", help="one or more, or `all` (default: all)")
    add("--interval", type=duration, default=5_000.0, metavar="TIME", help="of Antiphon's decisions (default: 5s)")
    add(
        "--oracle-runs",
        type=at_least(1),
        default=20,
        metavar="N",
        help="schedules to try for the oracle: more find a cheaper one (default: 20)",
    )
    add(
        "--oracle",
        type=Path,
        default=None,
        metavar="FILE",
        help="keep the oracle there, and take it from there while load and setting are the same",
    )
    add("--decisions", type=Path, default=None, metavar="FILE", help="write Antiphon's decisions, for `replay`")
    add("--json", action="store_true", help="one JSON object on stdout instead of the table")
    add("--out", type=Path, default=None, metavar="DIR", help="also result.json, table.txt, plots.png, report.html")
    return parser
