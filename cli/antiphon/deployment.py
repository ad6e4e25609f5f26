"""What `antiphon serve` is going to run: options in, processes out.

A pure function, so that what a command line means can be read and tested without starting anything. Options of
workers and of the gateway are taken by `serve` as they are and handed on through the children's environment, where
secrets are not seen by `ps`; the children get no other `ANTIPHON_*` variable.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
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
        "ray_head",
        "ray_join",
        "ray_node_ranks",
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
    """Of a worker: also its worker id."""
    command: tuple[str, ...]
    environment: Mapping[str, str]
    ready_file: Path
    """Appears when the process is ready; not for `prepare`, which is ready when it has ended."""
    role: str = ""
    """Of a worker: prefill, decode or both."""


@dataclass(frozen=True, slots=True)
class WorkerPlanner:
    """Makes the plans of workers: those of the start, and with --autoscale those that come later."""

    options: ServeOptions
    given: Mapping[str, Any]
    redis_url: str
    folder: Path
    threads: int
    inherited: Mapping[str, str]

    def plan(self, name: str, role: str) -> ProcessPlan:
        """A worker of that name; `role`: prefill, decode, or both."""
        options, ready_file = self.options, self.folder / f"{name}.json"
        record = WorkerOptions(
            **_values(
                WorkerOptions,
                {**self.given, **_shape_of(options, role)},
                model=options.model,
                worker_id=name,
                role=role,
                redis_url=self.redis_url,
                threads=self.threads,
                drain_timeout_s=options.drain_timeout_s,
                ready_file=str(ready_file),
                log_level=options.log_level,
                log_json=options.log_json,
            )
        )
        # Also on the command line, so that `ps` tells workers apart.
        words = ("worker", options.model, "--worker-id", name, "--role", role)
        return replace(_process(name, words, record, ready_file, self.inherited), role=role)


@dataclass(frozen=True, slots=True)
class Deployment:
    prepare: ProcessPlan
    workers: tuple[ProcessPlan, ...]
    gateway: ProcessPlan
    planner: WorkerPlanner
    """Of further workers."""


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
    roles = ["prefill"] * options.prefill + [options.decode_role] * options.decode
    threads = options.threads or max(1, cores // max(len(roles), options.most_workers))
    planner = WorkerPlanner(options, given, redis_url, folder, threads, inherited)
    taken: list[str] = []
    for role in roles:
        taken.append(free_name(role, taken))
    workers = tuple(planner.plan(name, role) for name, role in zip(taken, roles, strict=True))

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
    prepare = replace(
        workers[-1], name="prepare", command=_command("prepare"), ready_file=folder / "prepare.json", role=""
    )
    return Deployment(
        prepare=prepare,
        workers=workers,
        gateway=_process("gateway", ("gateway",), gateway, ready_file, inherited),
        planner=planner,
    )


def free_name(role: str, taken: Collection[str]) -> str:
    """prefill-0, decode-0, or worker-0 for one that does both, and so on: the first that is not taken."""
    stem = "worker" if role == "both" else role
    return next(name for number in itertools.count() if (name := f"{stem}-{number}") not in taken)


def _shape_of(options: ServeOptions, role: str) -> dict[str, int]:
    """The parallel sizes that workers of this role have of their own."""
    sizes = {
        "prefill": (
            options.prefill_tensor_parallel,
            options.prefill_pipeline_parallel,
            options.prefill_expert_parallel,
        ),
        "decode": (options.decode_tensor_parallel, options.decode_pipeline_parallel, options.decode_expert_parallel),
    }.get(role, (0, 0, 0))
    names = ("tensor_parallel", "pipeline_parallel", "expert_parallel")
    return {name: size for name, size in zip(names, sizes, strict=True) if size}


def _values(record: type, given: Mapping[str, Any], **decided: Any) -> dict[str, Any]:
    fields = {field.name for field in dataclasses.fields(record)}
    return {name: value for name, value in given.items() if name in fields} | decided


def _command(*words: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "antiphon", *words)


def _process(
    name: str,
    words: tuple[str, ...],
    record: WorkerOptions | GatewayOptions,
    ready_file: Path,
    inherited: Mapping[str, str],
) -> ProcessPlan:
    return ProcessPlan(
        name=name,
        command=_command(*words),
        environment={**inherited, **to_environment(record)},
        ready_file=ready_file,
    )
