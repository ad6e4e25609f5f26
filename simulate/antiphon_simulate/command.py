"""`antiphon simulate route`: policies on a trace, at a rate or many, with several seeds, told as a table or as JSON.

What is wrong with the words or the files is said in a sentence, with exit status 2. Progress goes to stderr, one line a
run, so stdout is the table or the object and nothing else. Ctrl-C ends the processes and the command, and says so.
"""

from __future__ import annotations

import argparse
import importlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from antiphon_simulate.cells import CellResult, Plan, Series, Variant, run_all
from antiphon_simulate.cluster import WorkloadError
from antiphon_simulate.policies import registry
from antiphon_simulate.records import ClusterShape, Sla
from antiphon_simulate.report import page, table, to_json
from antiphon_simulate.summary import BOUND, Summary, summarise
from antiphon_simulate.telling import say, tell
from antiphon_simulate.timings import DEFAULT, PRESETS, TimingError, read_timing
from antiphon_simulate.traces import TraceError, read_trace
from antiphon_simulate.words import at_least, positive
from antiphon_simulate.workload import offered_rps

OK = 0
BAD_INPUT = 2
INTERRUPTED = 130

_EXAMPLES = """\
examples:
  antiphon simulate route --trace day.jsonl.gz --prefill 4 --decode 4
  antiphon simulate route --trace day.jsonl.gz --prefill 8 --policy all --rate-scale 1 2 3 4 --seeds 5 --out results
  antiphon simulate route --trace day.jsonl.gz --prefill 4 --decode 4 --policy antiphon round_robin --json

docs/simulator.md says what is simulated, what is not, and how each figure is defined.
"""


class OptionError(ValueError):
    """Words that do not go together."""


def run_route(arguments: Sequence[str]) -> int:
    """The command; its exit status."""
    try:
        given = _parser().parse_args(arguments)
    except SystemExit as error:  # argparse, after it has told what is wrong or has shown its help
        return error.code if isinstance(error.code, int) else BAD_INPUT
    try:
        return _route(given)
    except (TraceError, TimingError, WorkloadError, OptionError, registry.UnknownPolicyError) as error:
        say(f"antiphon: {error}")
        return BAD_INPUT
    except KeyboardInterrupt:
        say("antiphon: stopped; nothing was written")
        return INTERRUPTED


def _route(given: argparse.Namespace) -> int:
    out: Path | None = given.out
    if out is not None:  # before hours of work, not after
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OptionError(f"--out {out} cannot be made a folder: {error.strerror}") from error
        importlib.import_module("matplotlib")
    with_goodput = given.goodput is not False
    search = given.goodput is True or (with_goodput and len(given.rate_scale) == 1)
    variants = _variants(given.policy, sweep=given.sweep, with_bound=with_goodput)
    trace = read_trace(given.trace).head(given.limit)
    plan = Plan(
        trace=trace,
        shape=ClusterShape(given.prefill, given.decode, given.pool_blocks, given.max_running),
        timing=read_timing(given.timing),
        sla=Sla(given.sla_ttft_ms, given.sla_ttft_ms_per_1k, given.sla_tpot_ms),
        gateways=given.gateways,
    )
    seeds = range(given.seeds)
    scales = list(dict.fromkeys(given.rate_scale))
    series = [Series(variant, seed, scales, search=search) for variant in variants for seed in seeds]
    trace_rps = offered_rps(trace)
    say(
        f"{trace.name}: {len(trace.requests)} requests, {trace_rps:.3g} requests/s; {len(variants)} policies or "
        f"settings, {len(seeds)} seed(s), at least {len(series) * len(scales)} runs, {given.jobs} at once"
    )
    results = run_all(plan, series, processes=given.jobs, progress=_progress())
    summary = summarise(plan, variants, list(seeds), scales, results, trace_rps=trace_rps, with_goodput=with_goodput)
    _tell(summary, as_json=given.json, out=out)
    return OK


def _variants(names: Sequence[str], *, sweep: bool, with_bound: bool) -> list[Variant]:
    chosen = registry.NAMES if "all" in names else tuple(dict.fromkeys(names))
    if with_bound and BOUND not in chosen:
        chosen = (*chosen, BOUND)
    variants = []
    for name in chosen:
        variants.append(Variant(name))
        registry.describe(name)  # raises for names that there are not
        if sweep:
            variants += [Variant(name, setting) for setting in registry.sweep(name)]
    return variants


