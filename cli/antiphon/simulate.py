"""`antiphon simulate`: what would have been, on a recorded workload, without a cluster. `route` compares routings,
`autoscale` scaling laws; `plan` says how many workers a load needs; `replay` makes recorded scaling decisions again.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

from antiphon_telemetry.exit import ExitCode

from antiphon.configuration import ConfigurationError

_KINDS = {
    "route": "policies on a trace: hit rate, latency, balance and goodput of each",
    "autoscale": "scaling policies on a trace or a generated load: what each keeps of a promise, and its GPU-hours",
    "plan": "how many workers a load and a promise need, and whether disaggregation is worth it here",
    "replay": "recorded scaling decisions, made again from their inputs",
}
_MISSING = (
    "`antiphon simulate` needs numpy and matplotlib, and {name} is not installed: pip install 'antiphon[simulate]'"
)


def run_simulate(arguments: Sequence[str]) -> int:
    """The command; its exit code."""
    if arguments and arguments[0] in _KINDS:
        try:
            return _command(arguments[0])(arguments[1:])
        except ModuleNotFoundError as error:
            if error.name not in ("numpy", "matplotlib"):
                raise
            raise ConfigurationError(_MISSING.format(name=error.name)) from error
    kinds = "\n".join(f"  {name:<9} {about}" for name, about in _KINDS.items())
    parser = argparse.ArgumentParser(
        prog="antiphon simulate",
        usage="antiphon simulate KIND [OPTION...]",
        description="Simulated clusters that run the product's own routing, index and scaling code on a recorded load.",
        epilog=f"kinds:\n{kinds}\n\n`antiphon simulate KIND --help` shows the options of a kind.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("kind", nargs="?", help=argparse.SUPPRESS)
    if parser.parse_args(arguments).kind is None:
        parser.print_help()
        return ExitCode.OK
    raise ConfigurationError(f"there is nothing called {arguments[0]!r} to simulate: use one of {', '.join(_KINDS)}")


def _command(kind: str) -> Callable[[Sequence[str]], int]:
    """Imported when it is wanted: each needs libraries that the others do not."""
    if kind == "autoscale":
        from antiphon_simulate.autoscale.command import run_autoscale

        return run_autoscale
    if kind == "plan":
        from antiphon_simulate.autoscale.plan_command import run_plan

        return run_plan
    if kind == "replay":
        from antiphon_simulate.autoscale.replay_command import run_replay

        return run_replay
    from antiphon_simulate.command import run_route

    return run_route
