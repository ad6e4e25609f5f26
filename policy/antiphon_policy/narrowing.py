"""All workers at once, as arrays: the terms of `pricing` for each side by itself, to find the few worth pricing.

What each worker costs as P, as D, and as both, with every link at its default speed. The sums mean the same as those of
`Prices`, which a test holds them to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from antiphon_policy.pricing import BROKEN_MS, DEFAULT_LINK_GIGABYTES_PER_S, PULL_MARGIN, REMOTE_MS, Holder, Prices
from antiphon_policy.route_records import RouteRequest, WorkerRole, WorkerView

PAIRED = 4
"""So many of the best of either side are paired."""
FALLBACKS = 3
FEW = 64
"""So many are sorted whole."""

Floats = NDArray[np.float64]
Chosen = NDArray[np.bool_]
Pair = tuple[float, int, int]
"""(bound on its cost, slot of D, slot of P or -1)"""

_INFINITE = float("inf")

# Rows of the table. Those of the first part are the worker's figures, those of the second follow from them.
(
    _RUNNING,
    _EMPTY,
    _FREE,
    _KNOWN,
    _PER_TOKEN,
    _PER_CONTEXT,
    _PER_KV,
    _CHUNK,
    _QUEUE_MS,
    _STEP_MS,
    _JOIN_MS,
    _TPOT_MS,
    _LONGER_MS,
    _LOCAL_WAITING,
) = range(14)
ROWS = 14


class Narrowed(NamedTuple):
    pairs: list[Pair]
    prefillers: list[int]
    """Slots, best first."""


def narrow(
    figures: Floats,
    prefills: Chosen,
    decodes: Chosen,
    cached: Floats,
    holders: Sequence[Holder],
    prices: Prices,
    request: RouteRequest,
    start: int,
    hinted: tuple[int, int] | None,
) -> Narrowed:
    """`figures` [rows, workers]; `prefills`, `decodes` [workers]: who may; `cached` [workers]: blocks that each holds;
    `start`: from which slot on equal ones are taken; `hinted`: slots of a pair that has to be among them."""
    compute_ms = _compute_ms(figures, cached, holders, prices, request)
    decode_ms, tpot_ms = _decode_ms(figures, cached, prices)
    ttft_ms = figures[_QUEUE_MS] + compute_ms
    stored_ms = _recompute_ms(figures, prices.all_blocks - cached, prices)
    local_ms = (
        ttft_ms
        + decode_ms
        + stored_ms
        + compute_ms * (prices.stream_share * figures[_LOCAL_WAITING] + prices.followers_on_decoders)
    )
    as_prefiller_ms = (
        ttft_ms + compute_ms * prices.followers + _recompute_ms(figures, prices.prompt_blocks - cached, prices)
    )
    move_ms = (prices.prompt_blocks - cached) * _block_ms(request)
    chunk_blocks = figures[_CHUNK] / prices.block_tokens
    as_decoder_ms = decode_ms + stored_ms + np.minimum(move_ms, chunk_blocks * _block_ms(request))
    if request.ttft_limit_ms is not None:
        local_ms += BROKEN_MS * (ttft_ms > request.ttft_limit_ms)
        as_prefiller_ms += BROKEN_MS * (ttft_ms + REMOTE_MS > request.ttft_limit_ms)
    if request.tpot_limit_ms is not None:
        # `Prices.beside_prompts_ms`: of the prompts that are queued there already, and with this one.
        context_ms = figures[_PER_CONTEXT] * prices.prompt_tokens
        chunk_ms = figures[_CHUNK] * (figures[_PER_TOKEN] + context_ms) + figures[_PER_KV] * prices.prompt_tokens
        beside_ms = np.minimum(chunk_ms, figures[_QUEUE_MS] / prices.short_tokens)
        as_decoder_ms += BROKEN_MS * (tpot_ms + beside_ms > request.tpot_limit_ms)
        worst_ms = tpot_ms + np.minimum(chunk_ms, ttft_ms / prices.short_tokens) * (figures[_RUNNING] > 0)
        local_ms += BROKEN_MS * (worst_ms > request.tpot_limit_ms)

    pairs: list[Pair] = [(ms, slot, -1) for ms, slot in _best(local_ms, decodes, start, PAIRED)]
    ranked = _best(as_prefiller_ms, prefills, start, PAIRED + FALLBACKS)
    if ranked:
        decoders = _best(as_decoder_ms, decodes, start, PAIRED)
        pairs += [
            (p_ms + d_ms + REMOTE_MS, decoder, prefiller)
            for p_ms, prefiller in ranked[:PAIRED]
            for d_ms, decoder in decoders
        ]
    if hinted is not None and all(pair[1:] != hinted for pair in pairs):
        decoder, prefiller = hinted
        bound_ms = local_ms[decoder] if prefiller < 0 else as_prefiller_ms[prefiller] + as_decoder_ms[decoder]
        pairs.append((float(bound_ms), decoder, prefiller))
    pairs.sort(key=_first)
    return Narrowed(pairs, [slot for _, slot in ranked])


def figures_of(view: WorkerView) -> tuple[float, ...]:
    step = view.step
    decode_token_ms = step.per_new_token_ms + step.per_sequence_ms
    decode_context_ms = step.per_token_context_ms + step.per_kv_token_ms
    batch = view.running + 1
    chunk = min(view.queued_tokens, view.chunk_tokens)
    prefills_only = view.role is WorkerRole.PREFILL
    shared_ms = 0.0 if prefills_only else view.running * decode_token_ms + view.kv_tokens * step.per_kv_token_ms
    tpot_ms = step.base_ms + batch * decode_token_ms + view.kv_tokens * decode_context_ms
    return (
        view.running,
        view.empty_blocks,
        view.free_blocks,
        view.total_blocks > 0,
        step.per_new_token_ms,
        step.per_token_context_ms,
        step.per_kv_token_ms,
        view.chunk_tokens,
        step.prefill_ms(new_tokens=view.queued_tokens, chunk_tokens=view.chunk_tokens),
        step.base_ms + step.per_sequence_ms + shared_ms,
        tpot_ms + chunk * (step.per_new_token_ms + chunk * step.per_token_context_ms),
        tpot_ms,
        view.running * decode_token_ms,
        view.running + (view.role is WorkerRole.DECODE),
    )


def _compute_ms(
    figures: Floats, cached: Floats, holders: Sequence[Holder], prices: Prices, request: RouteRequest
) -> Floats:
    """Pull and compute, for each worker as prefiller: `StepModel.prefill_ms` over arrays."""
    own_ms = _prefill_ms(figures, cached, prices)
    if not holders:
        return own_ms
    longest = min(holders[0][1], prices.usable_blocks)
    lacking = longest - cached
    if not (lacking > 0).any():
        return own_ms
    pulled_ms = _prefill_ms(figures, np.full_like(cached, longest), prices)
    pull_ms = 0.2 + lacking * _block_ms(request)
    pays = (lacking > 0) & (pull_ms < PULL_MARGIN * (own_ms - pulled_ms))
    return np.where(pays, pulled_ms + pull_ms, own_ms)


def _prefill_ms(figures: Floats, cached: Floats, prices: Prices) -> Floats:
    chunk = figures[_CHUNK]
    cached_tokens = cached * prices.block_tokens
    new = prices.prompt_tokens - cached_tokens
    full = np.floor(new / chunk)
    rest = new - full * chunk
    some_rest = rest > 0
    contexts = full * cached_tokens + chunk * (full * (full + 1)) * 0.5
    last = prices.prompt_tokens * some_rest
    steps: Floats = full + some_rest
    total: Floats = (
        steps * figures[_STEP_MS]
        + figures[_PER_TOKEN] * new
        + figures[_PER_CONTEXT] * (chunk * contexts + rest * last)
        + figures[_PER_KV] * (contexts + last)
    )
    return total


def _decode_ms(figures: Floats, cached: Floats, prices: Prices) -> tuple[Floats, Floats]:
    """(what each worker costs as D, without what it stores and moves; tokens' predicted time)."""
    per_context = figures[_PER_CONTEXT] + figures[_PER_KV]
    own = per_context * prices.decode_context
    tpot_ms = figures[_TPOT_MS] + own
    more = prices.stream_share * max(0.0, prices.output_tokens - 2.0)
    return (
        figures[_JOIN_MS]
        + per_context * prices.prompt_tokens
        + more * tpot_ms
        + prices.stream_share * prices.output_tokens * (figures[_LONGER_MS] + figures[_RUNNING] * own)
    ), tpot_ms


def _recompute_ms(figures: Floats, stored: Floats, prices: Prices) -> Floats:
    evicted = np.maximum(0.0, stored - figures[_EMPTY]) * figures[_KNOWN]
    short = np.maximum(0.0, stored - figures[_FREE]) * figures[_KNOWN]
    block_ms: Floats = figures[_PER_TOKEN] * prices.block_tokens
    total: Floats = block_ms * (evicted * prices.evicted_reuse + short)
    return total


def _block_ms(request: RouteRequest) -> float:
    return request.block_bytes / (DEFAULT_LINK_GIGABYTES_PER_S * 1e6)


def _best(cost_ms: Floats, allowed: NDArray[np.bool_], start: int, count: int) -> list[tuple[float, int]]:
    """(cost, slot) of the cheapest allowed. Equal ones from `start` on, or all gateways would pick the first."""
    size = len(cost_ms)
    order = np.where(allowed, cost_ms, np.inf)
    order = np.concatenate((order[start:], order[:start]))
    if size > FEW:
        few = np.argpartition(order, count)[:count]
        costs = [(cost, at) for cost, at in zip(order[few].tolist(), few.tolist(), strict=True)]
    else:
        costs = [(cost, at) for at, cost in enumerate(order.tolist())]
    costs.sort()
    return [(cost, (at + start) % size) for cost, at in costs[:count] if cost != _INFINITE]


def _first(pair: Pair) -> float:
    return pair[0]
