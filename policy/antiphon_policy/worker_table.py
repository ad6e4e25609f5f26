"""The workers of one group as arrays, so that choosing among a thousand costs about what choosing among ten does.

A decision has two parts. *Narrow*: the terms of `pricing` are computed for all workers at once, each side by itself
(what a worker costs as P; as D; as both), with links at their default speed. *Price*: pairs of the best few of either
side are priced exactly, cheapest bound first, until no other can win. The caller keeps the table true: `put` whenever
a worker's figures changed or something was routed to it, `remove` when it left.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from antiphon_policy.pricing import DEFAULT_LINK_GIGABYTES_PER_S, PREFIX_PEERS, PULL_MARGIN, REMOTE_MS, Holder, Prices
from antiphon_policy.route_records import (
    NoWorker,
    NoWorkerReason,
    RouteDecision,
    RouteOption,
    RouteReason,
    RouteRequest,
    RoutingSnapshot,
    WorkerRole,
    WorkerView,
    Workload,
)

NEAR_TIE = 0.03
"""Pairs within this share of the cheapest one's time to first token are as good: the models are not more exact."""
NEAR_TIE_MS = 0.5
FEW = 64
"""So many are sorted whole."""
PAIRED = 4
"""So many of the best of either side are paired."""
MOST_PRICED = 8
"""Pairs, where many are about equal: more would not find a better one."""
FALLBACKS = 3
ALTERNATIVES = 4

_INFINITE = float("inf")
_BROKEN_MS = 1e9
"""Added where a promise would be broken: such workers come after all others."""

Floats = NDArray[np.float64]
_Ranked = tuple[float, int, RouteOption]
"""(cost, more where a promise is broken; a number that tells equal ones apart; the option)"""

# Rows of the table. Those of the first part are the worker's figures, those of the second follow from them.
(
    _QUEUED,
    _RUNNING,
    _KV,
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
    _PREFILLS,
    _DECODES,
) = range(18)
_ROWS = 18


