"""Makes the engine that the options name. torch is imported only when it is the one."""

from __future__ import annotations

import logging

from antiphon_engine import BlockEngine, SchedulerConfig, TimedExecutor, TimedSettings
from antiphon_engine.executor import Executor
from antiphon_policy.latency import StepModel
from antiphon_telemetry.exit import ExitCode

from antiphon_worker.errors import WorkerStartError
from antiphon_worker.options import WorkerOptions

log = logging.getLogger("antiphon.worker")

TIMED_KV_BLOCKS = 4096
TIMED_CONTEXT_TOKENS = 131_072


def create_engine(options: WorkerOptions) -> BlockEngine:
    """The engine, loaded and not started. Takes as long as loading the model does. Raises WorkerStartError."""
    try:
        config = SchedulerConfig(
            max_batch_tokens=options.max_batch_tokens,
            max_sequences=options.max_sequences,
            max_waiting_tokens=options.max_waiting_tokens,
        )
    except ValueError as error:
        raise WorkerStartError(str(error), ExitCode.BAD_INPUT) from error
    executor = _timed(options) if options.engine == "timed" else _torch(options)
    return BlockEngine(executor, config)


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


def _torch(options: WorkerOptions) -> Executor:
    from antiphon_engine.torch_engine import TorchEngineError, TorchSettings, create_torch_executor

    settings = TorchSettings(
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
    try:
        return create_torch_executor(settings, log.info)
    except TorchEngineError as error:
        raise WorkerStartError(str(error), ExitCode(error.exit_code)) from error
