"""The words that the commands about scaling share, and what they make of them: a load and a setting."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from antiphon_simulate.autoscale.calls import Load, make_load
from antiphon_simulate.autoscale.capacity import mean_work_ms
from antiphon_simulate.autoscale.goal import GoalError, duration_ms, read_goal
from antiphon_simulate.autoscale.loads import SHAPES, copied, generated, mean_share, servegen
from antiphon_simulate.autoscale.records import Setting, Site, Sizes
from antiphon_simulate.records import TraceRequest
from antiphon_simulate.timings import DEFAULT, PRESETS, read_timing
from antiphon_simulate.traces import TraceError, read_trace
from antiphon_simulate.words import at_least, positive
from antiphon_simulate.workload import make_workload

_SERVEGEN_HEADER = b"model,window_start_s,rate_rps"


def add_load_options(parser: argparse.ArgumentParser) -> None:
    site = Site()
    add = parser.add_argument
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--trace", type=Path, metavar="FILE", help="JSON lines (plain or gzip), CSV, or ServeGen's rates")
    what.add_argument("--load", choices=sorted(SHAPES), help="half an hour of a generated load instead of a trace")
    add("--peak-rps", type=positive, default=20.0, metavar="X", help="highest rate of --load (default: 20)")
    add("--model", default="m-mid", metavar="NAME", help="model of ServeGen's rates (default: m-mid)")
    add("--mean-rps", type=positive, default=2.0, metavar="X", help="ServeGen's rates, thinned to this (default: 2)")
    add("--days", type=positive, default=14.0, metavar="X", help="the first days of ServeGen's rates (default: 14)")
    add(
        "--hour",
        type=duration,
        default=3_600_000.0,
        metavar="TIME",
        help="ServeGen: an hour passes in it (default: 1h)",
    )
    add(
        "--busy-workers",
        type=positive,
        default=None,
        metavar="X",
        help="so much of the load that its mean work is X workers, instead of --peak-rps, --mean-rps and --copies",
    )
    add(
        "--rate-scale", type=positive, default=1.0, metavar="X", help="arrivals of a trace X times as fast (default: 1)"
    )
    add("--copies", type=at_least(1), default=1, metavar="N", help="a service N times as large as the trace's")
    add("--limit", type=at_least(1), default=None, metavar="N", help="only the first N requests")
    add("--sla", required=True, metavar="LIMITS", help="ttft=500ms,tpot=40ms and, if wanted, perThousand=60ms")
    add("--target", type=float, default=0.99, metavar="SHARE", help="of the feasible requests (default: 0.99)")
    add(
        "--timing",
        default=DEFAULT,
        metavar="NAME|FILE",
        help=f"{', '.join(PRESETS)}, or a JSON file (default: {DEFAULT}, which is an example and no measurement)",
    )
    add("--max-prefill", type=at_least(1), default=site.most.prefill, metavar="N", help="largest pool (default: 16)")
    add("--max-decode", type=at_least(1), default=site.most.decode, metavar="N", help="largest pool (default: 16)")
    add("--max-running", type=at_least(1), default=site.max_running, metavar="N", help="answers at once on a worker")
    add("--pool-blocks", type=at_least(1), default=1024, metavar="N", help="blocks of 512 tokens a worker")
    add("--seed", type=int, default=0, metavar="N", help="of arrivals and starts (default: 0)")


def add_site_options(parser: argparse.ArgumentParser) -> None:
    site = Site()
    add = parser.add_argument
    add("--min-prefill", type=at_least(0), default=1, metavar="N", help="smallest pool (default: 1)")
    add("--min-decode", type=at_least(0), default=1, metavar="N", help="smallest pool (default: 1)")
    add("--budget", type=at_least(1), default=None, metavar="N", help="GPUs that both pools may have (default: any)")
    add("--start", type=duration, default=site.start_ms, metavar="TIME", help="start of a worker (default: 60s)")
    add("--start-spread", type=float, default=site.start_spread, metavar="SHARE", help="around it (default: 0.2)")
    add("--drain", type=duration, default=site.drain_ms, metavar="TIME", help="then streams move (default: 30s)")
    add("--switch", type=duration, default=site.switch_ms, metavar="TIME", help="change of a role (default: 5s)")
    add("--no-switch", action="store_true", help="workers keep their roles")
    add("--mean-life-hours", type=float, default=0.0, metavar="H", help="workers fail at random (default: never)")


def read_requests(given: argparse.Namespace, setting: Setting) -> tuple[Load, list[TraceRequest]]:
    """The load, and the requests that it was made from. Raises TraceError, WorkloadError."""
    day_ms = 86_400_000.0
    if given.load is not None:
        name, requests = _generated(given, setting)
    elif _is_servegen(given.trace):
        name, requests = _servegen(given, setting)
        day_ms = 24.0 * given.hour
    else:
        name, requests = _trace(given, setting)
    return make_load(name, requests, setting.timing, setting.goal, day_ms=day_ms), requests


def _generated(given: argparse.Namespace, setting: Setting) -> tuple[str, list[TraceRequest]]:
    peak_rps = given.peak_rps
    if given.busy_workers is not None:
        sample = generated("constant", peak_rps=1.0, seed=given.seed)
        peak_rps = given.busy_workers / _work_s(sample, setting) / mean_share(given.load)
    requests = generated(given.load, peak_rps=peak_rps, seed=given.seed)
    return f"{given.load} to {peak_rps:.3g} requests/s", requests[: given.limit]


def _servegen(given: argparse.Namespace, setting: Setting) -> tuple[str, list[TraceRequest]]:
    path, hour_s, mean_rps = given.trace, given.hour / 1000.0, given.mean_rps
    if given.busy_workers is not None:
        sample = servegen(path, given.model, mean_rps=1.0, days=min(1.0, given.days), hour_s=hour_s, seed=given.seed)
        mean_rps = given.busy_workers / _work_s(sample, setting)
    requests = servegen(path, given.model, mean_rps=mean_rps, days=given.days, hour_s=hour_s, seed=given.seed)
    return f"{path.name} {given.model}, {mean_rps:.3g} requests/s", requests[: given.limit]


def _trace(given: argparse.Namespace, setting: Setting) -> tuple[str, list[TraceRequest]]:
    trace = read_trace(given.trace)
    requests = make_workload(trace, rate_scale=given.rate_scale, seed=given.seed, limit=given.limit)
    copies = given.copies
    if given.busy_workers is not None:
        span_s = max(1.0, max(request.arrival_ms for request in requests) / 1000.0)
        copies = max(1, round(given.busy_workers * span_s / (_work_s(requests, setting) * len(requests))))
    name = trace.name if copies == 1 else f"{trace.name} x {copies}"
    return name, copied(requests, copies, given.seed)


def _work_s(requests: Sequence[TraceRequest], setting: Setting) -> float:
    """Seconds of a worker that one of them takes in the mean, of both pools together."""
    calls = make_load("", requests, setting.timing, setting.goal).calls
    return sum(mean_work_ms(calls, setting)) / 1000.0 / max(1, len(calls))


def read_setting(given: argparse.Namespace) -> Setting:
    """Raises GoalError, TimingError."""
    most = Sizes(given.max_prefill, given.max_decode)
    site = Site(most=most, max_running=given.max_running, kv_tokens=512 * given.pool_blocks)
    if hasattr(given, "start"):
        if not 0.0 <= given.start_spread <= 1.0:
            raise GoalError(f"--start-spread {given.start_spread:g}: a share between 0 and 1, such as 0.2")
        least = Sizes(given.min_prefill, given.min_decode)
        if least.prefill > most.prefill or least.decode > most.decode:
            raise GoalError("the smallest pool is larger than the largest: lower --min-*, or raise --max-*")
        site = Site(
            start_ms=given.start,
            start_spread=given.start_spread,
            drain_ms=given.drain,
            switch_ms=given.switch,
            mean_life_h=given.mean_life_hours,
            least=least,
            most=most,
            budget=given.budget,
            max_running=given.max_running,
            kv_tokens=512 * given.pool_blocks,
            may_switch=not given.no_switch,
        )
    return Setting(read_timing(given.timing), read_goal(given.sla, given.target), site)


def _is_servegen(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(_SERVEGEN_HEADER)) == _SERVEGEN_HEADER
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror}") from error


def duration(word: str) -> float:
    try:
        return duration_ms(word)
    except GoalError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
