"""The workers of one group as arrays, so that choosing among a thousand costs about what choosing among ten does.

A decision has two parts. *Narrow* (`narrowing`): the terms of `pricing` are computed for all workers at once, each side
by itself, with links at their default speed; of a few workers it is left out. *Price*: the pairs that are left are
priced exactly, cheapest bound first, until no other can win. The caller keeps the table true: `put` whenever
a worker's figures changed or something was routed to it, `remove` when it left.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec
import numpy as np

from antiphon_policy.narrowing import FALLBACKS, ROWS, Chosen, Floats, Narrowed, Pair, figures_of, narrow
from antiphon_policy.pricing import BROKEN_MS, PREFIX_PEERS, Holder, Prices
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
FEW_WORKERS = 8
"""Of so many all pairs are priced: that is cheaper than narrowing them down."""
MOST_PRICED = 8
"""Pairs, where many are about equal: more would not find a better one."""
ALTERNATIVES = 4

_Ranked = tuple[float, int, RouteOption]
"""(cost, more where a promise is broken; a number that tells equal ones apart; the option)"""


class WorkerTable:
    """See the module. Used from one thread."""

    def __init__(
        self, link_gigabytes_per_s: Mapping[tuple[str, str], float] | None = None, workload: Workload | None = None
    ) -> None:
        self.links: Mapping[tuple[str, str], float] = link_gigabytes_per_s or {}
        self.workload = workload or Workload()
        self._views: list[WorkerView] = []
        self._slots: dict[str, int] = {}
        self._figures: Floats = np.zeros((ROWS, 16))
        self._stale: set[int] = set()
        """Slots whose figures are not yet those of their view: only narrowing needs them (3 us a worker)."""
        self._prefills: set[int] = set()
        self._decodes: set[int] = set()
        """Slots of those that may."""
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
        told = tuple(msgspec.structs.replace(view, leading_blocks=leading.get(view.worker_id, 0)) for view in views)
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
        self._stale.add(slot)
        self._place(slot, view)

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
            self._stale.add(slot)
            self._place(slot, last)
        self._stale.discard(len(self._views))
        self._prefills.discard(len(self._views))
        self._decodes.discard(len(self._views))

    def _place(self, slot: int, view: WorkerView) -> None:
        prefills = view.role is WorkerRole.PREFILL
        for slots, holds in (
            (self._prefills, prefills and not view.draining),
            (self._decodes, not prefills and not view.draining and view.may_decode),
        ):
            if holds:
                slots.add(slot)
            else:
                slots.discard(slot)

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
        prefillers, decoders = list(self._prefills), list(self._decodes)
        if excluded:
            prefillers = [slot for slot in prefillers if self._views[slot].worker_id not in excluded]
            decoders = [slot for slot in decoders if self._views[slot].worker_id not in excluded]
        if not decoders:
            raise self._nobody()
        holders = self._holders(leading, excluded)
        waiting = self.workload.waiting_tokens
        prices = Prices(
            request,
            self.workload,
            self.links,
            holders,
            self._followers(prefillers, waiting),
            self._followers(decoders, 0.0 if prefillers else waiting),
        )
        if len(self._views) <= FEW_WORKERS:
            pairs = [(0.0, decoder, -1) for decoder in decoders]
            pairs += [(0.0, decoder, prefiller) for prefiller in prefillers for decoder in decoders]
            options = self._priced(pairs, prices, leading, len(pairs))
            prefillers.sort(key=lambda slot: self._prefill_ms(slot, prices, leading))
        else:
            narrowed = self._narrow(request, leading, tie_break, prefillers, decoders, holders, prices)
            options = self._priced(narrowed.pairs, prices, leading, MOST_PRICED)
            prefillers = narrowed.prefillers
        chosen = _pick(options, request.hint, tie_break, self._load)
        decoder_id, prefiller_id = chosen.decode, chosen.prefill or chosen.decode
        remote = chosen.prefill is not None
        if remote:
            reason = RouteReason.PREFILL_REMOTE
        else:
            reason = RouteReason.LOCAL_CHEAPER if prefillers else RouteReason.LOCAL_NO_PREFILL_WORKER
        decoder_held = leading.get(decoder_id, 0)
        peers: Sequence[tuple[WorkerView, int, float]] = ()
        if leading:
            peers = prices.peers(
                self.view(prefiller_id),
                leading.get(prefiller_id, 0),
                (self.view(decoder_id), decoder_held) if remote else None,
            )
        fallbacks = [self._views[slot].worker_id for slot in prefillers[: FALLBACKS + 1]]
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

    def _narrow(
        self,
        request: RouteRequest,
        leading: Mapping[str, int],
        tie_break: float,
        prefillers: Sequence[int],
        decoders: Sequence[int],
        holders: Sequence[Holder],
        prices: Prices,
    ) -> Narrowed:
        count = len(self._views)
        prefills, decodes = np.zeros(count, dtype=bool), np.zeros(count, dtype=bool)
        prefills[prefillers] = True
        decodes[decoders] = True
        cached = np.zeros(count)
        for worker_id, blocks in leading.items():
            slot = self._slots.get(worker_id)
            if slot is not None:
                cached[slot] = blocks
        np.minimum(cached, prices.usable_blocks, out=cached)
        # From other digits than those that pick among near ties.
        start = int(tie_break * 7919.0 % 1.0 * count)
        hinted = None if request.hint is None else self._hinted(request.hint, prefills, decodes)
        for slot in self._stale:
            self._figures[:, slot] = figures_of(self._views[slot])
        self._stale.clear()
        figures = self._figures[:, :count]
        return narrow(figures, prefills, decodes, cached, holders, prices, request, start, hinted)

    def _hinted(self, hint: tuple[str, str], prefills: Chosen, decodes: Chosen) -> tuple[int, int] | None:
        """Slots of the session's last pair; None if that may not be chosen now."""
        decoder = self._slots.get(hint[0])
        if decoder is None or not decodes[decoder]:
            return None
        if not hint[1]:
            return decoder, -1
        prefiller = self._slots.get(hint[1])
        return None if prefiller is None or not prefills[prefiller] else (decoder, prefiller)

    def _prefill_ms(self, slot: int, prices: Prices, leading: Mapping[str, int]) -> float:
        view = self._views[slot]
        return prices.prefill_ms(view, leading.get(view.worker_id, 0))

    def _holders(self, leading: Mapping[str, int], excluded: Collection[str]) -> list[Holder]:
        """Those who hold most, as far as they may be read from."""
        if not leading:
            return []
        best = heapq.nlargest(PREFIX_PEERS + 1 + len(excluded), leading.items(), key=_blocks_of)
        return [
            (view, blocks)
            for worker_id, blocks in best
            if worker_id not in excluded
            and (slot := self._slots.get(worker_id)) is not None
            and not (view := self._views[slot]).draining
        ]

    def _followers(self, slots: Sequence[int], waiting_tokens: float) -> float:
        """Requests that will wait for one that is queued now: as many as wait at the least loaded of those that may
        compute prompts. Later ones join where the least is ahead, so that is the level they meet everywhere; and in a
        steady state as many come while one waits as wait when it comes."""
        if not slots:
            return 0.0
        least = min([self._views[slot].queued_tokens for slot in slots])
        if not least and not waiting_tokens:
            return 0.0
        return (least + waiting_tokens) / max(1.0, self.workload.uncached_tokens)

    def _priced(self, pairs: Sequence[Pair], prices: Prices, leading: Mapping[str, int], most: int) -> list[_Ranked]:
        """Exact prices, the cheapest first. Pairs come by rising bound, and the bounds leave out little, so those far
        above the best are not priced at all."""
        views = self._views
        options: list[_Ranked] = []
        best_ms = float("inf")
        for bound_ms, decoder, prefiller in pairs:
            if len(options) > ALTERNATIVES and (bound_ms > best_ms or len(options) >= most):
                break
            view = views[decoder]
            held = leading.get(view.worker_id, 0)
            if prefiller < 0:
                option = prices.local(view, held)
            else:
                other = views[prefiller]
                option = prices.remote(view, held, other, leading.get(other.worker_id, 0))
            rank = option.cost.total_ms
            if not option.keeps_sla:
                rank += BROKEN_MS
            options.append((rank, len(options), option))
            if rank < best_ms:
                best_ms = min(best_ms, rank + _margin_ms(option))
        options.sort()
        return options

    def _load(self, option: RouteOption) -> tuple[int, int, int]:
        """How much is ahead: prompt tokens of the prefiller, then what the decode worker runs."""
        decoder = self.view(option.decode)
        prefiller = decoder if option.prefill is None else self.view(option.prefill)
        return prefiller.queued_tokens, decoder.running, decoder.kv_tokens


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


def _blocks_of(item: tuple[str, int]) -> int:
    return item[1]
