"""Where a request goes: which decode worker D, and who computes its prompt (a prefill worker P, or D itself).

A pure function of a snapshot, a request and a random number: the same inputs give the same decision, with its reason.
Everything is priced in milliseconds by the workers' own latency models, so cache, load, links and memory weigh
against each other with no weights for a person to tune:

    cost(D, P) = queue + pull + compute      the request's own time to first token, on P (on D where P is none)
               + transfer + join             then its wait for the second token: blocks still to move, one step of D
               + delay                       what it adds to the requests that run on D (and on P)
               + recompute                   work thrown away where blocks are short

The cheapest pair wins; among near ties the one with less work ahead of it, then the tie break. Only a few of the best
workers of either side are paired, so a thousand workers cost one pass over them. The caller counts what it
routed into `queued_tokens`, `running` and `free_blocks` at once, so a burst does not see the same snapshot twice.
"""

from __future__ import annotations

import enum
import heapq
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from antiphon_policy.latency import CHUNK_TOKENS, StepModel, transfer_ms

NEAR_TIE = 0.03
"""Pairs within this share of the cheapest are as good as it: the models are not more exact."""

NEAR_TIE_MS = 0.5

PAIRED = 8
"""So many of the best of either side are priced as pairs."""

FALLBACKS = 3
PREFIX_PEERS = 3
ALTERNATIVES = 4

DEFAULT_LINK_GIGABYTES_PER_S = 1.0
"""For links that nobody has measured yet."""

REMOTE_MS = 0.5
"""One more hop on the way of a request: opening `Prefill.Run` on P."""

EXPECTED_OUTPUT_TOKENS = 128
"""Nobody knows how long an answer will be: so many tokens, or `max_tokens` if that is less."""

PULL_MARGIN = 0.8
"""A prefix is pulled where that takes less than this share of computing it."""


class WorkerRole(enum.Enum):
    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker as the caller knows it now. Figures that are not known are 0."""

    worker_id: str
    role: WorkerRole
    leading_blocks: int
    """Leading full blocks of this request's chain that it holds."""
    queued_tokens: int
    """Prompt tokens it still has to compute, with what was just routed to it."""
    running: int
    kv_tokens: int
    free_blocks: int
    """Free or evictable."""
    total_blocks: int
    """0: not known."""
    step: StepModel
    draining: bool = False


@dataclass(frozen=True, slots=True)
class RouteRequest:
    prompt_tokens: int
    block_tokens: int
    block_bytes: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class RoutingSnapshot:
    workers: tuple[WorkerView, ...]
    link_gigabytes_per_s: Mapping[tuple[str, str], float]
    """(reader, holder) -> measured speed. A missing or 0 entry: not measured."""


class RouteReason(enum.Enum):
    """Why the prompt is computed where it is."""

    PREFILL_REMOTE = "prefill_remote"
    """A prefill worker is the cheapest."""
    LOCAL_CHEAPER = "local_cheaper"
    """There are prefill workers, but the decode worker itself is cheaper (it holds most of it, or they are busy)."""
    LOCAL_NO_PREFILL_WORKER = "local_no_prefill_worker"


class NoWorkerReason(enum.Enum):
    NO_WORKERS = "no_workers"
    NO_DECODE_WORKER = "no_decode_worker"
    ALL_DRAINING = "all_draining"


