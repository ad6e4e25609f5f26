"""A rank's model with its weights: built as a skeleton, filled from the slices that it needs and no others."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from antiphon_engine.parallel import ParallelShape
from antiphon_engine.torch_engine.errors import UnsupportedModel
from antiphon_engine.torch_engine.kv_cache import KvShape
from antiphon_engine.torch_engine.memory_estimate import RUNTIME_BYTES, kv_shape
from antiphon_engine.torch_engine.parallel.collectives import install_collectives
from antiphon_engine.torch_engine.parallel.cuts import EMBEDDING, HEAD, rank_cuts, styles
from antiphon_engine.torch_engine.parallel.groups import Groups
from antiphon_engine.torch_engine.parallel.skeleton import Skeleton, build_skeleton
from antiphon_engine.torch_engine.parallel.slices import Slices, open_slices

_GROUPED_ROW_BYTES = 16


def load_whole_model(path: Path, config: Any, dtype: torch.dtype) -> PreTrainedModel:
    """All of the model, in eval mode. Raises TorchEngineError."""
    return _loaded(path, build_skeleton(config, ParallelShape(), 0), dtype).model


def load_rank_model(
    path: Path, config: Any, dtype: torch.dtype, shape: ParallelShape, rank: int, groups: Groups
) -> Skeleton:
    """The skeleton with all its parameters in `dtype`, summing over the stage's ranks where it has to.

    Raises TorchEngineError, ShapeRefused.
    """
    skeleton = build_skeleton(config, shape, rank)
    plan = styles(skeleton)
    install_collectives(_loaded(path, skeleton, dtype), plan, groups)
    return skeleton


def rank_kv_shape(config: Any, skeleton: Skeleton, block_tokens: int) -> KvShape:
    """What one block of the rank's own pool holds."""
    whole, part = kv_shape(config, block_tokens), skeleton.part
    return KvShape(part.layers, part.heads, whole.head_dim, block_tokens)


def rank_estimate_bytes(
    config: Any, dtype: torch.dtype, shape: ParallelShape, rank: int, num_blocks: int, block_tokens: int
) -> int:
    """The most memory that one rank needs for loading and serving: its weights, its pool, and what runs them.

    `config`: of the whole model. A rank's weights are never held twice. Raises ShapeRefused, UnsupportedModel.
    """
    skeleton = build_skeleton(config, shape, rank)
    weights = sum(cut.count for cut in rank_cuts(skeleton)) * dtype.itemsize
    return weights + rank_kv_shape(config, skeleton, block_tokens).block_bytes(dtype) * num_blocks + RUNTIME_BYTES


def _loaded(path: Path, skeleton: Skeleton, dtype: torch.dtype) -> Skeleton:
    """With all its parameters, from a folder or a GGUF file."""
    with open_slices(path) as files:
        _fill(skeleton, files, dtype)
        if skeleton.tied:
            _tie(skeleton.model, files.names)
    _avoid_uneven_experts(skeleton.model, dtype)
    _rebuild_rotary(skeleton.model)
    _refuse_empty(skeleton.model)
    return skeleton


def _fill(skeleton: Skeleton, files: Slices, dtype: torch.dtype) -> None:
    for cut in rank_cuts(skeleton, files.names):
        values = torch.empty(cut.shape, dtype=dtype) if cut.pieces else torch.zeros(cut.shape, dtype=dtype)
        for piece in cut.pieces:
            into = values[piece.into] if piece.into else values
            files.read(piece.source, piece.source_shape, piece.rows, piece.columns, into)
        module_name, _, leaf = cut.parameter.rpartition(".")
        module = skeleton.model.get_submodule(module_name)
        module.register_parameter(leaf, nn.Parameter(values, requires_grad=False))


def _avoid_uneven_experts(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """torch multiplies all experts in one go only where rows are a multiple of 16 bytes, and a slice may not be."""
    widths = (parameter.shape[-1] for parameter in model.parameters() if parameter.dim() == 3)
    if any(width * dtype.itemsize % _GROUPED_ROW_BYTES for width in widths):
        model.set_experts_implementation("eager")


def _tie(model: PreTrainedModel, names: Collection[str]) -> None:
    """Files that have both tensors are believed: the head stays one of its own where it differs from the embedding."""
    embedding, head = model.model.embed_tokens, model.lm_head
    if not (EMBEDDING in names and HEAD in names) or torch.equal(embedding.weight, head.weight):
        head.weight = embedding.weight


def _rebuild_rotary(model: PreTrainedModel) -> None:
    """Its frequencies are computed and not loaded, so they have no values in a skeleton."""
    model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config)


def _refuse_empty(model: PreTrainedModel) -> None:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise UnsupportedModel(f"{type(model).__name__} has {name}, which is not loaded: serve it on one rank")
