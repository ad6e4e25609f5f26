"""The `antiphon` command: reads options, runs one of the house's processes, and ends with a telling exit code.

Each command imports what it runs when it runs: `antiphon gateway` never loads torch, and `--help` is quick.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from antiphon_telemetry import logs, tracing
from antiphon_telemetry.exit import ExitCode, leave

from antiphon.configuration import (
    ConfigurationError,
    OptionSpec,
    add_arguments,
    check_environment,
    describe,
    load,
    specs,
    values,
)

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

log = logging.getLogger("antiphon.cli")

_SUMMARY = {
    "serve": "everything on this machine: Valkey, workers and gateway as processes",
    "worker": "one worker process",
    "gateway": "one gateway process: the OpenAI-compatible endpoint",
    "operator": "the Kubernetes operator: makes Models what they say",
    "prepare": "download and convert a model, so that later starts need no network",
    "render": "print the Kubernetes objects that a Model would be made of",
    "fetch": "download a model's weights into a folder named by its commit",
    "plan": "which tensor, pipeline and expert sizes of a model fit some GPUs",
    "chat": "a conversation with a model, in the terminal",
    "explain": "why a request went where it went",
    "decisions": "why a model's pools have the sizes they have",
    "simulate": "what routing and scaling would give on a recorded workload",
    "version": "print the version",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command that `arguments` (by default the process's) name, and end the process."""
    try:
        code = run(sys.argv[1:] if arguments is None else arguments, os.environ)
    except KeyboardInterrupt:  # before the process listens to signals
        code = ExitCode.OK
    except Exception:
        log.exception("this should not have happened")
        code = ExitCode.FAILURE
    leave(code)