class WorkerTable:
    """See the module. Used from one thread."""

    def __init__(
        self, link_gigabytes_per_s: Mapping[tuple[str, str], float] | None = None, workload: Workload | None = None
    ) -> None:
        self.links: Mapping[tuple[str, str], float] = link_gigabytes_per_s or {}
        self.workload = workload or Workload()
        self._views: list[WorkerView] = []
        self._slots: dict[str, int] = {}
        self._figures: Floats = np.zeros((_ROWS, 16))
        self._draining = 0

    def __len__(self) -> int:
        return len(self._views)

    def __contains__(self, worker_id: object) -> bool:
        return worker_id in self._slots

    def view(self, worker_id: str) -> WorkerView:
        return self._views[self._slots[worker_id]]

    def views(self) -> Sequence[WorkerView]:
        return tuple(self._views)

    def snapshot(self, leading: Mapping[str, int], only: Collection[str] | None = None) -> RoutingSnapshot:
        """For a replay: what a decision was made from; of `only` these workers if given."""
        views = (view for view in self._views if only is None or view.worker_id in only)
        told = tuple(replace(view, leading_blocks=leading.get(view.worker_id, 0)) for view in views)
        names = {view.worker_id for view in told}
        links = {pair: speed for pair, speed in self.links.items() if pair[0] in names and pair[1] in names}
        return RoutingSnapshot(told, links, self.workload)

    # -- changes

    def put(self, view: WorkerView) -> None:
        """A new worker, or what is known of it now. Its `leading_blocks` say nothing here."""
        slot = self._slots.get(view.worker_id)
        if slot is None:
            slot = self._slots[view.worker_id] = len(self._views)
            self._views.append(view)
            if slot == self._figures.shape[1]:
                self._figures = np.concatenate((self._figures, np.zeros_like(self._figures)), axis=1)
        else:
            self._draining -= self._views[slot].draining
            self._views[slot] = view
        self._draining += view.draining
        self._figures[:, slot] = _figures_of(view)

    def remove(self, worker_id: str) -> None:
        """Unknown ones are ignored."""
        slot = self._slots.pop(worker_id, None)
        if slot is None:
            return
        self._draining -= self._views[slot].draining
        last = self._views.pop()
        if last.worker_id != worker_id:
            self._views[slot] = last
            self._slots[last.worker_id] = slot
            self._figures[:, slot] = self._figures[:, len(self._views)]

    # -- the decision

    def choose(
        self, request: RouteRequest, leading: Mapping[str, int], tie_break: float, excluded: Collection[str] = ()
    ) -> RouteDecision:
        """Where the request goes. `leading`: worker id -> leading blocks of its chain; others hold none.

        `tie_break` in [0, 1) is the only randomness. `excluded` get no part in it. Raises NoWorker.

        Worked example, default step model, 1,000 prompt tokens, 64-token blocks of 1 MB, 16 output tokens, one idle
        decode worker D, one idle prefill worker P, link of 1 GB/s, nothing cached:
        on P: hop 0.5 + compute 504.4 (two chunks) is the time to first token; the last chunk's 8 blocks are moved in
        8.2, D's step with it takes 2.7 and 14 more take 37.8: 553.5 ms. On D itself: compute 504.4, the same 40.5,
        and a decode worker counts one request more than it runs as delayed: another 504.4. So P.
        """
        count = len(self._views)
        figures = self._figures[:, :count]
        prefills, decodes = figures[_PREFILLS] > 0, figures[_DECODES] > 0
        if excluded:
            for worker_id in excluded:
                slot = self._slots.get(worker_id)
                if slot is not None:
                    prefills[slot] = decodes[slot] = False
        if not decodes.any():
            raise self._nobody()
        some_prefill = bool(prefills.any())

        holders = self._holders(leading, excluded)
        queued = figures[_QUEUED]
        followers = self._followers(queued[prefills], self.workload.waiting_tokens)
        followers_on_decoders = self._followers(queued[decodes], 0.0 if some_prefill else self.workload.waiting_tokens)
        prices = Prices(request, self.workload, self.links, holders, followers, followers_on_decoders)
        cached = np.zeros(count)
        for worker_id, blocks in leading.items():
            slot = self._slots.get(worker_id)
            if slot is not None:
                cached[slot] = blocks
        np.minimum(cached, prices.usable_blocks, out=cached)

        # From other digits than those that pick among near ties.
        start = int(tie_break * 7919.0 % 1.0 * count)
        compute_ms = _compute_ms(figures, cached, holders, prices, request)
        decode_ms, tpot_ms = _decode_ms(figures, cached, prices)
        ttft_ms = figures[_QUEUE_MS] + compute_ms
        tpot_broken = None
        if request.tpot_limit_ms is not None:
            # `Prices.beside_prompts_ms`: of the prompts that are queued there already, and with this one.
            context_ms = figures[_PER_CONTEXT] * prices.prompt_tokens
            chunk_ms = figures[_CHUNK] * (figures[_PER_TOKEN] + context_ms) + figures[_PER_KV] * prices.prompt_tokens
            beside_ms = np.minimum(chunk_ms, figures[_QUEUE_MS] / prices.short_tokens)
            tpot_broken = tpot_ms + beside_ms > request.tpot_limit_ms

        pairs: list[tuple[float, int, int]] = []
        """(bound on its cost, slot of D, slot of P or -1)"""
        local_ms = (
            ttft_ms
            + decode_ms
            + compute_ms * (prices.stream_share * figures[_LOCAL_WAITING] + followers_on_decoders)
            + _recompute_ms(figures, prices.all_blocks - cached, prices)
        )
        if tpot_broken is not None:
            worst = tpot_ms + np.minimum(chunk_ms, ttft_ms / prices.short_tokens) * (figures[_RUNNING] > 0)
            local_ms += _BROKEN_MS * (worst > request.tpot_limit_ms)
        if request.ttft_limit_ms is not None:
            local_ms += _BROKEN_MS * (ttft_ms > request.ttft_limit_ms)
        pairs += [(ms, slot, -1) for ms, slot in _best(local_ms, decodes, start, PAIRED)]

        ranked: list[tuple[float, int]] = []
        if some_prefill:
            as_prefiller_ms = (
                ttft_ms + compute_ms * followers + _recompute_ms(figures, prices.prompt_blocks - cached, prices)
            )
            if request.ttft_limit_ms is not None:
                as_prefiller_ms += _BROKEN_MS * (ttft_ms + REMOTE_MS > request.ttft_limit_ms)
            move_ms = (prices.prompt_blocks - cached) * request.block_bytes / (DEFAULT_LINK_GIGABYTES_PER_S * 1e6)
            as_decoder_ms = (
                decode_ms
                + np.minimum(move_ms, figures[_CHUNK] / prices.block_tokens * _block_ms(request))
                + _recompute_ms(figures, prices.all_blocks - cached, prices)
            )
            if tpot_broken is not None:
                as_decoder_ms += _BROKEN_MS * tpot_broken
            ranked = _best(as_prefiller_ms, prefills, start, PAIRED + FALLBACKS)
            decoders = _best(as_decoder_ms, decodes, start, PAIRED)
            pairs += [
                (p_ms + d_ms + REMOTE_MS, decoder, prefiller)
                for p_ms, prefiller in ranked[:PAIRED]
                for d_ms, decoder in decoders
            ]

        if request.hint is not None:
            hinted = self._hinted(request.hint, prefills, decodes)
            if hinted is not None and all(pair[1:] != hinted for pair in pairs):
                decoder, prefiller = hinted
                bound_ms = local_ms[decoder] if prefiller < 0 else as_prefiller_ms[prefiller] + as_decoder_ms[decoder]
                pairs.append((float(bound_ms), decoder, prefiller))

        options = self._priced(pairs, prices, leading)
        chosen = _pick(options, request.hint, tie_break, self._load)
        decoder_id, prefiller_id = chosen.decode, chosen.prefill or chosen.decode
        remote = chosen.prefill is not None
        if remote:
            reason = RouteReason.PREFILL_REMOTE
        else:
            reason = RouteReason.LOCAL_CHEAPER if some_prefill else RouteReason.LOCAL_NO_PREFILL_WORKER
        decoder_held = leading.get(decoder_id, 0)
        peers = prices.peers(
            self.view(prefiller_id),
            leading.get(prefiller_id, 0),
            (self.view(decoder_id), decoder_held) if remote else None,
        )
        fallbacks = [self._views[slot].worker_id for _, slot in ranked]
        others = [option for _, _, option in options[: ALTERNATIVES + 1] if option is not chosen]
        return RouteDecision(
            decode=decoder_id,
            prefill=chosen.prefill,
            prefill_fallbacks=tuple(name for name in fallbacks if name != prefiller_id)[:FALLBACKS] if remote else (),
            prefix_peers=tuple((holder.worker_id, blocks) for holder, blocks, _ in peers),
            predicted_ttft_ms=chosen.cost.ttft_ms,
            reason=reason,
            alternatives=tuple(others[:ALTERNATIVES]),
            cost=chosen.cost,
            predicted_tpot_ms=chosen.tpot_ms,
            keeps_sla=chosen.keeps_sla,
            prefill_blocks=prices.cached(leading.get(prefiller_id, 0)),
            decode_blocks=prices.cached(decoder_held),
            usable_blocks=prices.usable_blocks,
        )

    # -- inside

    def _nobody(self) -> NoWorker:
        count = len(self._views)
        if not count:
            return NoWorker(NoWorkerReason.NO_WORKERS, "no worker serves this model: start one")
        if self._draining == count:
            return NoWorker(NoWorkerReason.ALL_DRAINING, f"all {count} workers are draining: start another one")
        live = count - self._draining
        return NoWorker(
            NoWorkerReason.NO_DECODE_WORKER,
            f"none of {live} live workers decodes: start a worker with role decode or both",
        )

    def _hinted(
        self, hint: tuple[str, str], prefills: NDArray[np.bool_], decodes: NDArray[np.bool_]
    ) -> tuple[int, int] | None:
        """Slots of the session's last pair; None if that may not be chosen now."""
        decoder = self._slots.get(hint[0])
        if decoder is None or not decodes[decoder]:
            return None
        if not hint[1]:
            return decoder, -1
        prefiller = self._slots.get(hint[1])
        return None if prefiller is None or not prefills[prefiller] else (decoder, prefiller)

    def _holders(self, leading: Mapping[str, int], excluded: Collection[str]) -> list[Holder]:
        """Those who hold most, as far as they may be read from."""
        best = heapq.nlargest(PREFIX_PEERS + 1 + len(excluded), leading.items(), key=_blocks_of)
        return [
            (view, blocks)
            for worker_id, blocks in best
            if worker_id not in excluded
            and (slot := self._slots.get(worker_id)) is not None
            and not (view := self._views[slot]).draining
        ]

    def _followers(self, queued: Floats, waiting_tokens: float) -> float:
        """Requests that will wait for one that is queued now: as many as wait at the least loaded of those that may
        compute prompts. Later ones join where the least is ahead, so that is the level they meet everywhere; and in a
        steady state as many come while one waits as wait when it comes."""
        if not len(queued):
            return 0.0
        workload = self.workload
        return (float(queued.min()) + waiting_tokens) / max(1.0, workload.uncached_tokens)

    def _priced(self, pairs: list[tuple[float, int, int]], prices: Prices, leading: Mapping[str, int]) -> list[_Ranked]:
        """Exact prices, the cheapest first. Pairs are priced by rising bound, and the bounds leave out little, so those
        far above the best are not priced at all."""
        pairs.sort(key=_first)
        views = self._views
        options: list[_Ranked] = []
        best_ms = float("inf")
        for bound_ms, decoder, prefiller in pairs:
            if len(options) > ALTERNATIVES and (bound_ms > best_ms or len(options) >= MOST_PRICED):
                break
            view = views[decoder]
            held = leading.get(view.worker_id, 0)
            if prefiller < 0:
                option = prices.local(view, held)
            else:
                other = views[prefiller]
                option = prices.remote(view, held, other, leading.get(other.worker_id, 0))
            cost = option.cost
            rank = cost.total_ms if option.keeps_sla else cost.total_ms + _BROKEN_MS
            options.append((rank, len(options), option))
            best_ms = min(best_ms, rank + _margin_ms(option))
        options.sort()
        return options

    def _load(self, option: RouteOption) -> tuple[int, int, int]:
        """How much is ahead: prompt tokens of the prefiller, then what the decode worker runs."""
        decoder = self.view(option.decode)
        prefiller = decoder if option.prefill is None else self.view(option.prefill)
        return prefiller.queued_tokens, decoder.running, decoder.kv_tokens