def _tell(summary: Summary, *, as_json: bool, out: Path | None) -> None:
    def draw() -> bytes:
        from antiphon_simulate.plots import draw

        return draw(summary)

    document = to_json(summary)
    tell(document, table(summary), as_json=as_json, out=out, draw=draw, page=lambda plots: page(summary, plots))


def _progress() -> Callable[[CellResult], None]:
    began, runs = time.monotonic(), 0

    def told_of(result: CellResult) -> None:
        nonlocal runs
        runs += 1
        cell, share = result.cell, result.figures.inside_sla_share
        told = "no feasible request" if share is None else f"{100.0 * share:.2f} % inside the SLA"
        say(
            f"{time.monotonic() - began:5.0f} s  run {runs}: {cell.variant.label}, seed {cell.seed}, rate "
            f"x{cell.rate_scale:.3g} ({result.offered_rps:.3g} requests/s): {told}, {result.took_s:.1f} s"
        )

    return told_of


def _parser() -> argparse.ArgumentParser:
    names = "\n".join(f"  {name:<20} {registry.describe(name)}" for name in registry.NAMES)
    parser = argparse.ArgumentParser(
        prog="antiphon simulate route",
        description="Runs routing policies on a trace in a simulated cluster and says what each would have given.",
        epilog=f"policies:\n{names}\n\n{_EXAMPLES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--trace", required=True, type=Path, metavar="FILE", help="JSON lines (plain or gzip) or CSV")
    add("--prefill", required=True, type=at_least(1), metavar="N", help="prefill workers")
    add("--decode", default=0, type=at_least(0), metavar="M", help="decode workers; 0: the N do both (default: 0)")
    add("--policy", nargs="+", default=["antiphon"], metavar="NAME", help="one or more, or `all` (default: antiphon)")
    add("--sweep", action="store_true", help="each policy at every setting of its published sweep too")
    add(
        "--rate-scale",
        nargs="+",
        type=positive,
        default=[1.0],
        metavar="X",
        help="arrivals X times as fast (default: 1)",
    )
    add("--seeds", type=at_least(1), default=1, metavar="N", help="runs with other arrivals and draws (default: 1)")
    add(
        "--goodput",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="search for the highest rate that keeps the SLA, with as many runs as it takes (default: where one rate "
        "is given; with several, goodput is taken from them). --no-goodput: do without",
    )
    add(
        "--timing",
        default=DEFAULT,
        metavar="NAME|FILE",
        help=f"{', '.join(PRESETS)}, or a JSON file (default: {DEFAULT}, which is an example and no measurement)",
    )
    add(
        "--pool-blocks",
        type=at_least(1),
        default=1024,
        metavar="N",
        help="blocks of 512 tokens a worker (default: 1024)",
    )
    add(
        "--max-running",
        type=at_least(1),
        default=256,
        metavar="N",
        help="sequences that decode at once (default: 256)",
    )
    add(
        "--gateways",
        type=at_least(1),
        default=1,
        metavar="N",
        help="gateways that route on their own, requests split between them (default: 1)",
    )
    sla = Sla()
    add("--sla-ttft-ms", type=positive, default=sla.ttft_ms, metavar="MS", help=f"(default: {sla.ttft_ms:g})")
    add(
        "--sla-ttft-ms-per-1k",
        type=_not_negative,
        default=sla.ttft_ms_per_1k_prompt_tokens,
        metavar="MS",
        help=f"more time for the first token, per 1,000 prompt tokens (default: {sla.ttft_ms_per_1k_prompt_tokens:g})",
    )
    add("--sla-tpot-ms", type=positive, default=sla.tpot_ms, metavar="MS", help=f"(default: {sla.tpot_ms:g})")
    add("--limit", type=at_least(1), default=None, metavar="N", help="only the first N requests of the trace")
    add("--jobs", type=at_least(1), default=os.cpu_count() or 1, metavar="N", help="runs at once (default: processors)")
    add("--json", action="store_true", help="one JSON object on stdout instead of the table")
    add(
        "--out",
        type=Path,
        default=None,
        metavar="DIR",
        help="also write result.json, table.txt, plots.png, report.html",
    )
    return parser


def _not_negative(word: str) -> float:
    return 0.0 if float(word) == 0.0 else positive(word)
