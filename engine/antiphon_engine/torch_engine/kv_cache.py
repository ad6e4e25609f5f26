"""The KV pool's memory: one contiguous region of equal blocks, owned by the executor, never moved.

The layout is `[block][kv_head][layer][k|v][token][dim]`: a whole block is one contiguous read for a peer with the same
shape, and the part of one KV head is one contiguous read for a peer with another tensor-parallel size. Inside a step a
kernel walks one (block, head, layer) at a time, which is contiguous too.

Its pages appear when they are first written and start at zero, so that a masked position can never hold a NaN. What may
fail is the mapping itself (`MemoryError` with the size in it); the loader checks memory before.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from antiphon_engine.interface import KvMemory
from antiphon_engine.torch_engine.huge_pages import map_region


@dataclass(frozen=True, slots=True)
class KvShape:
    """What one block holds."""

    layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int

    def block_bytes(self, dtype: torch.dtype) -> int:
        return self.kv_heads * self.layers * 2 * self.block_tokens * self.head_dim * dtype.itemsize


class KvCache:
    """Memory of `num_blocks` blocks, as `tensor` [block, kv_head, layer, 2, token, dim] and as a `KvMemory` region."""

    def __init__(self, shape: KvShape, num_blocks: int, dtype: torch.dtype) -> None:
        if num_blocks < 1:
            raise ValueError(f"a KV pool needs at least one block, not {num_blocks}")
        self.shape = shape
        self.num_blocks = num_blocks
        self.dtype = dtype
        length_bytes = shape.block_bytes(dtype) * num_blocks
        self._region = map_region(length_bytes)
        self.tensor = torch.frombuffer(self._region, dtype=dtype).view(
            num_blocks, shape.kv_heads, shape.layers, 2, shape.block_tokens, shape.head_dim
        )

    @property
    def memory(self) -> KvMemory:
        return KvMemory(
            address=self.tensor.data_ptr(), block_bytes=self.shape.block_bytes(self.dtype), num_blocks=self.num_blocks
        )
