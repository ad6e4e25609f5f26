"""Paged attention, in torch operations and compiled, against plain attention over whole sequences."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from antiphon_engine.torch_engine.attention import AttentionKernel, PagedStep, paged_attention
from antiphon_engine.torch_engine.kernels.native import NativeAttention, attention_obstacle, typed_library
from antiphon_engine.torch_engine.kv_cache import KvCache, KvShape
from antiphon_engine.torch_engine.step_batch import StepBatch

LAYERS = 2
SCALE = 0.21


@dataclass(frozen=True)
class Case:
    heads: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    parts: tuple[tuple[int, int], ...]
    """(tokens already in the pool, new tokens) of each sequence."""
    window: int | None = None


CASES = {
    "decodes": Case(6, 2, 64, 16, ((0, 1), (15, 1), (16, 1), (99, 1))),
    "chunks": Case(6, 2, 64, 16, ((0, 40), (10, 3), (30, 70))),
    "mixed": Case(9, 3, 32, 64, ((200, 1), (0, 130), (63, 2), (64, 1))),
    "no groups": Case(4, 4, 32, 8, ((5, 9), (20, 1))),
    "one group": Case(12, 1, 32, 16, ((33, 1), (0, 20))),
    "wide heads": Case(4, 2, 128, 16, ((70, 1), (3, 50))),
    "blocks of one": Case(2, 1, 32, 1, ((4, 1), (0, 5))),
    "odd blocks": Case(4, 2, 32, 100, ((150, 60), (220, 1))),
    "window": Case(6, 2, 64, 16, ((0, 50), (100, 1), (90, 30)), window=20),
    "window of one": Case(4, 2, 32, 16, ((7, 1), (0, 4)), window=1),
}


def build(case: Case, dtype: torch.dtype) -> tuple[KvCache, StepBatch, list[torch.Tensor], list[torch.Tensor]]:
    """A pool that holds each sequence's past, the step, and all keys and values [tokens, kv_heads, dim] by sequence."""
    generator = torch.Generator().manual_seed(1)
    totals = [past + new for past, new in case.parts]
    needs = [-(-total // case.block_tokens) for total in totals]
    cache = KvCache(KvShape(LAYERS, case.kv_heads, case.head_dim, case.block_tokens), sum(needs) + 3, dtype)
    free = torch.randperm(sum(needs), generator=generator).tolist()
    tables = np.zeros((len(needs), max(needs)), dtype=np.int32)
    keys, values = [], []
    for index, (total, need) in enumerate(zip(totals, needs, strict=True)):
        tables[index, :need] = [free.pop() for _ in range(need)]
        keys.append(torch.randn(total, case.kv_heads, case.head_dim, generator=generator).to(dtype))
        values.append(torch.randn(total, case.kv_heads, case.head_dim, generator=generator).to(dtype))
        for token in range(case.parts[index][0]):
            block, slot = tables[index, token // case.block_tokens], token % case.block_tokens
            cache.tensor[block, :, 1, 0, slot] = keys[-1][token]
            cache.tensor[block, :, 1, 1, slot] = values[-1][token]
    new = [part[1] for part in case.parts]
    batch = StepBatch(
        tokens=np.zeros(sum(new), dtype=np.int32),
        positions=np.concatenate([np.arange(past, past + n, dtype=np.int32) for past, n in case.parts]),
        row_start=np.concatenate([[0], np.cumsum(new)]).astype(np.int32),
        start=np.array([past for past, _ in case.parts], dtype=np.int32),
        tables=tables,
        sample_rows=np.zeros(0, dtype=np.int32),
    )
    return cache, batch, keys, values


def plain_attention(
    case: Case, queries: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor]
) -> torch.Tensor:
    """In fp64, one query row at a time."""
    out, row = [], 0
    group = case.heads // case.kv_heads
    for (past, new), key, value in zip(case.parts, keys, values, strict=True):
        for token in range(new):
            end = past + token + 1
            begin = 0 if case.window is None else max(0, end - case.window)
            k = key[begin:end].double().repeat_interleave(group, dim=1)
            v = value[begin:end].double().repeat_interleave(group, dim=1)
            weights = torch.softmax(torch.einsum("hd,thd->ht", queries[row].double(), k) * SCALE, dim=-1)
            out.append(torch.einsum("ht,thd->hd", weights, v))
            row += 1
    return torch.stack(out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("compiled", [True, False], ids=["kernels", "torch"])
@pytest.mark.parametrize("name", sorted(CASES))
def test_paged_attention_equals_plain_attention(name: str, compiled: bool, dtype: torch.dtype) -> None:
    case = CASES[name]
    cache, batch, keys, values = build(case, dtype)
    kernel: AttentionKernel | None = None
    if compiled:
        library = typed_library()
        assert library is not None, "this test needs a C++ compiler"
        assert attention_obstacle(library, cache) is None
        kernel = NativeAttention(library, cache, case.heads)
    queries = torch.randn(batch.rows, case.heads, case.head_dim, generator=torch.Generator().manual_seed(2)).to(dtype)
    new_keys = torch.cat([key[past:] for (past, _), key in zip(case.parts, keys, strict=True)])
    new_values = torch.cat([value[past:] for (past, _), value in zip(case.parts, values, strict=True)])
    module = torch.nn.Module()
    module.layer_idx = 1  # type: ignore[assignment]
    out, _ = paged_attention(
        module,
        *(tensor.transpose(0, 1)[None] for tensor in (queries, new_keys, new_values)),
        None,
        kv=PagedStep(batch, cache, kernel),
        scaling=SCALE,
        sliding_window=case.window,
    )
    expected = plain_attention(case, queries, keys, values)
    assert out.shape == (1, batch.rows, case.heads, case.head_dim)
    assert out.dtype == dtype
    assert torch.allclose(out[0].double(), expected, atol=2e-5 if dtype == torch.float32 else 3e-2, rtol=1e-4)
    for index, (_, need) in enumerate(zip(case.parts, batch.tables, strict=True)):
        slots = [(need[t // case.block_tokens], t % case.block_tokens) for t in range(len(keys[index]))]
        assert all(torch.equal(cache.tensor[b, :, 1, 0, s], keys[index][t]) for t, (b, s) in enumerate(slots))
        assert all(torch.equal(cache.tensor[b, :, 1, 1, s], values[index][t]) for t, (b, s) in enumerate(slots))
    assert not cache.tensor[:, :, 0].any(), "another layer was written"
    assert not cache.tensor[-3:].any(), "a block of nobody was written"
