"""How many parameters a model has, and how many of them one rank of a shape holds.

Counted per matrix, from the published structure of the families. What is shared out among the `tensor` ranks of a
stage: q and o by query heads, k and v by KV heads (a head is whole, so with fewer heads than ranks several ranks hold
the same one), MLPs and experts, and embedding and head by rows of the vocabulary. Experts are shared out evenly
whether each is cut (expert 1) or they are dealt out whole (expert = tensor). What every rank of a stage holds: norms
and routers. Where a size does not divide, the rank with most counts.
"""

from __future__ import annotations

from antiphon_engine.parallel import ParallelShape, stage_layers
from antiphon_engine.planning.configuration import ModelConfig


def count_parameters(config: ModelConfig) -> int:
    """Of the whole model; tied embeddings count once."""
    return rank_parameters(config, ParallelShape(), 0)


def count_active_parameters(config: ModelConfig) -> int:
    """Of the whole model, as far as one token goes through them: of a layer's experts, those that it is sent to."""
    idle = config.experts - config.experts_per_token
    layers = sum(config.has_experts(layer) for layer in range(config.layers))
    return count_parameters(config) - layers * idle * _mlp(config, config.expert_intermediate)


def rank_parameters(config: ModelConfig, shape: ParallelShape, stage: int) -> int:
    """Of the rank of this stage that holds most."""
    layers = stage_layers(shape, config.layers, stage)
    total = sum(_layer(config, shape, layer) for layer in layers)
    first, last = stage == 0, stage == shape.pipeline - 1
    tokens = _share(config.vocab, shape.tensor) * config.hidden
    if first:
        total += tokens
    if last:
        total += config.hidden  # the norm before the head
        # A tied head is the embedding itself, where the embedding is.
        if not (config.tied_embeddings and first):
            total += tokens
    return total


def _layer(config: ModelConfig, shape: ParallelShape, layer: int) -> int:
    attention = _attention(config, shape.tensor)
    if not config.has_experts(layer):
        width = _share(config.intermediate, shape.tensor)
        return attention + _mlp(config, width) + (2 * width + config.hidden) * config.mlp_bias
    width, experts = config.expert_intermediate, config.experts
    if shape.expert > 1:
        experts = _share(experts, shape.expert)
    else:
        width = _share(width, shape.tensor)
    return attention + config.experts * config.hidden + experts * _mlp(config, width)


def _attention(config: ModelConfig, tensor: int) -> int:
    """With the two norms of the layer."""
    query_rows = _share(config.query_heads, tensor) * config.head_dim
    kv_rows = max(1, config.kv_heads // tensor) * config.head_dim
    matrices = 2 * config.hidden * (query_rows + kv_rows)
    biases = (query_rows + 2 * kv_rows) * config.qkv_bias + config.hidden * config.output_bias
    norms = 2 * config.hidden + 2 * config.head_dim * config.head_norms
    return matrices + biases + norms


def _mlp(config: ModelConfig, width: int) -> int:
    """Gate, up and down."""
    return 3 * config.hidden * width


def _share(size: int, ranks: int) -> int:
    return -(-size // ranks)
