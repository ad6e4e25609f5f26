"""What `antiphon serve` is going to run: options in, processes out.

A pure function, so that what a command line means can be read and tested without starting anything. Options of
workers and of the gateway are taken by `serve` as they are and handed on through the children's environment, where
secrets are not seen by `ps`; the children get no other `ANTIPHON_*` variable.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from antiphon_gateway.options import GatewayOptions
from antiphon_worker.options import WorkerOptions

from antiphon.configuration import PREFIX, OptionSpec, specs, to_environment
from antiphon.options import ServeOptions

_OWN = frozenset(spec.field for spec in specs(ServeOptions))
_DECIDED_HERE = frozenset({"role", "worker", "worker_id", "status_port", "advertise_host", "ready_file"})
"""Options of workers and of the gateway that `serve` sets by itself."""
_OF_A_CLUSTER = frozenset(
    {
        "revision",
        "redis_username",
        "redis_password_file",
        "list_model",
        "tensor_parallel",
        "pipeline_parallel",
        "expert_parallel",
        "ray_head",
        "ray_join",
        "ready_without_workers",
    }
)
"""Options that an operator gives; on one machine they have nothing to say. A Redis password goes into the URL there."""


def handed_on() -> tuple[OptionSpec, ...]:
    """The options of workers and of the gateway that `serve` takes for them."""
    found = {
        spec.field: spec
        for spec in (*specs(GatewayOptions), *specs(WorkerOptions))
        if spec.field not in _OWN | _DECIDED_HERE | _OF_A_CLUSTER
    }
    return tuple(found.values())


@dataclass(frozen=True, slots=True)
class ProcessPlan:
    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    ready_file: Path
    """Appears when the process is ready; not for `prepare`, which is ready when it has ended."""


@dataclass(frozen=True, slots=True)
class Deployment:
    prepare: ProcessPlan
    workers: tuple[ProcessPlan, ...]
    gateway: ProcessPlan


def plan(
    options: ServeOptions,
    given: Mapping[str, Any],
    *,
    redis_url: str,
    folder: Path,
    cores: int,
    environment: Mapping[str, str],
) -> Deployment:
    """The processes that `options` ask for.

    `given`: values of the options in `handed_on()`. `folder`: where ready files go. `cores`: of this machine.
    `environment`: the supervisor's own.
    """
    inherited = {name: value for name, value in environment.items() if not name.startswith(PREFIX)}
    if options.prefill:
        names = [f"prefill-{n}" for n in range(options.prefill)] + [f"decode-{n}" for n in range(options.decode)]
    else:
        names = [f"worker-{n}" for n in range(options.decode)]
    threads = options.threads or max(1, cores // len(names))

    workers = []
    for name in names:
        role = name.rsplit("-", 1)[0]
        ready_file = folder / f"{name}.json"
        record = WorkerOptions(
            **_values(
                WorkerOptions,
                given,
                model=options.model,
                worker_id=name,
                role="both" if role == "worker" else role,
                redis_url=redis_url,
                threads=threads,
                drain_timeout_s=options.drain_timeout_s,
                ready_file=str(ready_file),
                log_level=options.log_level,
                log_json=options.log_json,
            )
        )
        # Also on the command line, so that `ps` tells workers apart.
        words = ("worker", options.model, "--worker-id", name, "--role", record.role)
        workers.append(_process(name, words, record, ready_file, inherited))

    ready_file = folder / "gateway.json"
    gateway = GatewayOptions(
        **_values(
            GatewayOptions,
            given,
            host=options.host,
            port=options.port,
            redis_url=redis_url,
            drain_timeout_s=options.drain_timeout_s,
            ready_file=str(ready_file),
            log_level=options.log_level,
            log_json=options.log_json,
        )
    )
    return Deployment(
        prepare=_process("prepare", ("prepare",), record, folder / "prepare.json", inherited),
        workers=tuple(workers),
        gateway=_process("gateway", ("gateway",), gateway, ready_file, inherited),
    )


def _values(record: type, given: Mapping[str, Any], **decided: Any) -> dict[str, Any]:
    fields = {field.name for field in dataclasses.fields(record)}
    return {name: value for name, value in given.items() if name in fields} | decided


def _process(
    name: str,
    words: tuple[str, ...],
    record: WorkerOptions | GatewayOptions,
    ready_file: Path,
    inherited: Mapping[str, str],
) -> ProcessPlan:
    return ProcessPlan(
        name=name,
        command=(sys.executable, "-m", "antiphon", *words),
        environment={**inherited, **to_environment(record)},
        ready_file=ready_file,
    )
