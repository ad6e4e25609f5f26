"""The Python face of `decoder.cpp`: packed weights, and the structures that name them to it.

`NativeDecoder` computes whole steps of the dense shapes in `decoder_obstacle`; `NativeAttention` only the attention of
any supported model. Both keep alive every tensor whose address the structures hold.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from antiphon_engine.torch_engine.huge_pages import Arena
from antiphon_engine.torch_engine.kernels.build import kernel_library
from antiphon_engine.torch_engine.kv_cache import KvCache
from antiphon_engine.torch_engine.step_batch import StepBatch

_DENSE_MODEL_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3"})


class _Pool(ctypes.Structure):
    _fields_ = (
        ("memory", ctypes.c_void_p),
        ("bf16", ctypes.c_int32),
        ("layers", ctypes.c_int32),
        ("heads", ctypes.c_int32),
        ("kv_heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("block_tokens", ctypes.c_int32),
    )


class _Batch(ctypes.Structure):
    _fields_ = (
        ("rows", ctypes.c_int32),
        ("sequences", ctypes.c_int32),
        ("table_width", ctypes.c_int32),
        ("samples", ctypes.c_int32),
        ("tokens", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("row_start", ctypes.c_void_p),
        ("start", ctypes.c_void_p),
        ("tables", ctypes.c_void_p),
        ("sample_rows", ctypes.c_void_p),
    )


class _Layer(ctypes.Structure):
    _fields_ = (
        ("input_norm", ctypes.c_void_p),
        ("post_norm", ctypes.c_void_p),
        ("q_norm", ctypes.c_void_p),
        ("k_norm", ctypes.c_void_p),
        ("qkv_bias", ctypes.c_void_p),
        ("o_bias", ctypes.c_void_p),
        ("qkv", ctypes.c_void_p),
        ("o", ctypes.c_void_p),
        ("gate_up", ctypes.c_void_p),
        ("down", ctypes.c_void_p),
        ("window", ctypes.c_int32),
    )


class _Model(ctypes.Structure):
    _fields_ = (
        ("pool", _Pool),
        ("hidden", ctypes.c_int32),
        ("intermediate", ctypes.c_int32),
        ("vocab", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("eps", ctypes.c_float),
        ("scale", ctypes.c_float),
        ("rope_scaling", ctypes.c_float),
        ("inv_freq", ctypes.c_void_p),
        ("final_norm", ctypes.c_void_p),
        ("embedding", ctypes.c_void_p),
        ("lm_head", ctypes.c_void_p),
        ("layers", ctypes.POINTER(_Layer)),
    )


@dataclass(frozen=True, slots=True)
class KernelLibrary:
    """The compiled functions, with their types."""

    panel: int
    """Columns of a packed panel on this CPU."""
    pack: Callable[..., None]
    step: Callable[..., int]
    attention: Callable[..., int]


def typed_library(folder: Path | None = None) -> KernelLibrary | None:
    """The compiled functions, built into `folder` if need be; None where that is not possible."""
    library = kernel_library(folder)
    return None if library is None else with_types(library)


def with_types(library: ctypes.CDLL) -> KernelLibrary:
    pointer, integer = ctypes.c_void_p, ctypes.c_int32
    library.antiphon_pack.argtypes = (pointer, integer, integer, integer, integer, integer, pointer)
    library.antiphon_pack.restype = None
    library.antiphon_step.argtypes = (ctypes.POINTER(_Model), ctypes.POINTER(_Batch), pointer)
    library.antiphon_attention.argtypes = (
        *(ctypes.POINTER(_Pool), ctypes.POINTER(_Batch), integer, integer, ctypes.c_float, integer),
        *(pointer, pointer, pointer, pointer),
    )
    return KernelLibrary(
        int(library.antiphon_panel()), library.antiphon_pack, library.antiphon_step, library.antiphon_attention
    )


def attention_obstacle(library: KernelLibrary, cache: KvCache) -> str | None:
    """Why the compiled attention cannot serve this pool, or None."""
    if cache.dtype not in (torch.float32, torch.bfloat16):
        return f"dtype {cache.dtype} has no kernel"
    if cache.shape.head_dim % library.panel:
        return f"head size {cache.shape.head_dim} is not a multiple of {library.panel}"
    return None


def decoder_obstacle(config: Any, model: PreTrainedModel, cache: KvCache) -> str | None:
    """Why the compiled decoder cannot run this model (where the compiled attention can), or None."""
    if config.model_type not in _DENSE_MODEL_TYPES:
        return f"{config.model_type} is not one of the dense shapes"
    if config.hidden_act not in ("silu", "swish"):
        return f"activation {config.hidden_act} has no kernel"
    if getattr(config, "mlp_bias", False):
        return "biases in the feed-forward layers have no kernel"
    if config.hidden_size % 2 or config.intermediate_size % 2:
        return "odd layer sizes have no kernel"
    if len(model.model.rotary_emb.inv_freq) * 2 != cache.shape.head_dim:
        return "partial rotary embeddings have no kernel"
    return None


def _pool(cache: KvCache, heads: int) -> _Pool:
    shape = cache.shape
    bf16 = int(cache.dtype == torch.bfloat16)
    address = cache.tensor.data_ptr()
    return _Pool(address, bf16, shape.layers, heads, shape.kv_heads, shape.head_dim, shape.block_tokens)


def _batch(batch: StepBatch) -> _Batch:
    """Valid as long as `batch` lives."""
    arrays = (batch.tokens, batch.positions, batch.row_start, batch.start, batch.tables, batch.sample_rows)
    for array in arrays:
        assert array.dtype == np.int32
        assert array.flags.c_contiguous
    width = batch.tables.shape[1]
    return _Batch(
        batch.rows, batch.sequences, width, len(batch.sample_rows), *(int(array.ctypes.data) for array in arrays)
    )


def _raise_on(status: int) -> None:
    if status:
        raise MemoryError("no memory for a step's activations: lower max_batch_tokens or the pool's size")


class NativeAttention:
    """Compiled paged attention, behind `attention.paged_attention`."""

    def __init__(self, library: KernelLibrary, cache: KvCache, heads: int) -> None:
        self._library = library
        self._cache = cache
        self._pool = _pool(cache, heads)

    def attend(
        self,
        batch: StepBatch,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float,
        sliding_window: int | None,
    ) -> torch.Tensor:
        query, key, value = (tensor.float().contiguous() for tensor in (queries, keys, values))
        out = torch.empty_like(query)
        addresses = (tensor.data_ptr() for tensor in (query, key, value, out))
        arguments = (layer, sliding_window or 0, scale, torch.get_num_threads(), *addresses)
        _raise_on(self._library.attention(ctypes.byref(self._pool), ctypes.byref(_batch(batch)), *arguments))
        return out.to(queries.dtype)


class NativeDecoder:
    """A dense model's whole stack, from token ids to logits, in one compiled call.

    Weights are copied into packed form; the model given is not needed afterwards, but for its embedding, which is
    shared. Activations are fp32 throughout, so in bf16 only weights and KV are rounded.
    """

    def __init__(self, library: KernelLibrary, model: PreTrainedModel, cache: KvCache, threads: int) -> None:
        self._library = library
        self._cache = cache
        self._kept: list[torch.Tensor] = []
        self._arena = Arena()
        self._bf16 = int(cache.dtype == torch.bfloat16)
        config, stack = model.config, model.model
        attention = stack.layers[0].self_attn
        self._layers = (_Layer * cache.shape.layers)(*(self._layer(layer) for layer in stack.layers))
        self._vocab = int(model.lm_head.weight.shape[0])
        self._model = _Model(
            pool=_pool(cache, int(config.num_attention_heads)),
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            vocab=self._vocab,
            threads=threads,
            eps=config.rms_norm_eps,
            scale=attention.scaling,
            rope_scaling=stack.rotary_emb.attention_scaling,
            inv_freq=self._vector(stack.rotary_emb.inv_freq),
            final_norm=self._vector(stack.norm.weight),
            embedding=self._keep(stack.embed_tokens.weight.detach().to(cache.dtype).contiguous()),
            lm_head=self._packed([model.lm_head.weight]),
            layers=self._layers,
        )

    def logits(self, batch: StepBatch) -> torch.Tensor:
        """Compute one step: fp32 logits [sampling rows, vocabulary]."""
        logits = torch.empty(len(batch.sample_rows), self._vocab)
        _raise_on(self._library.step(ctypes.byref(self._model), ctypes.byref(_batch(batch)), logits.data_ptr()))
        return logits

    def _layer(self, layer: Any) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        projections: list[Any] = [attention.q_proj, attention.k_proj, attention.v_proj]
        biases = [projection.bias for projection in projections]
        window = getattr(attention, "sliding_window", None)
        if attention.config.model_type == "mistral":
            window = attention.config.sliding_window
        return _Layer(
            input_norm=self._vector(layer.input_layernorm.weight),
            post_norm=self._vector(layer.post_attention_layernorm.weight),
            q_norm=self._vector(attention.q_norm.weight) if hasattr(attention, "q_norm") else None,
            k_norm=self._vector(attention.k_norm.weight) if hasattr(attention, "k_norm") else None,
            qkv_bias=None if biases[0] is None else self._vector(torch.cat(biases)),
            o_bias=None if attention.o_proj.bias is None else self._vector(attention.o_proj.bias),
            qkv=self._packed([torch.cat([projection.weight for projection in projections])]),
            o=self._packed([attention.o_proj.weight]),
            gate_up=self._packed([mlp.gate_proj.weight, mlp.up_proj.weight]),
            down=self._packed([mlp.down_proj.weight]),
            window=window or 0,
        )

    def _keep(self, tensor: torch.Tensor) -> int:
        self._kept.append(tensor)
        return tensor.data_ptr()

    def _vector(self, tensor: torch.Tensor) -> int:
        return self._keep(tensor.detach().float().contiguous())

    def _packed(self, weights: list[torch.Tensor]) -> int:
        """Panels of the weights' [columns, k], taken in turn (one of the first, one of the second, ...)."""
        columns, k = weights[0].shape
        panels = -(-columns // self._library.panel) * len(weights)
        memory = self._arena.take(panels * k * self._library.panel * self._cache.dtype.itemsize)
        packed = torch.frombuffer(memory, dtype=self._cache.dtype)
        for index, weight in enumerate(weights):
            plain = weight.detach().to(self._cache.dtype).contiguous()
            address, target = plain.data_ptr(), packed.data_ptr()
            self._library.pack(address, self._bf16, columns, k, index, len(weights), target)
        return self._keep(packed)
