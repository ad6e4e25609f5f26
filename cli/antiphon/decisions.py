"""`antiphon decisions MODEL`: why the pools of a model have the sizes they have, from what a live system keeps of it.

A table for people, or with `--json` one decision a line as `antiphon simulate replay` takes them. Whoever scales the
model (the operator, or `antiphon serve --autoscale`) keeps its newest decisions in Redis; this only reads.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime

from antiphon_kvtransfer import RedisAccess, RedisUrlError
from antiphon_kvtransfer.scaling_decisions import DecisionsUnavailable, read_decisions
from antiphon_policy.scaling import PoolSize, ScalingDecision
from antiphon_policy.scaling.remembered import RememberedError, decode_decision
from antiphon_telemetry.exit import ExitCode

from antiphon.configuration import ConfigurationError, OptionSpec, add_arguments, check_environment, load, specs
from antiphon.options import DecisionsOptions

_MOST_COLUMNS = 160
_LEAST_SENTENCE = 40


def run_decisions(arguments: Sequence[str], environment: Mapping[str, str], known: Iterable[OptionSpec]) -> int:
    """The command; its exit code. `known`: the options of all commands."""
    parser = argparse.ArgumentParser(
        prog="antiphon decisions",
        description="Tells the newest scaling decisions of a model, oldest first, with their reasons.",
        epilog="`antiphon decisions MODEL --json > FILE` and `antiphon simulate replay FILE` make each of them again.",
        allow_abbrev=False,
    )
    parser.add_argument("model", help="the model's name on a laptop, NAMESPACE/NAME of the Model in a cluster")
    add_arguments(parser, specs(DecisionsOptions))
    parser.add_argument("--json", action="store_true", help="one decision a line, with all that it was made from")
    given = parser.parse_args(arguments)
    check_environment(environment, known)
    options = load(DecisionsOptions, given, environment)
    if not options.redis_url:
        raise ConfigurationError(
            "say where the decisions are by --redis-url: of a cluster its Redis; `antiphon serve --autoscale` says its "
            "own when it starts"
        )
    access = RedisAccess(options.redis_url, options.redis_username, options.redis_password_file)
    try:
        access.check()
        found = asyncio.run(read_decisions(access, given.model))
    except RedisUrlError as error:
        raise ConfigurationError(f"--redis-url: {error}") from error
    except DecisionsUnavailable as error:
        print(f"antiphon: {error}", file=sys.stderr)
        return ExitCode.UNAVAILABLE
    if not found:
        print(
            f"antiphon: no decisions of {given.model!r} are kept there: is the name the model's, and does anybody "
            "scale it?",
            file=sys.stderr,
        )
        return ExitCode.FAILURE
    sys.stdout.write(b"".join(raw + b"\n" for raw in found).decode() if given.json else table(found, _columns()))
    sys.stdout.flush()
    return ExitCode.OK


def table(decisions: Iterable[bytes], columns: int) -> str:
    """When, which sizes, what was done, and why. Decisions of a version that is not known are told as such."""
    rows: list[tuple[str, str, str, str]] = []
    for raw in decisions:
        try:
            decision = decode_decision(raw)
        except RememberedError as error:
            rows.append(("", "", "", str(error)))
            continue
        rows.append((_when(decision), _sizes(decision.sizes), decision.action.value, decision.sentence))
    head = ("time", "sizes", "action", "why")
    widths = [max(len(row[at]) for row in [head, *rows]) for at in range(3)]
    room = max(_LEAST_SENTENCE, columns - sum(widths) - 6)
    lines = []
    for row in [head, *rows]:
        for number, why in enumerate(textwrap.wrap(row[3], room) or [""]):
            cells = row[:3] if number == 0 else ("", "", "")
            told = [f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True)]
            lines.append("  ".join([*told, why]).rstrip())
    return "\n".join(lines) + "\n"


def _when(decision: ScalingDecision) -> str:
    return datetime.fromtimestamp(decision.at_ms / 1e3, UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def _sizes(sizes: Iterable[PoolSize]) -> str:
    return ", ".join(
        f"{one.role.value} {one.size}" if one.size == one.before else f"{one.role.value} {one.before} -> {one.size}"
        for one in sizes
    )


def _columns() -> int:
    return min(shutil.get_terminal_size((_MOST_COLUMNS, 24)).columns, _MOST_COLUMNS)
