"""A rank's model without its weights: the same class as the whole model, with the layers of one stage.

A stage is a smaller model: its configuration names its layers only, counted from 0, so that the model's code, its
masks and the KV pool all see a model of so many layers. What other stages have (embedding, last norm, head) is taken
out, so that nothing has to be read for it. Modules keep the sizes of the whole model here; `cuts` says which part of
each parameter the rank gets.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from antiphon_kvtransfer.plane import KvPart
from transformers import AutoModelForCausalLM, PreTrainedModel

from antiphon_engine.parallel import ModelDims, ParallelShape, RankPlace, check_shape, kv_part, stage_layers


@dataclass(frozen=True, slots=True)
class Skeleton:
    model: PreTrainedModel
    """On the meta device: shapes, no storage."""
    shape: ParallelShape
    place: RankPlace
    dims: ModelDims
    """Of the whole model."""
    part: KvPart
    """Of the whole model's KV: also says which layers the stage has."""
    first: bool
    """Has the embedding."""
    last: bool
    """Has the last norm and the head."""

    @property
    def tied(self) -> bool:
        """The head is the embedding, which this stage has too."""
        return self.first and self.last and bool(self.model.config.tie_word_embeddings)


def model_dims(config: Any) -> ModelDims:
    """What of a `transformers` configuration decides over its shapes."""
    heads = int(config.num_attention_heads)
    return ModelDims(
        layers=int(config.num_hidden_layers),
        query_heads=heads,
        kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        experts=int(getattr(config, "num_experts", None) or 0),
    )


def build_skeleton(config: Any, shape: ParallelShape, rank: int) -> Skeleton:
    """Raises ShapeRefused."""
    dims = model_dims(config)
    check_shape(shape, dims)
    place = shape.place(rank)
    layers = stage_layers(shape, dims.layers, place.stage)
    first, last = place.stage == 0, place.stage == shape.pipeline - 1
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(_stage_config(config, layers))
    if not first:
        model.model.embed_tokens = torch.nn.Identity()
    if not last:
        model.model.norm = torch.nn.Identity()
        model.lm_head = torch.nn.Identity()
    return Skeleton(model.eval(), shape, place, dims, kv_part(shape, dims, rank), first, last)


def _stage_config(config: Any, layers: range) -> Any:
    """The configuration of a model of these layers alone."""
    stage = copy.deepcopy(config)
    stage.num_hidden_layers = len(layers)
    if getattr(config, "layer_types", None):
        stage.layer_types = list(config.layer_types[layers.start : layers.stop])
    if hasattr(config, "decoder_sparse_step"):  # layers with and without experts, by their number in the whole model
        every, dense = config.decoder_sparse_step, set(config.mlp_only_layers)
        stage.mlp_only_layers = [index - layers.start for index in layers if index in dense or (index + 1) % every != 0]
        stage.decoder_sparse_step = 1
    return stage
