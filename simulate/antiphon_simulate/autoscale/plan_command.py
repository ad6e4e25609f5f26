"""`antiphon simulate plan`: how many workers a load and a promise need, and whether pools are worth having for it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from antiphon_simulate.autoscale.command import OK, guarded
from antiphon_simulate.autoscale.options import add_load_options, duration, read_requests, read_setting
from antiphon_simulate.autoscale.plan import ScalePlan, Tried, plan
from antiphon_simulate.telling import say


def run_plan(arguments: Sequence[str]) -> int:
    """The command; its exit status."""
    return guarded(_parser(), arguments, _plan)


def _plan(given: argparse.Namespace) -> int:
    setting = read_setting(given)
    load, requests = read_requests(given, setting)
    found = plan(load, requests, setting, window_ms=given.window, say=say)
    sys.stdout.write(_json(found) if given.json else "\n".join(_words(found)) + "\n")
    sys.stdout.flush()
    return OK


def _words(found: ScalePlan) -> Iterator[str]:
    load, goal, timing = found.load, found.setting.goal, found.setting.timing
    infeasible = sum(not call.feasible for call in load.calls)
    yield f"{load.name}: {len(load.calls)} requests in {load.span_ms / 1000.0:.0f} s, {infeasible} of them infeasible"
    yield (
        f"goal: {100.0 * goal.target:g} % of the feasible ones with TTFT {goal.ttft_ms:g} ms + "
        f"{goal.ttft_ms_per_1k_uncached:g} ms per 1,000 uncached tokens and TPOT {goal.tpot_ms:g} ms"
    )
    yield f"timing {timing.name}: {timing.source or 'no source given'}"
    yield ""
    yield (
        f"all of it, sizes that never change: {found.whole.prefill} prefill + {found.whole.decode} decode workers "
        f"({100.0 * found.whole_inside:.2f} % inside)"
    )
    yield (
        f"its busiest {(found.until_ms - found.from_ms) / 1000.0:.0f} s (from {found.from_ms / 1000.0:.0f} s, "
        f"{found.requests} requests), step by step:"
    )
    yield ""
    rows = [
        ("", "workers", "prefill", "decode", "inside", "TTFT p95 ms", "TPOT p95 ms"),
        _row("pools", found.pools, both=False),
        _row("workers that do both", found.both, both=True),
    ]
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    for first, *others in rows:
        cells = [first.ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        yield "  ".join(cells)
    yield ""
    yield f"disaggregation is {'' if found.is_worth_it else 'not '}worth it here: {found.reason}"


def _row(name: str, tried: Tried | None, *, both: bool) -> tuple[str, ...]:
    if tried is None:
        return (name, "none", "-", "-", "-", "-", "-")
    return (
        name,
        str(tried.workers),
        "-" if both else str(tried.prefill),
        "-" if both else str(tried.decode),
        f"{100.0 * tried.inside:.2f} %",
        f"{tried.ttft_ms.p95:.0f}",
        f"{tried.tpot_ms.p95:.1f}",
    )


def _json(found: ScalePlan) -> str:
    document: dict[str, Any] = {
        "load": {"name": found.load.name, "requests": len(found.load.calls), "span_s": found.load.span_ms / 1000.0},
        "goal": msgspec.to_builtins(found.setting.goal),
        "timing": msgspec.to_builtins(found.setting.timing),
        "whole": {**msgspec.to_builtins(found.whole), "inside": found.whole_inside},
        "busiest": {
            "from_s": found.from_ms / 1000.0,
            "until_s": found.until_ms / 1000.0,
            "requests": found.requests,
            "prefill_need": found.prefill_need,
            "decode_need": found.decode_need,
            "pools": msgspec.to_builtins(found.pools),
            "both": msgspec.to_builtins(found.both),
        },
        "disaggregation_is_worth_it": found.is_worth_it,
        "reason": found.reason,
    }
    return msgspec.json.format(msgspec.json.encode(document), indent=1).decode() + "\n"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="antiphon simulate plan",
        description="How many prefill and decode workers a load and a promise need, and whether disaggregation is "
        "worth it here: pools against workers that do both.",
        epilog="example:\n  antiphon simulate plan --trace day.csv --sla ttft=500ms,tpot=40ms\n\n"
        "docs/simulator.md says how it is found.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_load_options(parser)
    parser.add_argument(
        "--window", type=duration, default=120_000.0, metavar="TIME", help="of the busiest minutes (default: 120s)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout instead of the table")
    return parser
