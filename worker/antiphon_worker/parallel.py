"""Whether the worker's ranks can be what is asked for, as far as that can be told before anything is started."""

from __future__ import annotations

import re
from pathlib import Path

from antiphon_engine.parallel import ParallelShape, ShapeRefused
from antiphon_telemetry.exit import ExitCode

from antiphon_worker.errors import WorkerStartError
from antiphon_worker.options import WorkerOptions

_HOST_PORT = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^:\s]+):([0-9]{1,5})")


def checked_shape(options: WorkerOptions) -> ParallelShape:
    """Raises WorkerStartError."""
    try:
        shape = ParallelShape(options.tensor_parallel, options.pipeline_parallel, options.expert_parallel)
    except ShapeRefused as error:
        raise _refused(str(error)) from error
    if options.engine == "timed" and (shape.ranks > 1 or shape.expert > 1):
        raise _refused(f"the timed engine computes nothing that {shape} could share: leave the parallel sizes at 1")
    if shape.expert > 1 and shape.expert != shape.tensor:
        raise _refused(
            f"--expert-parallel {shape.expert} with --tensor-parallel {shape.tensor}: experts are spread over all "
            f"ranks of a stage or over none; set it to {shape.tensor} or to 1"
        )
    _check_ray(options, shape)
    return shape


def _check_ray(options: WorkerOptions, shape: ParallelShape) -> None:
    ways = {
        "--ray-head": options.ray_head,
        "--ray-join": bool(options.ray_join),
        "--ray-address": bool(options.ray_address),
    }
    chosen = [flag for flag, given in ways.items() if given]
    if len(chosen) > 1:
        raise _refused(f"{' and '.join(chosen)}: choose one")
    for flag, address in (("--ray-join", options.ray_join), ("--ray-address", options.ray_address)):
        if address and not _HOST_PORT.fullmatch(address):
            raise _refused(f"{flag} {address}: it has to be HOST:PORT")
    if chosen and shape.ranks == 1:
        raise _refused(
            f"{chosen[0]}: a replica of one rank needs no Ray; set --tensor-parallel or --pipeline-parallel, or leave "
            "it out"
        )
    if options.ray_token_file and not Path(options.ray_token_file).is_file():
        raise _refused(f"--ray-token-file {options.ray_token_file}: there is no such file")
    if options.ray_node_ranks < 0 or options.ray_wait_s <= 0:
        raise _refused("--ray-node-ranks may not be negative, and --ray-wait-s has to be positive")


def _refused(sentence: str) -> WorkerStartError:
    return WorkerStartError(sentence, ExitCode.BAD_INPUT)
