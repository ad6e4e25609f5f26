"""The second half of a replay: answers that n workers decode in batches.

Answers are spread evenly over the workers, so what one of them sees is `1 + (K - 1) / n` of the K that are decoded
then, and as much of their contexts. All go on by one token in a step, and a step takes as long as the step model says
of that batch: so one number, the tokens decoded since the beginning, tells when each ends. Sequences and KV of a worker
bound how many are decoded at once; who finds no room waits for the second token, in the order of the first ones.

Window ends are no ends: an answer that began before or ends after it is not alone. So what came within an answer's life
of either end is there a second time, mirrored at that end, uncounted.

On workers that compute prompts too, a share `u` of them does so at any time, and their steps are longer by a chunk: a
token takes `1 / ((1 - u) / step + u / (step + chunk))`.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from antiphon_policy.scaling.prompts import copies_of
from antiphon_policy.scaling.records import PoolView
from antiphon_policy.scaling.work import Window, Work, decode_ms


class Stream(msgspec.Struct, frozen=True, gc=False):
    """An answer to decode, from its first token on."""

    joins_ms: float
    work: Work
    weight: float
    counts: bool = True


MOST_STREAMS = 3000
"""A sample that stands for several answers is replayed as so many, up to about this many in all."""


def streams_of(window: Window, typical_token_ms: float) -> list[Stream]:
    """By when they begin. An answer's life is taken to be its tokens at `typical_token_ms`, and a window at most."""
    streams = []
    length_ms = window.length_ms
    scale = min(1.0, MOST_STREAMS / window.weight) if window.work else 1.0
    last = len(window.work) - 1
    for at, one in enumerate(window.work):
        if one.tokens <= 0:
            continue
        life_ms = min(one.tokens * typical_token_ms, length_ms)
        copies = copies_of(one, scale)
        weight = one.weight / copies
        gap_ms = (window.work[at + 1].at_ms if at < last else length_ms) - one.at_ms
        for copy in range(copies):
            at_ms = one.at_ms + gap_ms * copy / copies
            streams.append(Stream(at_ms + one.service_ms, one, weight))
            if at_ms < life_ms:
                streams.append(Stream(-at_ms, one, weight, False))
            after_ms = length_ms - at_ms
            if after_ms < life_ms:
                streams.append(Stream(length_ms + after_ms + one.service_ms, one, weight, False))
    streams.sort(key=_joins)
    return streams


def _joins(stream: Stream) -> float:
    return stream.joins_ms


@dataclass(frozen=True, slots=True)
class Crowd:
    """The most that is ever there of answers that all take as long as they may."""

    sequences: float
    context_tokens: float
    room_tokens: float
    longest_context: float

    def is_served(self, pool: PoolView, workers: int, limit_ms: float) -> bool:
        """Surely nobody is late on so many workers: even this crowd has room and steps within the limit, and answers
        that are within it are never more. False says nothing."""
        if self.sequences > pool.max_sequences * workers or self.room_tokens > pool.kv_capacity_tokens * workers:
            return False
        context = self.longest_context + self.context_tokens / workers
        return decode_ms(pool.step, 1.0 + self.sequences / workers, context) <= limit_ms


def crowd_of(streams: Sequence[Stream], limit_ms: float) -> Crowd:
    changes = []
    for stream in streams:
        work, weight = stream.work, stream.weight
        joins_ms = stream.joins_ms
        changes.append((joins_ms, weight, work.context_tokens * weight, work.room_tokens * weight))
        ends_ms = joins_ms + work.tokens * limit_ms
        changes.append((ends_ms, -weight, -work.context_tokens * weight, -work.room_tokens * weight))
    changes.sort()
    sequences = context = room = most = most_context = most_room = 0.0
    for _, each, tokens, needs in changes:
        sequences += each
        context += tokens
        room += needs
        if sequences > most:
            most = sequences
        if context > most_context:
            most_context = context
        if room > most_room:
            most_room = room
    longest = max([stream.work.context_tokens for stream in streams], default=0.0)
    return Crowd(most, most_context, most_room, longest)


@dataclass(frozen=True, slots=True)
class Prompting:
    """What the workers compute of prompts meanwhile: (time, share of the workers from then on), and their chunk."""

    shares: Sequence[tuple[float, float]]
    chunk_ms: float


