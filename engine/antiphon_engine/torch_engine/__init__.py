"""The `torch` engine: transformers' model definitions on our paged KV pool, and what it takes to start one.

Names are resolved when first used, so that `torch_engine.demo` can be had without importing torch.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from antiphon_engine.torch_engine.checkpoint import LoadedModel, load_checkpoint
    from antiphon_engine.torch_engine.demo import default_cache_dir, prepare_demo
    from antiphon_engine.torch_engine.errors import TorchEngineError
    from antiphon_engine.torch_engine.executor import TorchExecutor
    from antiphon_engine.torch_engine.factory import TorchSettings, create_torch_executor
    from antiphon_engine.torch_engine.sampler import Sampler

__all__ = [
    "LoadedModel",
    "Sampler",
    "TorchEngineError",
    "TorchExecutor",
    "TorchSettings",
    "create_torch_executor",
    "default_cache_dir",
    "load_checkpoint",
    "prepare_demo",
]

# The OpenMP runtime reads this once, when torch is loaded. By default its idle threads keep a core busy for
# milliseconds after each parallel operation, taken from the other processes that serve the same request.
_OPENMP_SPINS = "10000"
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", _OPENMP_SPINS)

_MODULES = {
    "LoadedModel": "checkpoint",
    "Sampler": "sampler",
    "TorchEngineError": "errors",
    "TorchExecutor": "executor",
    "TorchSettings": "factory",
    "create_torch_executor": "factory",
    "default_cache_dir": "demo",
    "load_checkpoint": "checkpoint",
    "prepare_demo": "demo",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
