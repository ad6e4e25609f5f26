"""Antiphon's own routing: the code that gateways run, on the simulator's workers.

Here stands only what a gateway does around the decision: it keeps the table of workers true, measures what the workload
is like (tokens to compute, lengths of answers, evicted blocks that are asked for again), and asks in the line's order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from antiphon_policy.admission import Entry, Order, Verdict, WaitingLine
from antiphon_policy.holding import hold_ms, horizon_ms, prompt_tokens_per_ms
from antiphon_policy.route_records import RouteDecision, RouteRequest, WorkerRole, WorkerView
from antiphon_policy.sharing import NEAR_HORIZONS, SharedRoom, kept_back
from antiphon_policy.worker_table import WorkerTable
from antiphon_policy.workload import WorkloadMeter
from msgspec.structs import replace

from antiphon_simulate.records import Arrival, ClusterView, Placement, TraceRequest, WorkerState

UNKNOWN_LENGTH_TOKENS = 1 << 20
"""No router knows how long an answer will be: the trace's own figure is not told."""


MEMORY = 0.02
"""What one request changes of the mean promise."""

LOOK_AGAIN_MS = 30.0
"""What waits is looked at when a worker has room, and after so long in any case: it may have to go elsewhere by now."""

GHOST_BLOCKS = 200_000


@dataclass(frozen=True, slots=True)
class Variant:
    """What can be left out, to measure what it brings."""

    hold: bool = True
    order: Order = Order.DEADLINE_THEN_PREFIX