def _figures_of(view: WorkerView) -> tuple[float, ...]:
    step = view.step
    live = not view.draining
    decode_token_ms = step.per_new_token_ms + step.per_sequence_ms
    decode_context_ms = step.per_token_context_ms + step.per_kv_token_ms
    batch = view.running + 1
    chunk = min(view.queued_tokens, view.chunk_tokens)
    prefills_only = view.role is WorkerRole.PREFILL
    shared_ms = 0.0 if prefills_only else view.running * decode_token_ms + view.kv_tokens * step.per_kv_token_ms
    tpot_ms = step.base_ms + batch * decode_token_ms + view.kv_tokens * decode_context_ms
    return (
        view.queued_tokens,
        view.running,
        view.kv_tokens,
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
        live and prefills_only,
        live and not prefills_only and view.may_decode,
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


def _pick(
    options: Sequence[_Ranked],
    hint: tuple[str, str] | None,
    tie_break: float,
    load: Callable[[RouteOption], tuple[int, int, int]],
) -> RouteOption:
    """The cheapest; of near ties the session's last pair, else the less loaded of two random picks."""
    rank, _, cheapest = options[0]
    limit_ms = rank + _margin_ms(cheapest)
    near = [ranked for ranked in options if ranked[0] <= limit_ms]
    if len(near) == 1:
        return cheapest
    if hint is not None:
        for _, _, option in near:
            if (option.decode, option.prefill or "") == hint:
                return option
    # One draw gives both picks: its first digits the one, the digits after them the other.
    first, rest = divmod(tie_break * len(near), 1.0)
    one = near.pop(int(first))
    other = near[int(rest * len(near))]
    return min((load(one[2]), one), (load(other[2]), other))[1][2]


def _margin_ms(option: RouteOption) -> float:
    return max(NEAR_TIE_MS, NEAR_TIE * option.cost.ttft_ms)


def _first(pair: tuple[float, int, int]) -> float:
    return pair[0]


def _blocks_of(item: tuple[str, int]) -> int:
    return item[1]
