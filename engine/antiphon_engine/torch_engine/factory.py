"""From settings to a running executor: find the model, check it, size the KV pool, load, hand over.

Everything that can be refused is refused before weights are loaded, as a TorchEngineError with an exit code.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from antiphon_engine.interface import ModelInfo
from antiphon_engine.torch_engine.checkpoint import inspect_checkpoint, load_weights
from antiphon_engine.torch_engine.checkpoint_info import CheckpointInfo
from antiphon_engine.torch_engine.demo import default_cache_dir, prepare_demo
from antiphon_engine.torch_engine.errors import BadSettings, NotEnoughMemory
from antiphon_engine.torch_engine.executor import TorchExecutor
from antiphon_engine.torch_engine.gguf_model.file import is_gguf
from antiphon_engine.torch_engine.memory_estimate import blocks_for_memory, estimate_bytes, kv_shape
from antiphon_engine.torch_engine.sampler import Sampler
from antiphon_engine.torch_engine.system_memory import available_memory_bytes

logger = logging.getLogger("antiphon.engine.torch")

DEMO = "demo"
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}

_DEFAULT_POOL_SHARE = 0.25
"""Of the memory that is available, where settings name no pool size: several workers may share the machine."""
_DEFAULT_POOL_CONTEXTS = 16
"""And never more than so many sequences of the longest context need."""


@dataclass(frozen=True, slots=True)
class TorchSettings:
    """What to serve, and how much memory it may take."""

    model: str = DEMO
    """`demo`, a Hugging Face folder with safetensors weights, or a GGUF file."""
    name: str = ""
    """What clients call the model; empty: the folder's or the file's name, or `demo`."""
    dtype: str = "bfloat16"
    """bfloat16 or float32."""
    kv_blocks: int = 0
    """Blocks of the KV pool; 0: from kv_memory_gb."""
    kv_memory_gb: float = 0.0
    """Memory of the KV pool; 0: a share of what is available."""
    block_tokens: int = 64
    max_context_tokens: int = 0
    """Longest prompt and output together; 0: what the model was made for."""
    threads: int = 0
    """Compute threads; 0: all."""
    cache_dir: str = ""
    """Where the demo model and compiled kernels are kept; empty: `default_cache_dir()`."""


def create_torch_executor(settings: TorchSettings, progress: Callable[[str], None]) -> TorchExecutor:
    """The executor, ready to run steps. Takes seconds to minutes; `progress` gets a line for each stage.

    Raises TorchEngineError; see `errors.py` for the kinds.
    """
    dtype = _checked_dtype(settings)
    cache_dir = Path(settings.cache_dir) if settings.cache_dir else default_cache_dir()
    is_demo = settings.model == DEMO
    folder = prepare_demo(cache_dir, progress) if is_demo else Path(settings.model).expanduser()
    checkpoint = inspect_checkpoint(folder)
    info = model_info(checkpoint, settings, dtype)
    available = available_memory_bytes()
    num_blocks = _pool_blocks(checkpoint, settings, dtype, info.max_context_tokens, available)
    needed = estimate_bytes(checkpoint.config, dtype, num_blocks, settings.block_tokens)
    progress(f"loading {info.model} ({info.architecture}, {settings.dtype}) from {folder}")
    model = load_weights(checkpoint, dtype, needed_bytes=needed, available_bytes=available)
    executor = TorchExecutor(
        model,
        info,
        num_blocks=num_blocks,
        block_tokens=settings.block_tokens,
        dtype=dtype,
        sampler=Sampler(info.vocab_size),
        threads=settings.threads,
        cache_dir=cache_dir,
    )
    progress(f"loaded {info.model}: {num_blocks} KV blocks of {settings.block_tokens} tokens")
    return executor


def model_info(checkpoint: CheckpointInfo, settings: TorchSettings, dtype: torch.dtype) -> ModelInfo:
    """The engine's card of a checkpoint under these settings."""
    longest = checkpoint.max_context_tokens
    if settings.max_context_tokens > longest:
        raise BadSettings(
            f"max_context_tokens is {settings.max_context_tokens} but {checkpoint.path} was made for {longest}: "
            "choose a smaller one, or 0"
        )
    default_name = DEMO if settings.model == DEMO else _name_of(checkpoint.path)
    return ModelInfo(
        model=settings.name or default_name,
        revision=checkpoint.revision,
        architecture=checkpoint.architecture,
        kv_format=f"{settings.dtype}/{settings.block_tokens}/full",
        block_tokens=settings.block_tokens,
        kv_block_bytes=kv_shape(checkpoint.config, settings.block_tokens).block_bytes(dtype),
        max_context_tokens=settings.max_context_tokens or longest,
        vocab_size=checkpoint.vocab_size,
        eos_token_ids=checkpoint.eos_token_ids,
        tokenizer_json=checkpoint.tokenizer_json,
        tokenizer_config_json=checkpoint.tokenizer_config_json,
        chat_template=checkpoint.chat_template,
        bos_token=checkpoint.bos_token,
        eos_token=checkpoint.eos_token,
        layers=checkpoint.layers,
        kv_heads=checkpoint.kv_heads,
    )


def _name_of(path: Path) -> str:
    """The folder's, or the file's without its ending."""
    return path.stem if is_gguf(path) else path.resolve().name


def torch_dtype(name: str) -> torch.dtype:
    """The dtype that settings name. Raises BadSettings."""
    if name not in _DTYPES:
        raise BadSettings(f"dtype is {name!r}: choose one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _checked_dtype(settings: TorchSettings) -> torch.dtype:
    dtype = torch_dtype(settings.dtype)
    if settings.block_tokens < 1:
        raise BadSettings(f"block_tokens is {settings.block_tokens}: it must be at least 1")
    if settings.kv_blocks < 0 or settings.kv_memory_gb < 0 or settings.max_context_tokens < 0:
        raise BadSettings("kv_blocks, kv_memory_gb and max_context_tokens may not be negative")
    return dtype


def _pool_blocks(
    checkpoint: CheckpointInfo,
    settings: TorchSettings,
    dtype: torch.dtype,
    max_context_tokens: int,
    available_bytes: int | None,
) -> int:
    if settings.kv_blocks:
        return settings.kv_blocks
    block_bytes = kv_shape(checkpoint.config, settings.block_tokens).block_bytes(dtype)
    if settings.kv_memory_gb:
        blocks = int(settings.kv_memory_gb * 1e9) // block_bytes
        if blocks < 1:
            raise BadSettings(
                f"kv_memory_gb is {settings.kv_memory_gb}, less than one block of {block_bytes} bytes: choose more"
            )
        return blocks
    context_blocks = -(-max_context_tokens // settings.block_tokens)
    most = context_blocks * _DEFAULT_POOL_CONTEXTS
    if available_bytes is None:
        return most
    fitting = blocks_for_memory(checkpoint.config, dtype, settings.block_tokens, available_bytes)
    if fitting < 1:
        raise NotEnoughMemory(
            f"{checkpoint.path} in {settings.dtype} leaves no room for a KV pool in the "
            f"{available_bytes / 1e9:.1f} GB that are available: free memory, or choose a smaller model or dtype"
        )
    return max(1, min(most, fitting, int(available_bytes * _DEFAULT_POOL_SHARE) // block_bytes))
