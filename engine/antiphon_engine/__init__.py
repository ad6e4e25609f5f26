"""Engines: the `Engine` interface, and the engine that runs any `Executor`.

Importing this package imports no torch: `antiphon_engine.torch_engine` is imported by whoever wants that engine.
"""

from antiphon_engine.core import BlockEngine
from antiphon_engine.executor import Executor, ExecutorLost, SampledToken, SampleSpec, SequenceStep
from antiphon_engine.interface import (
    BlocksChanged,
    Engine,
    EngineListener,
    EngineRequest,
    FinishReason,
    Grammar,
    GrammarKind,
    IntegrityError,
    IntegrityReport,
    KvMemory,
    Load,
    ModelInfo,
    PrefillProgress,
    RefusalReason,
    RequestKind,
    RequestOutput,
    RequestRefused,
    Reservation,
    Sampling,
    StepResult,
    StepSample,
    TokenLogprob,
)
from antiphon_engine.scheduler import SchedulerConfig
from antiphon_engine.timed import KvCorruption, TimedExecutor, TimedSettings

__all__ = [
    "BlockEngine",
    "BlocksChanged",
    "Engine",
    "EngineListener",
    "EngineRequest",
    "Executor",
    "ExecutorLost",
    "FinishReason",
    "Grammar",
    "GrammarKind",
    "IntegrityError",
    "IntegrityReport",
    "KvCorruption",
    "KvMemory",
    "Load",
    "ModelInfo",
    "PrefillProgress",
    "RefusalReason",
    "RequestKind",
    "RequestOutput",
    "RequestRefused",
    "Reservation",
    "SampleSpec",
    "SampledToken",
    "Sampling",
    "SchedulerConfig",
    "SequenceStep",
    "StepResult",
    "StepSample",
    "TimedExecutor",
    "TimedSettings",
    "TokenLogprob",
]