def late_answers(
    streams: Sequence[Stream],
    pool: PoolView,
    workers: int,
    limit_ms: float | None,
    *,
    most_late: float = float("inf"),
    prompting: Prompting | None = None,
) -> float:
    """Weight of the feasible answers whose tokens after the first took longer than `limit_ms` in the mean; without a
    limit: that waited for room for longer than a worker takes to start. Cut short above `most_late`."""
    step = pool.step
    per_sequence = step.per_new_token_ms + step.per_sequence_ms
    per_context = step.per_token_context_ms + step.per_kv_token_ms
    most_sequences = float(pool.max_sequences * workers)
    most_room = float(pool.kv_capacity_tokens * workers)
    ends: list[tuple[float, int]] = []
    waiting: deque[int] = deque()
    began = [0.0] * len(streams)
    shares = prompting.shares if prompting else ()
    chunk_ms = prompting.chunk_ms if prompting else 0.0
    now_ms, decoded, late = streams[0].joins_ms if streams else 0.0, 0.0, 0.0
    sequences = context = room = share = 0.0
    coming, turn, count = 0, 0, len(streams)
    infinite, push, pop = float("inf"), heapq.heappush, heapq.heappop
    turns_ms = shares[0][0] if shares else infinite
    joins_ms = streams[0].joins_ms if streams else infinite
    while coming < count or ends or waiting:
        token_ms, ends_ms = 1.0, infinite
        if sequences > 0.0:
            seen = 1.0 + (sequences - 1.0) / workers if sequences > 1.0 else 1.0
            token_ms = step.base_ms + (per_sequence + per_context * context / sequences) * seen
            if share > 0.0:
                token_ms = 1.0 / ((1.0 - share) / token_ms + share / (token_ms + chunk_ms))
            if ends:
                ends_ms = now_ms + (ends[0][0] - decoded) * token_ms
        joins = joins_ms < ends_ms
        next_ms = joins_ms if joins else ends_ms
        turns = turn < len(shares) and turns_ms <= next_ms
        if turns:
            next_ms = turns_ms
        if next_ms > now_ms:
            if sequences > 0.0 and token_ms > 0.0:
                decoded += (next_ms - now_ms) / token_ms
            now_ms = next_ms
        if turns:
            share = min(1.0, shares[turn][1])
            turn += 1
            turns_ms = shares[turn][0] if turn < len(shares) else infinite
            continue
        if joins:
            waiting.append(coming)
            coming += 1
            joins_ms = streams[coming].joins_ms if coming < count else infinite
        else:
            end, at = pop(ends)
            if end > decoded:
                decoded = end
            stream = streams[at]
            work, weight = stream.work, stream.weight
            sequences -= weight
            context -= work.context_tokens * weight
            room -= work.room_tokens * weight
            if not ends:
                sequences = context = room = 0.0
            if stream.counts and work.feasible:
                if limit_ms is None:
                    is_late = began[at] - stream.joins_ms > pool.start_ms
                else:
                    is_late = now_ms - stream.joins_ms > limit_ms * work.tokens * (1.0 + 1e-9)
                if is_late:
                    late += weight
                    if late > most_late:
                        return late
        while waiting:
            at = waiting[0]
            work, weight = streams[at].work, streams[at].weight
            if ends and (sequences + weight > most_sequences or room + work.room_tokens * weight > most_room):
                break
            waiting.popleft()
            began[at] = now_ms
            push(ends, (decoded + work.tokens, at))
            sequences += weight
            context += work.context_tokens * weight
            room += work.room_tokens * weight
    return late


def mean_sequences(window: Window, pool: PoolView, workers: int) -> tuple[float, float]:
    """(answers, context tokens) that one worker decodes in the mean: as many as come in the time that one takes.

    With r tokens a second for each worker and steps of `base + x * k` for k answers, k = r * step(k).
    """
    tokens = sum(one.tokens * one.weight for one in window.work)
    if tokens <= 0.0:
        return 0.0, 0.0
    context = sum(one.context_tokens * one.tokens * one.weight for one in window.work) / tokens
    per_ms = tokens / window.length_ms / workers
    base_ms = decode_ms(pool.step, 0.0, 0.0)
    grows_ms = decode_ms(pool.step, 1.0, context) - base_ms
    most = min(float(pool.max_sequences), pool.kv_capacity_tokens / max(1.0, context))
    left = 1.0 - per_ms * grows_ms
    sequences = min(most, per_ms * base_ms / left) if left > 0.0 else most
    return sequences, sequences * context
