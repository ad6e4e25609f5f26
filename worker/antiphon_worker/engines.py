"""Makes the engine that the options name. torch is imported only when it is the one."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from antiphon_engine import BlockEngine, SchedulerConfig, TimedExecutor, TimedSettings
from antiphon_engine.executor import Executor
from antiphon_engine.parallel import ParallelShape, ShapeRefused
from antiphon_policy.latency import StepModel
from antiphon_telemetry.exit import ExitCode

from antiphon_worker.errors import WorkerStartError
from antiphon_worker.options import WorkerOptions

if TYPE_CHECKING:
    from antiphon_engine.gang import GangSettings
    from antiphon_engine.torch_engine import TorchSettings

log = logging.getLogger("antiphon.worker")

TIMED_KV_BLOCKS = 4096
TIMED_CONTEXT_TOKENS = 131_072


def create_engine(options: WorkerOptions) -> BlockEngine:
    """The engine of one rank, loaded and not started. Takes as long as loading the model does.

    Raises WorkerStartError.
    """
    config = scheduler_config(options)
    executor = _timed(options) if options.engine == "timed" else _torch(options)
    return BlockEngine(executor, config)


def scheduler_config(options: WorkerOptions) -> SchedulerConfig:
    """Raises WorkerStartError."""
    try:
        return SchedulerConfig(
            max_batch_tokens=options.max_batch_tokens,
            max_sequences=options.max_sequences,
            max_waiting_tokens=options.max_waiting_tokens,
        )
    except ValueError as error:
        raise WorkerStartError(str(error), ExitCode.BAD_INPUT) from error


def step_model_prior(options: WorkerOptions) -> StepModel:
    """What is believed of a step before any was measured."""
    return timed_step_model(options) if options.engine == "timed" else StepModel()


def timed_step_model(options: WorkerOptions) -> StepModel:
    """How long the timed engine waits."""
    return StepModel(
        base_ms=options.timed_base_ms,
        per_new_token_ms=options.timed_per_new_token_ms,
        per_token_context_ms=options.timed_per_token_context_ms,
        per_sequence_ms=options.timed_per_sequence_ms,
        per_kv_token_ms=options.timed_per_kv_token_ms,
    )


def _timed(options: WorkerOptions) -> Executor:
    defaults = TimedSettings(step_ms=timed_step_model(options).step_ms, num_blocks=1)
    return TimedExecutor(
        TimedSettings(
            step_ms=defaults.step_ms,
            num_blocks=options.kv_blocks or TIMED_KV_BLOCKS,
            model=options.name or defaults.model,
            block_tokens=options.block_tokens,
            block_bytes=options.timed_block_bytes,
            max_context_tokens=options.max_context_tokens or TIMED_CONTEXT_TOKENS,
        )
    )


def gang_settings(options: WorkerOptions, shape: ParallelShape) -> GangSettings:
    """What ranks are to be started as, the model being looked at. Raises WorkerStartError."""
    from antiphon_engine.gang import GangSettings
    from antiphon_engine.gang.torch_ranks import MAKER, look_at_model
    from antiphon_engine.torch_engine import TorchEngineError

    try:
        model = look_at_model(_torch_settings(options), shape, log.info)
    except TorchEngineError as error:
        raise WorkerStartError(str(error), ExitCode(error.exit_code)) from error
    except ShapeRefused as error:
        raise WorkerStartError(str(error), ExitCode.BAD_INPUT) from error
    return GangSettings(
        shape=shape,
        maker=MAKER,
        maker_settings=model.packed,
        host=options.host,
        advertise=options.advertise_host,
        spread_stages=options.spread_stages,
        place_s=options.ray_wait_s,
    )


def _torch(options: WorkerOptions) -> Executor:
    from antiphon_engine.torch_engine import TorchEngineError, create_torch_executor

    try:
        return create_torch_executor(_torch_settings(options), log.info)
    except TorchEngineError as error:
        raise WorkerStartError(str(error), ExitCode(error.exit_code)) from error


def _torch_settings(options: WorkerOptions) -> TorchSettings:
    from antiphon_engine.torch_engine import TorchSettings

    return TorchSettings(
        model=options.model,
        name=options.name,
        dtype=options.dtype,
        kv_blocks=options.kv_blocks,
        kv_memory_gb=options.kv_memory_gb,
        block_tokens=options.block_tokens,
        max_context_tokens=options.max_context_tokens,
        threads=options.threads,
        cache_dir=options.cache_dir,
    )
