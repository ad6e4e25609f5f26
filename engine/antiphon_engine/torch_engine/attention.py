"""Paged attention as one of `transformers`' attention functions.

Model definitions come from `transformers`; they call the attention function that is registered under the name in
their configuration and hand keyword arguments through to it. Ours is called `antiphon_paged`: it gets packed tokens
`[1, heads, tokens, dim]` and a `PagedStep` as `kv=`, writes the new keys and values into the pool and attends to the
sequences' blocks. So chunked prefill, decode and prefix reuse are one call, and model code stays untouched.

This is the path in torch operations, for every architecture and machine; `kernels` holds the fast one. Query heads
that share a KV head are folded into the query axis, which spares the repeated copy of keys and values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn import functional
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from antiphon_engine.torch_engine.kv_cache import KvCache
from antiphon_engine.torch_engine.step_batch import StepBatch

ATTENTION_NAME = "antiphon_paged"

SUPPORTED_MODEL_TYPES = frozenset({"llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe"})
"""What has been shown to give the same tokens as `generate` (tests/torch_engine/test_executor.py)."""

_STATIC_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})
"""Rotary scalings whose frequencies do not depend on the longest sequence of a batch."""


def unsupported_reason(config: Any) -> str | None:
    """Why a model with this `transformers` configuration cannot run here, or None."""
    model_type = getattr(config, "model_type", None)
    if model_type not in SUPPORTED_MODEL_TYPES:
        known = ", ".join(sorted(SUPPORTED_MODEL_TYPES))
        return f"architecture {model_type!r} is not supported (supported: {known})"
    rope = getattr(config, "rope_parameters", None) or {}
    rope_type = rope.get("rope_type", "default")
    if rope_type not in _STATIC_ROPE_TYPES:
        return (
            f"rotary scaling {rope_type!r} changes with the sequence's length, which a paged KV cache cannot follow "
            f"(supported: {', '.join(sorted(_STATIC_ROPE_TYPES))})"
        )
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        return f"layers of kind {', '.join(sorted(kinds))} are not supported"
    return None


class AttentionKernel(Protocol):
    """A compiled replacement of this module's torch operations (`kernels.native`)."""

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
        """Write keys and values [rows, kv_heads, dim] to the pool; attend for queries [rows, heads, dim].

        Returns what the queries attended to, in their shape and dtype.
        """
        ...


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """All sequences with one new token: attended to in one call."""

    rows: torch.Tensor
    """[sequences] row of each."""
    tables: torch.Tensor
    """[sequences, blocks]"""
    positions: torch.Tensor
    """[sequences]"""


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A sequence with several new tokens."""

    first_row: int
    rows: int
    start: int
    blocks: torch.Tensor


class PagedStep:
    """One step as attention sees it: where each row's KV goes and what it attends to. Built once for all layers."""

    def __init__(self, batch: StepBatch, cache: KvCache, kernel: AttentionKernel | None) -> None:
        self.batch = batch
        self.cache = cache
        self.kernel = kernel
        self.chunks: list[_Chunk] = []
        self.decodes: _DecodeGroup | None = None
        if kernel is None:
            self._prepare_torch()

    def _prepare_torch(self) -> None:
        batch, block_tokens = self.batch, self.cache.shape.block_tokens
        tables = torch.from_numpy(batch.tables).long()
        positions = torch.from_numpy(batch.positions).long()
        row_start = batch.row_start.tolist()
        lengths = torch.from_numpy(batch.row_start).long().diff()
        sequence_of_row = torch.repeat_interleave(torch.arange(batch.sequences), lengths)
        self.row_blocks = tables[sequence_of_row, positions // block_tokens]
        self.row_slots = positions % block_tokens
        single: list[int] = []
        for index in range(batch.sequences):
            rows = row_start[index + 1] - row_start[index]
            if rows == 1:
                single.append(index)
                continue
            start = int(batch.start[index])
            blocks = tables[index, : -(-(start + rows) // block_tokens)]
            self.chunks.append(_Chunk(row_start[index], rows, start, blocks))
        if single:
            chosen = torch.tensor(single)
            rows_of = torch.from_numpy(batch.row_start).long()[chosen]
            most = int(positions[rows_of].max()) // block_tokens + 1
            self.decodes = _DecodeGroup(rows_of, tables[chosen, :most], positions[rows_of])


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    kv: PagedStep,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Attend for one layer: query `[1, heads, rows, dim]`, key and value `[1, kv_heads, rows, dim]`.

    Returns `[1, rows, heads, dim]`. `sliding_window`: a token sees itself and the `sliding_window - 1` before it.
    """
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    scale = scaling if scaling is not None else 1.0 / math.sqrt(query.shape[-1])
    queries, keys, values = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    if kv.kernel is not None:
        return kv.kernel.attend(kv.batch, layer, queries, keys, values, scale, sliding_window)[None], None
    pool = kv.cache.tensor
    heads = torch.arange(keys.shape[1])
    index = (kv.row_blocks[:, None], heads[None, :], layer)
    pool[(*index, 0, kv.row_slots[:, None])] = keys
    pool[(*index, 1, kv.row_slots[:, None])] = values
    out = torch.empty_like(queries, memory_format=torch.contiguous_format)
    if kv.decodes is not None:
        group = kv.decodes
        out[group.rows] = _attend(
            queries[group.rows][:, None], pool, layer, group.tables, group.positions[:, None], scale, sliding_window
        )[:, 0]
    for chunk in kv.chunks:
        span = slice(chunk.first_row, chunk.first_row + chunk.rows)
        positions = torch.arange(chunk.start, chunk.start + chunk.rows)
        out[span] = _attend(
            queries[span][None], pool, layer, chunk.blocks[None], positions[None], scale, sliding_window
        )[0]
    return out[None], None


def _attend(
    queries: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    tables: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    sliding_window: int | None,
) -> torch.Tensor:
    """Attention of queries [sequences, tokens, heads, dim], in their shape.

    tables [sequences, blocks], positions [sequences, tokens].
    """
    sequences, tokens, heads, dim = queries.shape
    kv_heads = pool.shape[1]
    group = heads // kv_heads
    # [sequences, blocks, kv_heads, k|v, block tokens, dim] -> [k|v, sequences, kv_heads, context, dim]
    gathered = pool[tables, :, layer].permute(3, 0, 2, 1, 4, 5).reshape(2, sequences, kv_heads, -1, dim)
    columns = torch.arange(gathered.shape[3])
    seen = columns <= positions[..., None]
    if sliding_window is not None:
        seen &= columns > positions[..., None] - sliding_window
    folded = queries.view(sequences, tokens, kv_heads, group, dim).permute(0, 2, 3, 1, 4)
    folded = folded.reshape(sequences, kv_heads, group * tokens, dim)
    mask = seen[:, None, None].expand(sequences, 1, group, tokens, -1).reshape(sequences, 1, group * tokens, -1)
    attended = functional.scaled_dot_product_attention(folded, gathered[0], gathered[1], attn_mask=mask, scale=scale)
    unfolded = attended.view(sequences, kv_heads, group, tokens, dim).permute(0, 3, 1, 2, 4)
    return unfolded.reshape(sequences, tokens, heads, dim)


def _no_mask(*_: object, **__: object) -> None:
    """`transformers` builds no mask: causality and sequence borders are the attention function's own matter."""


AttentionInterface.register(ATTENTION_NAME, paged_attention)
AttentionMaskInterface.register(ATTENTION_NAME, _no_mask)
