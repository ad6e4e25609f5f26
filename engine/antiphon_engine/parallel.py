"""How one replica is spread over ranks: a shape, where each rank stands in it, and which part of the KV it holds.

Pure arithmetic, without torch: the worker, the ranks and `antiphon plan` ask the same questions here. A *stage* is a
run of layers; its `tensor` ranks share each of these layers, `pipeline` stages follow one another, and `expert` says
over how many of a stage's ranks the experts of a layer are spread. Ranks are numbered stage by stage.

A rank's part of the KV follows from its place: the layers of its stage, and its share of the KV heads. With fewer KV
heads than tensor ranks, a head is held by several ranks that lie side by side, each with a copy.
"""

from __future__ import annotations

from dataclasses import dataclass

from antiphon_kvtransfer.plane import KvPart


class ShapeRefused(ValueError):
    """The model cannot be spread like that. The message says why, and which sizes can be had."""


@dataclass(frozen=True, slots=True)
class ModelDims:
    """What of a model's configuration decides over its shapes."""

    layers: int
    query_heads: int
    kv_heads: int
    experts: int = 0
    """Of one layer; 0: a dense model."""


@dataclass(frozen=True, slots=True)
class RankPlace:
    rank: int
    stage: int
    tensor_rank: int
    """Within its stage."""


@dataclass(frozen=True, slots=True)
class ParallelShape:
    """Sizes as in the Model resource: `expert` re-uses the ranks of a stage and adds none."""

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1

    def __post_init__(self) -> None:
        for name, size in (("tensor", self.tensor), ("pipeline", self.pipeline), ("expert", self.expert)):
            if size < 1:
                raise ShapeRefused(f"{name} parallel size {size}: it has to be 1 or more")

    @property
    def ranks(self) -> int:
        return self.tensor * self.pipeline

    def place(self, rank: int) -> RankPlace:
        if not 0 <= rank < self.ranks:
            raise ValueError(f"rank {rank} of {self.ranks}")
        return RankPlace(rank, rank // self.tensor, rank % self.tensor)

    @property
    def sampling_rank(self) -> int:
        """The rank that has the logits and chooses the tokens: the first of the last stage."""
        return (self.pipeline - 1) * self.tensor

    def __str__(self) -> str:
        named = (("tensor", self.tensor), ("pipeline", self.pipeline), ("expert", self.expert))
        return " x ".join(f"{name} {size}" for name, size in named if size > 1) or "one rank"


def check_shape(shape: ParallelShape, dims: ModelDims) -> None:
    """Raises ShapeRefused where the model cannot be spread like that."""
    tensor, pipeline, expert = shape.tensor, shape.pipeline, shape.expert
    if dims.query_heads % tensor:
        fitting = ", ".join(str(size) for size in tensor_sizes(dims))
        raise ShapeRefused(
            f"tensor parallel size {tensor} does not divide the model's {dims.query_heads} query heads: "
            f"choose one of {fitting}"
        )
    if tensor not in tensor_sizes(dims):
        fitting = ", ".join(str(size) for size in tensor_sizes(dims))
        raise ShapeRefused(
            f"tensor parallel size {tensor} fits the model's {dims.kv_heads} KV heads neither way (it has to divide "
            f"their number or be a multiple of it): choose one of {fitting}"
        )
    if pipeline > dims.layers:
        raise ShapeRefused(f"pipeline parallel size {pipeline} is more than the model's {dims.layers} layers")
    if expert == 1:
        return
    if not dims.experts:
        raise ShapeRefused(f"expert parallel size {expert}: the model has no experts; leave it at 1")
    if expert != tensor:
        raise ShapeRefused(
            f"expert parallel size {expert} with tensor parallel size {tensor}: experts are spread over all ranks of a "
            f"stage or over none; set expert to {tensor} or to 1"
        )
    if dims.experts % expert:
        raise ShapeRefused(f"expert parallel size {expert} does not divide the model's {dims.experts} experts")


def tensor_sizes(dims: ModelDims) -> list[int]:
    """All sizes that divide the query heads and split the KV heads evenly, or copy each of them equally often."""
    return [
        size
        for size in range(1, dims.query_heads + 1)
        if dims.query_heads % size == 0 and (dims.kv_heads % size == 0 or size % dims.kv_heads == 0)
    ]


def stage_layers(shape: ParallelShape, layers: int, stage: int) -> range:
    """The layers of a stage, as even as can be; the first stages have one more where it does not come out even."""
    each, more = divmod(layers, shape.pipeline)
    begin = stage * each + min(stage, more)
    return range(begin, begin + each + (stage < more))


def kv_part(shape: ParallelShape, dims: ModelDims, rank: int) -> KvPart:
    """What of the model's KV this rank's pool holds."""
    place = shape.place(rank)
    layers = stage_layers(shape, dims.layers, place.stage)
    if dims.kv_heads >= shape.tensor:
        heads = dims.kv_heads // shape.tensor
        first = place.tensor_rank * heads
    else:
        heads = 1
        first = place.tensor_rank * dims.kv_heads // shape.tensor
    return KvPart(layers.start, layers.stop, first, first + heads)
