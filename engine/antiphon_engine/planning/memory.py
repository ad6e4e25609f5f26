"""The memory of one rank: weights, what is kept back, and blocks of KV in the rest.

All ranks of a replica use the same block numbers, so the rank with least room decides how many blocks there are.

    blocks = min over stages of (memory - reserve - weights) // (block_tokens * KV bytes per token of the rank)
"""

from __future__ import annotations

from dataclasses import dataclass

from antiphon_engine.parallel import ParallelShape, kv_part
from antiphon_engine.planning.configuration import ModelConfig
from antiphon_engine.planning.parameters import rank_parameters

_LOGIT_BYTES = 4
_ACTIVATION_COPIES = 2
"""Input and output of an operation live side by side."""


@dataclass(frozen=True, slots=True)
class Reserve:
    """What of a device's memory is given neither to weights nor to KV. Estimates: see the fields."""

    runtime_bytes: int = 2 * 10**9
    """Context of the driver, libraries, buffers of collectives."""
    allocator_share: float = 0.05
    """Of the device's memory: what an allocator cannot give out because it lies in pieces."""
    step_tokens: int = 2048
    """Tokens of one step: their activations."""
    step_sequences: int = 256
    """Sequences of one step: their logits."""
    fixed_bytes: int | None = None
    """All of it, instead of the above."""

    def activation_bytes(self, config: ModelConfig, shape: ParallelShape, dtype_bytes: int) -> int:
        """Of the widest operation of a step, twice, and logits as float32, twice."""
        mlp = -(-config.intermediate // shape.tensor)
        if config.experts:
            mlp = max(mlp, config.experts_per_token * -(-config.expert_intermediate // shape.tensor))
        attention = (config.query_heads // shape.tensor + 2 * max(1, config.kv_heads // shape.tensor)) * config.head_dim
        width = config.hidden + max(2 * mlp, attention)
        rows = self.step_tokens * width * dtype_bytes
        return _ACTIVATION_COPIES * (rows + self.step_sequences * config.vocab * _LOGIT_BYTES)

    def of(self, config: ModelConfig, shape: ParallelShape, dtype_bytes: int, memory_bytes: int) -> int:
        if self.fixed_bytes is not None:
            return self.fixed_bytes
        return (
            self.runtime_bytes
            + round(memory_bytes * self.allocator_share)
            + self.activation_bytes(config, shape, dtype_bytes)
        )


@dataclass(frozen=True, slots=True)
class ShapeMemory:
    """Of the rank that has least room in a replica of this shape, and what the replica has by it."""

    stage: int
    """Of that rank, as all that follows but the blocks."""
    weights_bytes: int
    kv_bytes_per_token: int
    reserve_bytes: int
    free_bytes: int
    """For KV; negative: so much is lacking."""
    blocks: int
    """Of the replica."""
    tokens: int
    """Whose KV they hold."""

    @property
    def fits(self) -> bool:
        return self.blocks > 0


def shape_memory(
    config: ModelConfig,
    shape: ParallelShape,
    *,
    dtype_bytes: int,
    block_tokens: int,
    memory_bytes: int,
    reserve: Reserve,
) -> ShapeMemory:
    """`shape` has to be possible for the model (`antiphon_engine.parallel.check_shape`)."""
    kept = reserve.of(config, shape, dtype_bytes, memory_bytes)
    found: list[ShapeMemory] = []
    for stage in range(shape.pipeline):
        weights = rank_parameters(config, shape, stage) * dtype_bytes
        part = kv_part(shape, config.dims, stage * shape.tensor)
        token = 2 * part.layers * part.heads * config.head_dim * dtype_bytes
        free = memory_bytes - kept - weights
        blocks = max(0, free // (token * block_tokens))
        found.append(ShapeMemory(stage, weights, token, kept, free, blocks, blocks * block_tokens))
    return min(found, key=lambda one: (one.blocks, one.free_bytes))
