"""Which part of which tensor in the weight files makes each parameter of a rank.

`transformers` says in a plan for each architecture how its modules are cut: by output rows (`colwise`), by input
columns (`rowwise`), experts whole (`grouped_gemm`) or each in a slice (`packed_colwise`). The plans are followed here,
but for one thing: they cut key and value projections evenly, which would cut through a head where there are fewer KV
heads than ranks. These go by `kv_part`: each rank has whole heads, and ranks that lie side by side have copies.

The files name tensors as checkpoints do: layers by their number in the whole model, and each expert by itself.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import torch

from antiphon_engine.torch_engine.errors import UnsupportedModel
from antiphon_engine.torch_engine.parallel.skeleton import Skeleton

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"

_ROWS = frozenset({"colwise", "colwise_gather_output", "embedding_rowwise"})
_COLUMNS = frozenset({"rowwise"})
_WHOLE = frozenset({"replicated_with_grad_allreduce", "moe_tp_experts", "ep_dispatch_experts"})
_EXPERT_HALVES = "packed_colwise"
_WHOLE_EXPERTS = "grouped_gemm"
_KNOWN = _ROWS | _COLUMNS | _WHOLE | {_EXPERT_HALVES, _WHOLE_EXPERTS}

_LAYER = re.compile(r"^model\.layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows and columns of one tensor in the files, and where in the parameter they go."""

    source: str
    source_shape: tuple[int, ...]
    rows: range
    columns: range | None
    """None: all, or a vector."""
    into: tuple[int | slice, ...] = ()


@dataclass(frozen=True, slots=True)
class Cut:
    parameter: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    """None at all: zeros."""

    @property
    def count(self) -> int:
        """Of elements."""
        return torch.Size(self.shape).numel()


@dataclass(frozen=True, slots=True)
class _ExpertNames:
    """Of a mixture's tensors in the files."""

    block: str
    gate: str
    up: str
    down: str


_EXPERTS = {
    "mixtral": _ExpertNames("block_sparse_moe", "w1", "w3", "w2"),
    "qwen3_moe": _ExpertNames("mlp", "gate_proj", "up_proj", "down_proj"),
}


