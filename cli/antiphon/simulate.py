"""`antiphon simulate`: what would have been, on a recorded workload, without a cluster. `route` compares routings."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from antiphon_telemetry.exit import ExitCode

from antiphon.configuration import ConfigurationError

_KINDS = {"route": "policies on a trace: hit rate, latency, balance and goodput of each"}
_MISSING = (
    "`antiphon simulate` needs numpy and matplotlib, and {name} is not installed: pip install 'antiphon[simulate]'"
)


def run_simulate(arguments: Sequence[str]) -> int:
    """The command; its exit code."""
    if arguments and arguments[0] in _KINDS:
        try:
            from antiphon_simulate.command import run_route

            return run_route(arguments[1:])
        except ModuleNotFoundError as error:
            if error.name not in ("numpy", "matplotlib"):
                raise
            raise ConfigurationError(_MISSING.format(name=error.name)) from error
    kinds = "\n".join(f"  {name:<9} {about}" for name, about in _KINDS.items())
    parser = argparse.ArgumentParser(
        prog="antiphon simulate",
        usage="antiphon simulate KIND [OPTION...]",
        description="A simulated cluster that runs the gateway's own routing and index code on a recorded workload.",
        epilog=f"kinds:\n{kinds}\n\n`antiphon simulate KIND --help` shows the options of a kind.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("kind", nargs="?", help=argparse.SUPPRESS)
    if parser.parse_args(arguments).kind is None:
        parser.print_help()
        return ExitCode.OK
    raise ConfigurationError(f"there is nothing called {arguments[0]!r} to simulate: use one of {', '.join(_KINDS)}")
