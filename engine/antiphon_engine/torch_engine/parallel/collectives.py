"""Where the ranks of a stage add up: hooks on a model's modules, by the styles of its parallel plan.

A module that is cut by input columns, or has a slice of each expert or some of the experts, computes a summand; the
sum over the stage's ranks is its output. Every rank gets the same bits, so that what is computed from them without
being cut (norms, the choice of experts) is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from antiphon_engine.torch_engine.parallel.cuts import share, wildcard
from antiphon_engine.torch_engine.parallel.groups import Groups
from antiphon_engine.torch_engine.parallel.skeleton import Skeleton

_SUMMANDS = frozenset({"rowwise", "moe_tp_experts", "ep_dispatch_experts"})


def install_collectives(skeleton: Skeleton, plan: Mapping[str, str], groups: Groups) -> None:
    """For a model whose weights are in already."""
    model, place, tensor = skeleton.model, skeleton.place, skeleton.shape.tensor
    for name, module in list(model.named_modules()):
        style = plan.get(wildcard(name), "")
        if style == "ep_dispatch_experts":
            _own_experts_only(module, place.tensor_rank, tensor)
        if style in _SUMMANDS:
            module.register_forward_hook(_sum_of(groups))
        if style == "embedding_rowwise" and skeleton.first:
            rows = share(skeleton.model.config.vocab_size, place.tensor_rank, tensor)
            model.model.embed_tokens = VocabularySlice(module.weight, rows, groups)


def _sum_of(groups: Groups) -> Any:
    def hook(module: nn.Module, arguments: object, output: torch.Tensor) -> torch.Tensor:
        return groups.all_reduce(output.contiguous())

    return hook


def _own_experts_only(experts: Any, part: int, parts: int) -> None:
    """Routes to other ranks' experts get the number after the last and no weight, which the experts' code skips."""
    own = share(experts.num_experts, part, parts)
    experts.num_experts = len(own)
    experts._is_expert_parallel = True

    def localise(
        module: nn.Module, arguments: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        hidden, chosen, weights = arguments
        elsewhere = (chosen < own.start) | (chosen >= own.stop)
        return hidden, (chosen - own.start).masked_fill(elsewhere, len(own)), weights.masked_fill(elsewhere, 0.0)

    experts.register_forward_pre_hook(localise)


class VocabularySlice(nn.Module):
    """An embedding of which each rank has the rows of some token ids; the others add zeros for these."""

    def __init__(self, weight: nn.Parameter, rows: range, groups: Groups) -> None:
        super().__init__()
        self.weight = weight
        self._rows = rows
        self._groups = groups

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens [...] -> [..., hidden]"""
        elsewhere = (tokens < self._rows.start) | (tokens >= self._rows.stop)
        found = functional.embedding((tokens - self._rows.start).masked_fill(elsewhere, 0), self.weight)
        return self._groups.all_reduce(found.masked_fill_(elsewhere[..., None], 0.0))


def gather_logits(local: torch.Tensor, vocab_size: int, ranks: int, groups: Groups) -> torch.Tensor | None:
    """[rows, own ids] of each of the stage's ranks -> [rows, vocabulary] on its first one, None on the others."""
    most = -(-vocab_size // ranks)
    parts = groups.gather_first(functional.pad(local, (0, most - local.shape[1])).contiguous())
    if parts is None:
        return None
    widths = (len(share(vocab_size, part, ranks)) for part in range(ranks))
    return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], dim=1)
