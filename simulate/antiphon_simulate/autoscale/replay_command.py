"""`antiphon simulate replay FILE`: recorded scaling decisions, made again from their inputs.

Exit status 0: all are the same; 1: some are not, and which are told; 2: there is nothing to replay.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from antiphon_simulate.autoscale.replay import Replayed, replay

OK = 0
DIFFERENT = 1
BAD_INPUT = 2
_TOLD = 20


def run_replay(arguments: Sequence[str]) -> int:
    """The command; its exit status."""
    from antiphon_simulate.autoscale.command import guarded

    return guarded(_parser(), arguments, _replay)


def _replay(given: argparse.Namespace) -> int:
    found = replay(given.file)
    sys.stdout.write(_json(found) if given.json else _words(found))
    sys.stdout.flush()
    return DIFFERENT if found.differences else OK


def _words(found: Replayed) -> str:
    lines = [
        f"{found.decisions} decisions, {found.decisions - len(found.differences)} replay to the same result"
        + (f", {len(found.differences)} do not" if found.differences else "")
    ]
    for one in found.differences[:_TOLD]:
        lines += [f"line {one.line}: {', '.join(one.fields)}", f"  written: {one.written}", f"  decided: {one.decided}"]
    return "\n".join(lines) + "\n"


def _json(found: Replayed) -> str:
    return msgspec.json.encode(found).decode() + "\n"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="antiphon simulate replay",
        description="Makes recorded scaling decisions again from the inputs that stand with them, and compares.",
        epilog="Decisions of a live system: `antiphon decisions MODEL --json > FILE`, or `antiphon serve --autoscale "
        "--record-decisions FILE`; of a simulation: `antiphon simulate autoscale --decisions FILE`.",
        allow_abbrev=False,
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="one decision a line as JSON, plain, gzip or xz")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    return parser