class NoWorker(Exception):
    """Nobody can take the request now."""

    def __init__(self, reason: NoWorkerReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class CostParts:
    """The terms of the module's formula, in milliseconds."""

    queue_ms: float
    pull_ms: float
    compute_ms: float
    transfer_ms: float
    join_ms: float
    delay_ms: float
    recompute_ms: float
    hop_ms: float = 0.0

    @property
    def ttft_ms(self) -> float:
        return self.hop_ms + self.queue_ms + self.pull_ms + self.compute_ms

    @property
    def total_ms(self) -> float:
        return self.ttft_ms + self.transfer_ms + self.join_ms + self.delay_ms + self.recompute_ms


@dataclass(frozen=True, slots=True)
class RouteOption:
    """One priced pair. `prefill` None: on the decode worker."""

    decode: str
    prefill: str | None
    cost: CostParts

    @property
    def cost_ms(self) -> float:
        return self.cost.total_ms


@dataclass(frozen=True, slots=True)
class RouteDecision:
    decode: str
    prefill: str | None
    """None: prefill on the decode worker."""
    prefill_fallbacks: tuple[str, ...]
    """Other prefill workers, best first."""
    prefix_peers: tuple[tuple[str, int], ...]
    """(holder, leading blocks it holds): from whom the prefiller had better pull than compute, best first."""
    predicted_ttft_ms: float
    reason: RouteReason
    explanation: str
    alternatives: tuple[RouteOption, ...] = ()
    """The next best pairs that were not taken."""
    cost: CostParts | None = None


def route(snapshot: RoutingSnapshot, request: RouteRequest, tie_break: float) -> RouteDecision:
    """Choose. `tie_break` in [0, 1) is the only randomness. Raises NoWorker.

    Worked example, default step model, 1,000 prompt tokens, 64-token blocks of 1 MB, 16 output tokens, one idle
    decode worker D, one idle prefill worker P, link of 1 GB/s, nothing cached:
    on P: hop 0.5 + compute 504.4 (two chunks) is the time to first token; the last chunk's 8 blocks are moved in
    8.2, and D's step with it takes 2.7: 515.8 ms. On D itself: compute 504.4, step 2.7, and a decode worker counts one
    request more than it runs as delayed: another 504.4. So P.
    """
    workers = snapshot.workers
    if not workers:
        raise NoWorker(NoWorkerReason.NO_WORKERS, "no worker serves this model: start one")
    live = [worker for worker in workers if not worker.draining]
    if not live:
        raise NoWorker(NoWorkerReason.ALL_DRAINING, f"all {len(workers)} workers are draining: start another one")
    # Equal workers are taken from a random place on, or all gateways would pick the first.
    start = int(tie_break * len(live)) % len(live)
    live = live[start:] + live[:start]
    decoders = [worker for worker in live if worker.role is not WorkerRole.PREFILL]
    if not decoders:
        raise NoWorker(
            NoWorkerReason.NO_DECODE_WORKER,
            f"none of {len(live)} live workers decodes: start a worker with role decode or both",
        )
    prefillers = [worker for worker in live if worker.role is WorkerRole.PREFILL]
    pricing = _Pricing(snapshot.link_gigabytes_per_s, request, live)

    ranked_prefillers = _best(((pricing.prefiller_ms(worker), worker) for worker in prefillers), PAIRED + FALLBACKS)
    priced = [(pricing.decoder_ms(worker), worker) for worker in decoders]
    pairs: list[tuple[RouteOption, WorkerView, WorkerView]] = [
        (pricing.local(worker), worker, worker) for worker in _best((ms[1], worker) for ms, worker in priced)
    ]
    if prefillers:
        for decoder in _best((ms[0], worker) for ms, worker in priced):
            pairs += [(pricing.remote(decoder, other), decoder, other) for other in ranked_prefillers[:PAIRED]]

    cheapest_ms = min(option.cost_ms for option, _, _ in pairs)
    limit_ms = max(cheapest_ms * (1 + NEAR_TIE), cheapest_ms + NEAR_TIE_MS)
    near = [pair for pair in pairs if pair[0].cost_ms <= limit_ms]
    least = min(_load(decoder, prefiller) for _, decoder, prefiller in near)
    equal = [pair for pair in near if _load(pair[1], pair[2]) == least]
    chosen, decoder, prefiller = equal[int(tie_break * len(equal)) % len(equal)]

    fallbacks = [worker.worker_id for worker in ranked_prefillers if worker is not prefiller][:FALLBACKS]
    others = heapq.nsmallest(
        ALTERNATIVES,
        [(option.cost_ms, at, option) for at, (option, _, _) in enumerate(pairs) if option is not chosen],
    )
    remote = chosen.prefill is not None
    if remote:
        reason = RouteReason.PREFILL_REMOTE
    else:
        reason = RouteReason.LOCAL_CHEAPER if prefillers else RouteReason.LOCAL_NO_PREFILL_WORKER
    alternatives = tuple(option for _, _, option in others)
    return RouteDecision(
        decode=chosen.decode,
        prefill=chosen.prefill,
        prefill_fallbacks=tuple(fallbacks) if remote else (),
        prefix_peers=tuple((holder.worker_id, blocks) for holder, blocks, _ in pricing.peers(prefiller, decoder)),
        predicted_ttft_ms=chosen.cost.ttft_ms,
        reason=reason,
        explanation=_explain(chosen, decoder, prefiller, pricing.usable_blocks, alternatives),
        alternatives=alternatives,
        cost=chosen.cost,
    )


class _Pricing:
    """Prices workers and pairs for one request."""

    def __init__(
        self, links: Mapping[tuple[str, str], float], request: RouteRequest, live: Sequence[WorkerView]
    ) -> None:
        self._links = links
        self._prompt_tokens = max(1, request.prompt_tokens)
        self._block_tokens = max(1, request.block_tokens)
        self._block_bytes = request.block_bytes
        self._output_tokens = max(1, min(request.max_tokens, EXPECTED_OUTPUT_TOKENS))
        # A full hit still recomputes the last token.
        self.usable_blocks = (self._prompt_tokens - 1) // self._block_tokens
        self._prompt_blocks = -(-self._prompt_tokens // self._block_tokens)
        self._all_blocks = -(-(self._prompt_tokens + self._output_tokens) // self._block_tokens)
        self._holders = heapq.nlargest(
            PREFIX_PEERS + 1, (w for w in live if w.leading_blocks), key=lambda w: w.leading_blocks
        )

    # -- who is worth pairing: cheap bounds, one worker at a time

    def prefiller_ms(self, worker: WorkerView) -> float:
        cached = self._cached_blocks(worker)
        return (
            self._queue_ms(worker)
            + self._compute_ms(worker, cached)
            + self._recompute_ms(worker, self._prompt_blocks - cached)
        )

    def decoder_ms(self, worker: WorkerView) -> tuple[float, float]:
        """What the worker costs as D of a pair, and with the prompt on it too."""
        cached = self._cached_blocks(worker)
        decode_ms = (
            self._join_ms(worker)
            + self._decode_delay_ms(worker)
            + self._recompute_ms(worker, self._all_blocks - cached)
        )
        move_ms = (self._prompt_blocks - cached) * self._block_bytes / (DEFAULT_LINK_GIGABYTES_PER_S * 1e6)
        local_ms = self._queue_ms(worker) + (1 + _delayed_by_prefill(worker)) * self._compute_ms(worker, cached)
        return decode_ms + move_ms, decode_ms + local_ms

    # -- options

    def local(self, worker: WorkerView) -> RouteOption:
        cached, pull_ms = self._with_peers(worker, worker)
        compute_ms = self._compute_ms(worker, cached)
        parts = CostParts(
            queue_ms=self._queue_ms(worker),
            pull_ms=pull_ms,
            compute_ms=compute_ms,
            transfer_ms=0.0,
            join_ms=self._join_ms(worker),
            delay_ms=_delayed_by_prefill(worker) * compute_ms + self._decode_delay_ms(worker),
            recompute_ms=self._recompute_ms(worker, self._all_blocks - self._cached_blocks(worker)),
        )
        return RouteOption(worker.worker_id, None, parts)

    def remote(self, decoder: WorkerView, prefiller: WorkerView) -> RouteOption:
        cached, pull_ms = self._with_peers(prefiller, decoder)
        compute_ms = self._compute_ms(prefiller, cached)
        held = self._cached_blocks(decoder)
        to_move = self._prompt_blocks - held
        speed = self._speed(decoder, prefiller)
        all_ms = transfer_ms(to_move * self._block_bytes, gigabytes_per_s=speed) if to_move else 0.0
        # Blocks move while the next chunk is computed: what is left at the end is the last chunk's, or more where
        # the link is slower than the prefill.
        last_blocks = min(to_move, -(-min(CHUNK_TOKENS, self._prompt_tokens) // self._block_tokens))
        last_ms = transfer_ms(last_blocks * self._block_bytes, gigabytes_per_s=speed) if to_move else 0.0
        parts = CostParts(
            queue_ms=self._queue_ms(prefiller),
            pull_ms=pull_ms,
            compute_ms=compute_ms,
            transfer_ms=max(last_ms, all_ms - compute_ms),
            join_ms=self._join_ms(decoder),
            delay_ms=self._decode_delay_ms(decoder),
            recompute_ms=self._recompute_ms(decoder, self._all_blocks - held)
            + self._recompute_ms(prefiller, self._prompt_blocks - self._cached_blocks(prefiller)),
            hop_ms=REMOTE_MS,
        )
        return RouteOption(decoder.worker_id, prefiller.worker_id, parts)

    def peers(self, prefiller: WorkerView, decoder: WorkerView) -> list[tuple[WorkerView, int, float]]:
        """(holder, blocks it holds, ms to pull what `prefiller` lacks), most time saved first."""
        cached = self._cached_blocks(prefiller)
        compute_ms = self._compute_ms(prefiller, cached)
        found: list[tuple[float, int, tuple[WorkerView, int, float]]] = []
        candidates = self._holders if decoder in self._holders else [*self._holders, decoder]
        for at, holder in enumerate(candidates):
            blocks = self._cached_blocks(holder)
            if holder is prefiller or blocks <= cached:
                continue
            pull_ms = transfer_ms((blocks - cached) * self._block_bytes, gigabytes_per_s=self._speed(prefiller, holder))
            saved_ms = compute_ms - self._compute_ms(prefiller, blocks)
            if pull_ms < saved_ms * PULL_MARGIN:
                found.append((pull_ms - saved_ms, at, (holder, blocks, pull_ms)))
        return [peer for _, _, peer in sorted(found)[:PREFIX_PEERS]]

    # -- terms

    def _with_peers(self, prefiller: WorkerView, decoder: WorkerView) -> tuple[int, float]:
        """(leading blocks that need not be computed, ms to pull those of them that a peer holds)."""
        peers = self.peers(prefiller, decoder)
        if not peers:
            return self._cached_blocks(prefiller), 0.0
        _, blocks, pull_ms = peers[0]
        return blocks, pull_ms

    def _cached_blocks(self, worker: WorkerView) -> int:
        return min(worker.leading_blocks, self.usable_blocks)

    def _queue_ms(self, worker: WorkerView) -> float:
        """Prompts ahead are computed first."""
        return worker.step.prefill_ms(new_tokens=worker.queued_tokens) if worker.queued_tokens > 0 else 0.0

    def _compute_ms(self, worker: WorkerView, cached_blocks: int) -> float:
        """The prompt's chunks, each in a step that the worker's decodes share."""
        cached_tokens = cached_blocks * self._block_tokens
        new_tokens = self._prompt_tokens - cached_tokens
        alone_ms = worker.step.prefill_ms(new_tokens=new_tokens, cached_tokens=cached_tokens)
        if worker.role is WorkerRole.PREFILL:
            return alone_ms
        steps = -(-new_tokens // CHUNK_TOKENS)
        step = worker.step
        return alone_ms + steps * (
            worker.running * (step.per_new_token_ms + step.per_sequence_ms) + worker.kv_tokens * step.per_kv_token_ms
        )

    def _join_ms(self, worker: WorkerView) -> float:
        """The step that brings the second token: with all that decodes, and a chunk of a prompt if one waits."""
        batch = worker.running + 1
        chunk = min(worker.queued_tokens, CHUNK_TOKENS)
        return worker.step.step_ms(
            new_tokens=batch + chunk,
            token_context=worker.kv_tokens + self._prompt_tokens + chunk * chunk,
            sequences=batch,
            kv_tokens=worker.kv_tokens + self._prompt_tokens,
        )

    def _decode_delay_ms(self, worker: WorkerView) -> float:
        """Every further step of every running request gets longer by this request's share."""
        context = self._prompt_tokens + self._output_tokens // 2
        step = worker.step
        longer_ms = (
            step.per_new_token_ms + step.per_sequence_ms + context * (step.per_kv_token_ms + step.per_token_context_ms)
        )
        return worker.running * self._output_tokens * longer_ms

    def _recompute_ms(self, worker: WorkerView, wanted_blocks: int) -> float:
        """Blocks that are not there must be taken from a request that will compute them again."""
        if worker.total_blocks <= 0:
            return 0.0
        short = wanted_blocks - worker.free_blocks
        return worker.step.prefill_ms(new_tokens=short * self._block_tokens) if short > 0 else 0.0

    def _speed(self, reader: WorkerView, holder: WorkerView) -> float:
        measured = self._links.get((reader.worker_id, holder.worker_id), 0.0)
        return measured if measured > 0.0 else DEFAULT_LINK_GIGABYTES_PER_S


def _delayed_by_prefill(worker: WorkerView) -> int:
    """Requests that wait for each chunk of a prompt computed here.

    A worker of the decode pool counts one more than it runs: the one that comes next. So an idle decode pool leaves
    prompts to an idle prefill pool, unless little of them is left to compute.
    """
    return worker.running + (1 if worker.role is WorkerRole.DECODE else 0)


def _best(priced: Iterable[tuple[float, WorkerView]], count: int = PAIRED) -> list[WorkerView]:
    """The cheapest; among equals those that came first."""
    ranked = heapq.nsmallest(count, priced, key=operator.itemgetter(0))
    return [worker for _, worker in ranked]


def _load(decoder: WorkerView, prefiller: WorkerView) -> tuple[int, int, int]:
    """How much is ahead: prompt tokens of the prefiller, then what the decode worker runs."""
    return prefiller.queued_tokens, decoder.running, decoder.kv_tokens


def _explain(
    chosen: RouteOption,
    decoder: WorkerView,
    prefiller: WorkerView,
    usable_blocks: int,
    alternatives: Sequence[RouteOption],
) -> str:
    cost = chosen.cost
    where = f"prefill on {chosen.prefill}" if chosen.prefill else "prefill on the same worker"
    text = (
        f"decode on {chosen.decode}, {where}: {cost.total_ms:.1f} ms = first token {cost.ttft_ms:.1f}"
        f" (queue {cost.queue_ms:.1f}, pull {cost.pull_ms:.1f}, compute {cost.compute_ms:.1f})"
        f" + transfer {cost.transfer_ms:.1f} + join {cost.join_ms:.1f} + delay to others {cost.delay_ms:.1f}"
        f" + recompute {cost.recompute_ms:.1f};"
        f" cached blocks {min(prefiller.leading_blocks, usable_blocks)} (prefill)"
        f" {min(decoder.leading_blocks, usable_blocks)} (decode) of {usable_blocks}"
    )
    if alternatives:
        other = alternatives[0]
        text += f"; next: {other.decode}, prefill on {other.prefill or 'the same worker'}, {other.cost_ms:.1f} ms"
    return text