def share(size: int, part: int, parts: int) -> range:
    """Part `part` of `parts` of `size` things, as even as can be."""
    return range(size * part // parts, size * (part + 1) // parts)


def styles(skeleton: Skeleton) -> Mapping[str, str]:
    """How each module or expert parameter is cut: the model's plan, by names with `*` for a layer's number.

    Raises UnsupportedModel for a plan with other ways to cut than those known here.
    """
    model, shape = skeleton.model, skeleton.shape
    plan: dict[str, str] = dict(model.tp_plan) if shape.tensor > 1 else {}
    if shape.expert > 1:
        experts: dict[str, str] = dict(model.ep_plan)
        plan = {name: style for name, style in plan.items() if name not in experts} | experts
    unknown = sorted(set(plan.values()) - _KNOWN)
    if unknown:
        raise UnsupportedModel(
            f"{type(model).__name__} is cut over ranks in a way that is not supported ({', '.join(unknown)}): "
            "serve it on one rank"
        )
    return plan


def wildcard(name: str) -> str:
    """`model.layers.3.mlp` -> `model.layers.*.mlp`, as plans name modules."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def rank_cuts(skeleton: Skeleton, names: Collection[str] = ()) -> list[Cut]:
    """All parameters of the rank. `names`: the tensors in the files, which decide where a tied head is found.

    A head that is the embedding of the same stage is left out, unless the files have both. Raises UnsupportedModel.
    """
    plan = styles(skeleton)
    cuts = []
    for module_name, module in skeleton.model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            name = f"{module_name}.{leaf}"
            if name == HEAD and skeleton.tied and not (HEAD in names and EMBEDDING in names):
                continue
            style = plan.get(wildcard(name)) or plan.get(wildcard(module_name), "")
            if parameter.dim() == 3:
                cuts.append(_expert_cut(skeleton, name, tuple(parameter.shape), style))
            else:
                source = _source(skeleton, name, names)
                cuts.append(_matrix_cut(skeleton, name, source, tuple(parameter.shape), style))
    return cuts


def _matrix_cut(skeleton: Skeleton, name: str, source: str, shape: tuple[int, ...], style: str) -> Cut:
    """A matrix, or a vector: a norm, or the bias of a projection."""
    rows, columns = range(shape[0]), range(shape[1]) if len(shape) == 2 else None
    tensor, tensor_rank = skeleton.shape.tensor, skeleton.place.tensor_rank
    if style in _ROWS and re.search(r"\.[kv]_proj\.", name):
        rows = _head_rows(skeleton, shape[0])
    elif style in _ROWS:
        rows = share(shape[0], tensor_rank, tensor)
    elif style in _COLUMNS:
        if columns is None:
            # Sums of all ranks are added up: a bias may be in one of them only.
            return Cut(name, shape, (Piece(source, shape, rows, None),) if tensor_rank == 0 else ())
        columns = share(shape[1], tensor_rank, tensor)
    own = (len(rows),) if columns is None else (len(rows), len(columns))
    return Cut(name, own, (Piece(source, shape, rows, columns),))


def _head_rows(skeleton: Skeleton, rows: int) -> range:
    """Rows of a key or value projection."""
    head_rows = rows // skeleton.dims.kv_heads
    return range(skeleton.part.head_begin * head_rows, skeleton.part.head_end * head_rows)


def _expert_cut(skeleton: Skeleton, name: str, shape: tuple[int, ...], style: str) -> Cut:
    """All experts of a layer in one parameter: gate and up [experts, 2 x inner, hidden], down [experts, hidden, inner].

    In the files each expert's matrices stand by themselves.
    """
    model_type = skeleton.model.config.model_type
    if model_type not in _EXPERTS:
        raise UnsupportedModel(f"the experts of {model_type} cannot be read for a rank: serve it on one rank")
    files = _EXPERTS[model_type]
    part, parts = skeleton.place.tensor_rank, skeleton.shape.tensor
    gate_and_up = name.endswith(".gate_up_proj")
    hidden, inner = (shape[2], shape[1] // 2) if gate_and_up else (shape[1], shape[2])
    experts = share(shape[0], part, parts) if style == _WHOLE_EXPERTS else range(shape[0])
    own_inner = share(inner, part, parts) if style in (_EXPERT_HALVES, *_COLUMNS) else range(inner)
    block = _in_files(skeleton, name.split(".mlp.")[0])
    width = len(own_inner)

    def pieces() -> Iterator[Piece]:
        for place, expert in enumerate(experts):
            prefix = f"{block}.{files.block}.experts.{expert}"
            if gate_and_up:
                source = (inner, hidden)
                yield Piece(f"{prefix}.{files.gate}.weight", source, own_inner, None, (place, slice(0, width)))
                yield Piece(f"{prefix}.{files.up}.weight", source, own_inner, None, (place, slice(width, 2 * width)))
            else:
                yield Piece(f"{prefix}.{files.down}.weight", (hidden, inner), range(hidden), own_inner, (place,))

    own = (len(experts), 2 * width, hidden) if gate_and_up else (len(experts), hidden, width)
    return Cut(name, own, tuple(pieces()))


def _source(skeleton: Skeleton, name: str, names: Collection[str]) -> str:
    """A parameter's name in the files."""
    config = skeleton.model.config
    if config.tie_word_embeddings and name in (HEAD, EMBEDDING):
        other = EMBEDDING if name == HEAD else HEAD
        return other if name not in names and other in names else name
    if config.model_type in _EXPERTS:
        name = name.replace(".mlp.gate.", f".{_EXPERTS[config.model_type].block}.gate.")
    return _in_files(skeleton, name)


def _in_files(skeleton: Skeleton, name: str) -> str:
    """With the layer's number in the whole model."""
    return _LAYER.sub(lambda found: f"model.layers.{int(found[1]) + skeleton.part.layer_begin}.", name + ".")[:-1]