class AntiphonPolicy:
    name = "antiphon"

    def __init__(self, variant: Variant | None = None) -> None:
        self._variant = variant or Variant()
        self._arrivals: dict[int, Arrival] = {}
        self._decisions: dict[int, RouteDecision] = {}

    def begin(self, cluster: ClusterView) -> None:
        self.cluster = cluster
        timing = cluster.timing
        links = {
            (reader.worker_id, holder.worker_id): timing.link_gigabytes_per_s
            for reader in cluster.workers
            for holder in cluster.workers
            if reader is not holder
        }
        self.table = WorkerTable(links)
        self._line: WaitingLine[int] = WaitingLine(order=self._variant.order)
        self._seen: dict[str, tuple[float, ...]] = {}
        self._shared = SharedRoom(str(cluster.number))
        self._wanted: set[str] = set()
        """Prefillers that something was held for in the last pass."""
        prefillers = [worker for worker in cluster.workers if worker.role is WorkerRole.PREFILL]
        self._prefillers = prefillers or list(cluster.workers)
        self._horizon_ms = {
            worker.worker_id: horizon_ms(worker.step, chunk_tokens=self._chunk_tokens(worker))
            for worker in cluster.workers
        }
        self._tokens_per_ms = prompt_tokens_per_ms(
            (worker.step for worker in self._prefillers), chunk_tokens=timing.chunk_tokens
        )
        self._meter = WorkloadMeter()
        self._promised_ms = cluster.sla.ttft_limit_ms(0)
        self._looked_ms = -LOOK_AGAIN_MS
        self._ghost: dict[int, None] = {}
        self._stored = 1.0
        self._asked_again = 0.0

    def arrived(self, arrival: Arrival) -> None:
        request = arrival.request
        limit_ms = self.cluster.sla.ttft_limit_ms(request.prompt_tokens)
        if limit_ms < math.inf:
            self._promised_ms += MEMORY * (limit_ms - self._promised_ms)
        self._arrivals[request.index] = arrival
        self._line.add(
            Entry(
                key=request.index,
                arrived_ms=arrival.arrived_ms,
                uncached_tokens=request.prompt_tokens,
                due_ms=_promise(arrival.arrived_ms + limit_ms),
            )
        )

    def dispatch(self, now_ms: float) -> Iterator[tuple[TraceRequest, Placement]]:
        self._note_evictions()
        for worker_id, said in self.cluster.kept_back.items():
            self._shared.hear(worker_id, said)
        yield from self._pass_over(now_ms)
        if self.cluster.is_shared and self._variant.hold:
            self._tell(now_ms)

    def _pass_over(self, now_ms: float) -> Iterator[tuple[TraceRequest, Placement]]:
        if not self._line:
            return
        if self._variant.hold and now_ms < self._looked_ms + LOOK_AGAIN_MS and not self._some_room():
            return
        self._looked_ms = now_ms
        self._wanted.clear()
        self._refresh()
        most = 2 * len(self._prefillers) if self._variant.hold else None
        for entry in self._line.pass_over(
            now_ms, lambda entry: self._look(entry, now_ms), tokens_per_ms=self._own_rate(), max_held=most
        ):
            arrival = self._arrivals.pop(entry.key)
            decision = self._decisions.pop(entry.key)
            self._learn(arrival.request, decision)
            yield arrival.request, self._placement(decision, now_ms - arrival.arrived_ms)

    def ended(self, request: TraceRequest, placement: Placement, now_ms: float) -> None:
        self._meter.ended(request.output_tokens)

    # -- one look at one that waits

    def _look(self, entry: Entry[int], now_ms: float) -> Verdict:
        arrival = self._arrivals[entry.key]
        decision = self._decide(arrival, now_ms)
        cost = decision.cost
        assert cost is not None
        blocks = decision.prefix_peers[0][1] if decision.prefix_peers else decision.prefill_blocks
        entry.matched_tokens = blocks * self.cluster.block_tokens
        entry.service_ms = cost.ttft_ms - cost.queue_ms
        self._line.estimate(entry, max(1, arrival.request.prompt_tokens - entry.matched_tokens))
        by = decision.prefill or decision.decode
        if self._variant.hold and hold_ms(cost.queue_ms, self._horizon_ms[by]) > 0.0:
            self._shared.full(by, now_ms)
            return self._hold(by, decision.decode, entry.uncached_tokens)
        if self._variant.hold and (left_ms := self._shared.leaves_ms(by, entry, now_ms)) > 0.0:
            self.cluster.look_at(now_ms + left_ms)
            return self._hold(by, decision.decode, entry.uncached_tokens)
        self._shared.sent(by)
        self._decisions[entry.key] = decision
        # Whoever is looked at next in this pass sees it; what the cluster counts then is the same.
        self._reserve(by, decision.decode, entry.uncached_tokens)
        return Verdict.START

    def _hold(self, prefiller: str, decoder: str, tokens: int) -> Verdict:
        self._wanted.add(prefiller)
        self._reserve(prefiller, decoder, tokens)
        return Verdict.HOLD

    def _reserve(self, prefiller: str, decoder: str, tokens: int) -> None:
        """Those behind it see the place as taken. Put right with the next pass."""
        view = self.table.view(prefiller)
        self.table.put(replace(view, queued_tokens=view.queued_tokens + tokens))
        view = self.table.view(decoder)
        self.table.put(replace(view, running=view.running + 1))
        self._seen.pop(prefiller, None)
        self._seen.pop(decoder, None)

    def _tell(self, now_ms: float) -> None:
        """Workers that something is held for, and those that may soon have room."""
        kept = kept_back(self._line, now_ms)
        # Prompts may go to all of them, also to those that decode.
        for worker in self.cluster.workers:
            worker_id = worker.worker_id
            is_near = worker_id in self._wanted or self._queue_ms(worker) <= NEAR_HORIZONS * self._horizon_ms[worker_id]
            if (is_near or not kept.tokens) and self._shared.is_news(worker_id, kept):
                self.cluster.tell(worker_id, kept)

    def _waiting_tokens(self) -> int:
        # Gateways place what comes while nothing waits without putting it into the line.
        own = self._line.waiting_tokens if len(self._line) > 1 else 0
        return own + self._shared.others_tokens

    def _own_rate(self) -> float:
        """This line's share of what all workers compute."""
        own = self._line.waiting_tokens
        return self._tokens_per_ms * own / max(1, own + self._shared.others_tokens)

    def _queue_ms(self, worker: WorkerState) -> float:
        return worker.step.prefill_ms(new_tokens=worker.queued_tokens, chunk_tokens=self._chunk_tokens(worker))

    def _some_room(self) -> bool:
        """Whether any prefiller may be given something: most calls find none, and end here."""
        return any(self._queue_ms(worker) <= self._horizon_ms[worker.worker_id] for worker in self._prefillers)

    def _decide(self, arrival: Arrival, now_ms: float) -> RouteDecision:
        request = arrival.request
        sla = self.cluster.sla
        self.table.workload = self._meter.workload(
            waiting_tokens=self._waiting_tokens() / len(self._prefillers),
            ttft_limit_ms=_promise(self._promised_ms),
            evicted_reuse=self._asked_again / self._stored,
        )
        asked = RouteRequest(
            prompt_tokens=request.prompt_tokens,
            block_tokens=self.cluster.block_tokens,
            block_bytes=self.cluster.timing.block_bytes,
            max_tokens=UNKNOWN_LENGTH_TOKENS,
            ttft_limit_ms=_promise(sla.ttft_limit_ms(request.prompt_tokens) - (now_ms - arrival.arrived_ms)),
            tpot_limit_ms=_promise(sla.tpot_ms),
        )
        return self.table.choose(asked, self.cluster.leading_blocks(request), arrival.draw)

    def _placement(self, decision: RouteDecision, waited_ms: float) -> Placement:
        return Placement(
            decode=decision.decode,
            prefill=decision.prefill,
            pull_from=decision.prefix_peers[0][0] if decision.prefix_peers else "",
            predicted_ttft_ms=decision.predicted_ttft_ms + waited_ms,
            predicted_tpot_ms=decision.predicted_tpot_ms,
        )

    def _learn(self, request: TraceRequest, decision: RouteDecision) -> None:
        blocks = decision.prefix_peers[0][1] if decision.prefix_peers else decision.prefill_blocks
        self._meter.started(request.prompt_tokens - blocks * self.cluster.block_tokens)
        stored = len(request.blocks) - decision.prefill_blocks
        self._stored = self._stored * 0.999 + max(1, stored)
        self._asked_again *= 0.999
        for block in request.blocks[blocks:]:
            if block in self._ghost:
                del self._ghost[block]
                self._asked_again += 1

    def _note_evictions(self) -> None:
        for block in self.cluster.evicted():
            self._ghost[block] = None
        while len(self._ghost) > GHOST_BLOCKS:
            del self._ghost[next(iter(self._ghost))]

    def _refresh(self) -> None:
        for worker in self.cluster.workers:
            figures = (worker.queued_tokens, worker.running, worker.kv_tokens, worker.free_blocks)
            if self._seen.get(worker.worker_id) != figures:
                self._seen[worker.worker_id] = figures
                self.table.put(self._view(worker))

    def _view(self, worker: WorkerState) -> WorkerView:
        return WorkerView(
            worker_id=worker.worker_id,
            role=worker.role,
            leading_blocks=0,
            queued_tokens=worker.queued_tokens,
            running=worker.running,
            kv_tokens=worker.kv_tokens,
            free_blocks=worker.free_blocks,
            total_blocks=worker.total_blocks,
            step=worker.step,
            chunk_tokens=self._chunk_tokens(worker),
        )

    def _chunk_tokens(self, worker: WorkerState) -> int:
        timing = self.cluster.timing
        return timing.chunk_tokens if worker.role is WorkerRole.PREFILL else timing.mixed_chunk_tokens


def _promise(limit_ms: float) -> float | None:
    """An endless limit is no promise: gateways without an SLA route without one."""
    return None if limit_ms == math.inf else limit_ms
