"""Small simulated clusters, and an engine simulated step by step to compare them with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from antiphon_policy.latency import StepModel, transfer_ms
from antiphon_simulate.cluster import Cluster
from antiphon_simulate.policies.immediate import ImmediatePolicy
from antiphon_simulate.records import (
    Arrival,
    ClusterShape,
    Outcome,
    Placement,
    Policy,
    RunResult,
    Sla,
    Timing,
    TraceRequest,
)

BLOCK_TOKENS = 16
STEP = StepModel(
    base_ms=1.7, per_new_token_ms=0.11, per_token_context_ms=0.00013, per_sequence_ms=0.31, per_kv_token_ms=0.0017
)
TIMING = Timing(step=STEP, chunk_tokens=64, mixed_chunk_tokens=64, block_bytes=1_000_000, link_gigabytes_per_s=1.0)
"""A block moves in 0.2 + 1 ms."""


def request(
    index: int,
    arrival_ms: float,
    prompt_tokens: int,
    output_tokens: int,
    blocks: Sequence[int] | None = None,
    *,
    after: int | None = None,
    think_ms: float = 0.0,
) -> TraceRequest:
    """Without `blocks`, nobody else has the same ones."""
    if blocks is None:
        blocks = range(1_000_000 * (index + 1), 1_000_000 * (index + 1) + -(-prompt_tokens // BLOCK_TOKENS))
    return TraceRequest(index, arrival_ms, prompt_tokens, output_tokens, tuple(blocks), after=after, think_ms=think_ms)


class Placed(ImmediatePolicy):
    """Places by a function of the arrival and the policy's own view of the cluster."""

    name = "placed"

    def __init__(self, choose: Callable[[Arrival, Placed], Placement]) -> None:
        super().__init__()
        self._choose = choose
        self.ends: list[tuple[int, float]] = []

    def place(self, arrival: Arrival, now_ms: float) -> Placement:
        return self._choose(arrival, self)

    def ended(self, request: TraceRequest, placement: Placement, now_ms: float) -> None:
        self.ends.append((request.index, now_ms))


def on_pair() -> Placed:
    return Placed(lambda arrival, policy: Placement(decode="decode-0", prefill="prefill-0"))


def on_one() -> Placed:
    return Placed(lambda arrival, policy: Placement(decode="worker-0"))


def pair_shape(pool_blocks: int = 1000, **more: object) -> ClusterShape:
    return ClusterShape(prefill=1, decode=1, pool_blocks=pool_blocks, **more)  # type: ignore[arg-type]


def run(
    requests: Sequence[TraceRequest],
    policy: Policy,
    shape: ClusterShape | None = None,
    timing: Timing = TIMING,
    until_ms: float | None = None,
    seed: int = 0,
) -> RunResult:
    """Runs it, and looks into pools and mirror afterwards where it ran to the end."""
    cluster = Cluster(requests, shape or pair_shape(), timing, policy, Sla(), seed=seed, block_tokens=BLOCK_TOKENS)
    result = cluster.run(until_ms)
    if until_ms is None:
        cluster.check_integrity()
    return result


def outcomes(*arguments: object, **more: object) -> dict[int, Outcome]:
    """Of `run`, by the request's index."""
    return {outcome.request.index: outcome for outcome in run(*arguments, **more).outcomes}  # type: ignore[arg-type]


# -- the same engine, step by step


@dataclass
class _Sequence:
    index: int
    prompt_tokens: int
    output_tokens: int
    computed: int = 0
    made: int = 0


@dataclass
class StepByStep:
    """One engine without a cache: every step is computed. `first_ms` and `ended_ms` by index; no hops."""

    step: StepModel
    chunk_tokens: int
    first_ms: dict[int, float] = field(default_factory=dict)
    ended_ms: dict[int, float] = field(default_factory=dict)
    chunks: dict[int, list[tuple[float, int]]] = field(default_factory=dict)
    """(time, prompt tokens computed by then) of each prompt."""

    def serve(self, arrivals: Sequence[tuple[float, int, int, int]], *, prompts: bool, max_running: int = 256) -> None:
        """`arrivals`: (time, index, prompt tokens, output tokens), in order of time. `prompts` False: the prompts and
        first tokens are there already."""
        now_ms, coming = 0.0, list(arrivals)
        queue: list[_Sequence] = []
        joining: list[_Sequence] = []
        running: list[_Sequence] = []
        while coming or queue or joining or running:
            if not queue and not joining and not running:
                now_ms = max(now_ms, coming[0][0])
            while coming and coming[0][0] <= now_ms:
                _, index, prompt_tokens, output_tokens = coming.pop(0)
                sequence = _Sequence(index, prompt_tokens, output_tokens)
                if prompts:
                    queue.append(sequence)
                else:
                    sequence.made = 1
                    joining.append(sequence)
            while joining and len(running) < max_running:
                running.append(joining.pop(0))
            parts = [(sequence, 1, sequence.prompt_tokens + sequence.made) for sequence in running]
            budget = self.chunk_tokens - len(running)
            for sequence in queue:
                tokens = min(budget, sequence.prompt_tokens - sequence.computed)
                if tokens > 0:
                    parts.append((sequence, tokens, sequence.computed + tokens))
                    budget -= tokens
            now_ms += self.step.step_ms(
                new_tokens=sum(tokens for _, tokens, _ in parts),
                token_context=sum(tokens * context for _, tokens, context in parts),
                sequences=len(parts),
                kv_tokens=sum(context for _, _, context in parts),
            )
            for sequence, tokens, _ in parts:
                if sequence.made:
                    sequence.made += 1
                    self._end_if_complete(sequence, running, now_ms)
                    continue
                sequence.computed += tokens
                self.chunks.setdefault(sequence.index, []).append((now_ms, sequence.computed))
                if sequence.computed == sequence.prompt_tokens:
                    sequence.made = 1
                    self.first_ms[sequence.index] = now_ms
                    queue.remove(sequence)
                    joining.append(sequence)
                    self._end_if_complete(sequence, joining, now_ms)

    def _end_if_complete(self, sequence: _Sequence, where: list[_Sequence], now_ms: float) -> None:
        if sequence.made == sequence.output_tokens:
            where.remove(sequence)
            self.ended_ms[sequence.index] = now_ms


def arrivals_of(requests: Sequence[TraceRequest]) -> list[tuple[float, int, int, int]]:
    return sorted((r.arrival_ms, r.index, r.prompt_tokens, r.output_tokens) for r in requests)


def moved_by(prefiller: StepByStep, requests: Sequence[TraceRequest], timing: Timing) -> Iterator[tuple[float, int]]:
    """(time, index): when all blocks of each prompt are on the decode worker; one transfer after the other."""
    by_index = {r.index: r for r in requests}
    sends = sorted(
        (time_ms, order, index, computed)
        for order, (index, chunks) in enumerate(prefiller.chunks.items())
        for time_ms, computed in chunks
    )
    link_free_ms, sent = 0.0, dict.fromkeys(by_index, 0)
    for time_ms, _, index, computed in sends:
        is_last = computed == by_index[index].prompt_tokens
        blocks = -(-computed // BLOCK_TOKENS) if is_last else computed // BLOCK_TOKENS
        if blocks > sent[index]:
            moved_bytes = (blocks - sent[index]) * timing.block_bytes
            link_free_ms = max(link_free_ms, time_ms) + transfer_ms(
                moved_bytes, gigabytes_per_s=timing.link_gigabytes_per_s
            )
            sent[index] = blocks
        if is_last:
            yield max(time_ms, link_free_ms), index
