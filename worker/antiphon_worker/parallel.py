"""What this version cannot do yet: a model on more than one device. Refused at the start, before anything is loaded."""

from __future__ import annotations

from antiphon_telemetry.exit import ExitCode

from antiphon_worker.errors import WorkerStartError
from antiphon_worker.options import WorkerOptions


def check_parallelism(options: WorkerOptions) -> None:
    """Raises WorkerStartError where more than one device is asked for."""
    degrees = (
        ("--tensor-parallel", options.tensor_parallel),
        ("--pipeline-parallel", options.pipeline_parallel),
        ("--expert-parallel", options.expert_parallel),
    )
    for flag, degree in degrees:
        if degree < 1:
            raise WorkerStartError(f"{flag} {degree}: it has to be 1 or more", ExitCode.BAD_INPUT)
        if degree > 1:
            raise WorkerStartError(
                f"{flag} {degree}: a worker of this version computes on one device; set it to 1, and choose a model "
                "that one device holds",
                ExitCode.BAD_INPUT,
            )
    if options.ray_head or options.ray_join:
        flag = "--ray-head" if options.ray_head else f"--ray-join {options.ray_join}"
        raise WorkerStartError(
            f"{flag}: a replica of this version is one pod; set tensor x pipeline parallelism to 1", ExitCode.BAD_INPUT
        )