def run(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a command; its exit code."""
    commands: Mapping[str, Callable[[Sequence[str], Mapping[str, str]], int]] = {
        "serve": _serve,
        "worker": _worker,
        "gateway": _gateway,
        "operator": _operator,
        "prepare": _prepare,
        "render": _render,
        "fetch": _fetch,
        "simulate": _simulate,
        "plan": _plan,
        "chat": _chat,
        "explain": _explain,
        "decisions": _decisions,
        "version": _version,
    }
    try:
        if arguments and arguments[0] in commands:
            return commands[arguments[0]](arguments[1:], environment)
        return _overview(arguments)
    except (ConfigurationError, tracing.TracingError) as error:
        print(f"antiphon: {error}", file=sys.stderr)
        return ExitCode.BAD_INPUT
    except SystemExit as error:  # argparse, after it has told what is wrong or has shown its help
        return error.code if isinstance(error.code, int) else ExitCode.BAD_INPUT


def _overview(arguments: Sequence[str]) -> int:
    lines = "\n".join(f"  {name:<9} {summary}" for name, summary in _SUMMARY.items())
    parser = argparse.ArgumentParser(
        prog="antiphon",
        usage="antiphon COMMAND [OPTION...]",
        description="Serves large language models with prefill and decode in separate pools.",
        epilog=f"commands:\n{lines}\n\n`antiphon COMMAND --help` shows the options of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", nargs="?", help=argparse.SUPPRESS)
    parsed = parser.parse_args(arguments)
    if parsed.command is None:
        parser.print_help()
        return ExitCode.OK
    raise ConfigurationError(f"there is no command {parsed.command!r}: use one of {', '.join(_SUMMARY)}")


def _parse(
    command: str, arguments: Sequence[str], options: Sequence[OptionSpec], environment: Mapping[str, str]
) -> argparse.Namespace:
    """The words given for `options`. The environment is checked against the options of all commands."""
    parser = argparse.ArgumentParser(
        prog=f"antiphon {command}", description=f"{_SUMMARY[command]}.", allow_abbrev=False
    )
    add_arguments(parser, options, positional=("model",))
    parsed = parser.parse_args(arguments)
    check_environment(environment, known_options())
    return parsed


def known_options() -> tuple[OptionSpec, ...]:
    """The options of all commands."""
    from antiphon_gateway.options import GatewayOptions
    from antiphon_operator.options import OperatorOptions
    from antiphon_worker.options import WorkerOptions

    from antiphon.options import ChatOptions, DecisionsOptions, ExplainOptions, ServeOptions

    kinds = (
        ServeOptions,
        WorkerOptions,
        GatewayOptions,
        OperatorOptions,
        ChatOptions,
        ExplainOptions,
        DecisionsOptions,
    )
    return tuple(spec for kind in kinds for spec in specs(kind))


def _begin(process: str, service: str, options: DataclassInstance, *, level: str, json: bool) -> None:
    logs.configure(process, level=level, json=json)
    tracing.configure(service)
    log.info("configuration: %s", describe(options))


def _worker(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    from antiphon_worker.options import WorkerOptions

    parsed = _parse("worker", arguments, specs(WorkerOptions), environment)
    options = load(WorkerOptions, parsed, environment)
    _begin(options.worker_id or "worker", "antiphon-worker", options, level=options.log_level, json=options.log_json)

    from antiphon.fetch_errors import FetchError
    from antiphon.model_reference import for_worker

    try:
        options = for_worker(options, log.info)
    except FetchError as error:
        log.error("%s", error)
        return error.exit_code

    from antiphon_decode import DecodeService
    from antiphon_prefill import PrefillService
    from antiphon_worker import run_worker

    # Every process has both services; each refuses what is not its worker's role.
    code = run_worker(options, (PrefillService, DecodeService))
    tracing.shutdown()
    return code


def _gateway(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    from antiphon_gateway.options import GatewayOptions

    parsed = _parse("gateway", arguments, specs(GatewayOptions), environment)
    options = load(GatewayOptions, parsed, environment)
    _begin("gateway", "antiphon-gateway", options, level=options.log_level, json=options.log_json)

    from antiphon_gateway import run_gateway

    code = run_gateway(options)
    tracing.shutdown()
    return code


def _operator(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    from antiphon_operator.options import OperatorOptions

    parsed = _parse("operator", arguments, specs(OperatorOptions), environment)
    options = load(OperatorOptions, parsed, environment)
    logs.configure("operator", level=options.log_level, json=options.log_json)
    log.info("configuration: %s", describe(options))

    from antiphon_operator.runtime.main import run_operator

    return run_operator(options)


def _serve(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    from antiphon.deployment import handed_on
    from antiphon.options import ServeOptions
    from antiphon.serve import serve

    own, others = specs(ServeOptions), handed_on()
    parsed = _parse("serve", arguments, (*own, *others), environment)
    options = load(ServeOptions, parsed, environment)
    given = values(others, parsed, environment)
    logs.configure("serve", level=options.log_level, json=options.log_json)
    log.info("configuration: %s", describe(options))
    return serve(options, given)


def _prepare(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    from antiphon_worker.options import WorkerOptions

    from antiphon.prepare import prepare

    chosen = tuple(spec for spec in specs(WorkerOptions) if spec.field in ("model", "engine", "cache_dir"))
    given = values(chosen, _parse("prepare", arguments, chosen, environment), environment)
    return prepare(given["model"], given["engine"], given["cache_dir"])


def _render(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    from antiphon.render import run_render

    return run_render(arguments)


def _fetch(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    from antiphon.fetch import run_fetch

    return run_fetch(arguments)


def _chat(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    from antiphon.chat import run_chat

    return run_chat(arguments, environment, known_options())


def _explain(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    from antiphon.explain import run_explain

    return run_explain(arguments, environment, known_options())


def _decisions(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    from antiphon.decisions import run_decisions

    return run_decisions(arguments, environment, known_options())


def _simulate(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    from antiphon.simulate import run_simulate

    return run_simulate(arguments)


def _plan(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    from antiphon.plan import run_plan

    return run_plan(arguments, environment)


def _version(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    argparse.ArgumentParser(prog="antiphon version", description="Prints the version.").parse_args(arguments)
    print(f"antiphon {importlib.metadata.version('antiphon')}")
    return ExitCode.OK


if __name__ == "__main__":
    main()
