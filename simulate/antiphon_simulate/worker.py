"""A simulated worker: an engine that computes prompts in chunks and decodes, in steps, with a pool of KV blocks.

All roles are this one: a prefill worker gets prompts, a decode worker answers, an aggregated one both. A step is what
the real scheduler makes of it: one token for each sequence that decodes, then chunks of prompts, first come, first
served, within the budget. Where only decoding is to do, steps are not simulated one by one (see `decodes`): such a run
of steps ends when a sequence is complete, or at the next step boundary after something came in.

A job has its room before anything is done for it: on the decode worker from when it comes (else it waits, and its
prompt too), for its prompt from its first chunk on. Room is given in the order in which it was asked for, so nobody
starves, and whoever has room ends without needing more of it, so nothing waits for ever.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass
from typing import Protocol

from antiphon_policy.latency import StepModel
from antiphon_policy.sharing import Kept

from antiphon_simulate.decodes import DecodeBatch
from antiphon_simulate.events import Events
from antiphon_simulate.gateway_book import Figures
from antiphon_simulate.job import Job
from antiphon_simulate.link import Link
from antiphon_simulate.pool import BlockPool, Holding
from antiphon_simulate.records import Timing
from antiphon_simulate.room import Room

HOP_MS = 1.0
"""From a worker through the gateway to the client."""


class Observer(Protocol):
    """Who looks at the workers: the cluster."""

    def busy(self, worker: Worker, start_ms: float, end_ms: float) -> None:
        """It was in steps from then to then."""

    def ended(self, job: Job) -> None:
        """The last token of the job is there."""

    def changed(self, worker: Worker, *, freed: bool) -> None:
        """It has something to report. `freed`: something that was routed elsewhere or kept back might start now."""


@dataclass(slots=True)
class _Step:
    """What the engine is at: one step with prompt chunks, or a run of steps that only decode."""

    start_ms: float
    decode_steps: int
    chunks: list[tuple[Job, int]]


class Worker:
    def __init__(
        self,
        worker_id: str,
        step: StepModel,
        timing: Timing,
        *,
        pool_blocks: int,
        block_tokens: int,
        chunk_tokens: int,
        max_running: int,
        events: Events,
        observer: Observer,
    ) -> None:
        self.worker_id = worker_id
        self.room = Room(BlockPool(pool_blocks))
        self.step = step
        self.received: defaultdict[int, int] = defaultdict(int)
        """By gateway, the requests that it was told of, as prefiller or as decoder."""
        self.kept_back: dict[str, tuple[Kept, float]] = {}
        """What gateways have told it that they keep back, and when."""
        self.reported_ms = 0.0
        self._chunk_tokens = chunk_tokens
        self._block_tokens = block_tokens
        self._max_running = max_running
        self._events = events
        self._observer = observer
        self._link = Link(events, timing)
        self._batch: DecodeBatch[Job] = DecodeBatch(step)
        self._joining: deque[Job] = deque()
        """All of their blocks are here; they decode from the next step on."""
        self._queue: deque[Job] = deque()
        """Prompts without room yet."""
        self._started: list[Job] = []
        """Prompts with room, in the order in which they came."""
        self._step: _Step | None = None
        self._planned = 0
        """Which planned end of a step or run is the one that counts."""
        self._queued_tokens = 0
        self._queued_requests = 0
        self._expected = 0
        self._expected_tokens = 0
        """Jobs that will decode here, whose prompts are computed elsewhere or wait for a place in the batch."""

    @property
    def pool(self) -> BlockPool:
        return self.room.pool

    # -- what comes in

    def take(self, job: Job) -> None:
        """A request was routed here: its prompt, its answer, or both."""
        self.received[job.gateway] += 1
        if job.prompt_on is self:
            cached = self.pool.leading_blocks(job.chain) * self._block_tokens
            self._queued_requests += 1
            self._recount(job, job.prompt_tokens - min(cached, job.prompt_tokens - 1))
        if job.is_local:
            self._enqueue(job)
        elif job.answer_on is self:
            self._expected += 1
            self._expected_tokens += job.prompt_tokens
            if self.room.find(job):
                job.prompt_on._enqueue(job)

    def figures(self) -> Figures:
        """The worker's own view of its load, as it reports it. A request whose prompt is computed here too counts as
        queued until its first token, as running from then on. In a run of steps without news, `kv_tokens` are those
        at its start."""
        return Figures(
            queued_tokens=self._queued_tokens,
            queued_requests=self._queued_requests,
            running=len(self._batch) + self._expected,
            kv_tokens=self._batch.context_tokens + self._expected_tokens,
            taken_blocks=self.pool.capacity_blocks - self.pool.available_blocks,
        )

    def cut(self, now_ms: float) -> None:
        """The simulation ends now: what the engine is at counts as busy up to here."""
        if self._step is not None:
            self._observer.busy(self, self._step.start_ms, now_ms)

    def check_idle(self) -> None:
        """Raises AssertionError if anything is left to do."""
        left = (self._queue, self._started, self.room, self._joining, self._step)
        assert not any(left), f"{self.worker_id} still has work: {left}"
        assert self.figures() == Figures(), f"{self.worker_id} has no work, but reports {self.figures()}"
        self.pool.check_idle()

    # -- steps

    def _poke(self) -> None:
        """Something came in or became possible."""
        step = self._step
        if step is None:
            self._next_step()
        elif not step.chunks:
            # Decoding only: what came in takes part from the next step boundary on.
            steps = self._batch.steps_begun(self._events.now_ms - step.start_ms)
            if steps < step.decode_steps:
                step.decode_steps = steps
                self._plan_end(step.start_ms + self._batch.steps_ms(steps))

    def _next_step(self) -> None:
        batch, now_ms = self._batch, self._events.now_ms
        while self._joining and len(batch) < self._max_running:
            job = self._joining.popleft()
            self._expected -= 1
            self._expected_tokens -= job.prompt_tokens
            batch.join(job)
        chunks = self._plan_chunks(self._chunk_tokens - len(batch))
        if chunks:
            self._step = _Step(now_ms, 1 if batch else 0, chunks)
            self._plan_end(now_ms + self._mixed_step_ms(chunks))
        elif batch:
            steps = batch.steps_to_next_end()
            self._step = _Step(now_ms, steps, chunks)
            self._plan_end(now_ms + batch.steps_ms(steps))

    def _plan_end(self, time_ms: float) -> None:
        self._planned += 1
        self._events.at(time_ms, self._step_ends, self._planned)

    def _mixed_step_ms(self, chunks: list[tuple[Job, int]]) -> float:
        sequences = len(self._batch)
        new_tokens = sequences
        token_context = kv_tokens = self._batch.context_tokens
        for job, tokens in chunks:
            context = job.computed_to + tokens
            new_tokens += tokens
            token_context += tokens * context
            kv_tokens += context
        return self.step.step_ms(
            new_tokens=new_tokens,
            token_context=token_context,
            sequences=sequences + len(chunks),
            kv_tokens=kv_tokens,
        )

    def _step_ends(self, planned: int) -> None:
        step = self._step
        if planned != self._planned or step is None:
            return
        now_ms = self._events.now_ms
        self._observer.busy(self, step.start_ms, now_ms)
        self._step = None
        ended = self._batch.advance(step.decode_steps) if step.decode_steps else ()
        for job in ended:
            self._end(job)
        for job, tokens in step.chunks:
            self._computed(job, tokens)
        self._give_room()
        self._next_step()
        self._observer.changed(self, freed=bool(ended or step.chunks))

    def _end(self, job: Job) -> None:
        assert job.answer_room is not None
        job.answer_room.close()
        job.outcome.ended_ms = self._events.now_ms + HOP_MS
        self._observer.ended(job)

    # -- prompts

    def _enqueue(self, job: Job) -> None:
        self._queue.append(job)
        self._poke()

    def _plan_chunks(self, budget: int) -> list[tuple[Job, int]]:
        chunks: list[tuple[Job, int]] = []
        for job in self._started:
            if budget <= 0:
                return chunks
            if not job.pulling:
                budget -= self._plan_chunk(job, budget, chunks)
        while budget > 0 and self._queue and self.room.find(self._queue[0]):
            job = self._queue.popleft()
            self._start_prompt(job)
            if not job.pulling:
                budget -= self._plan_chunk(job, budget, chunks)
        return chunks

    def _plan_chunk(self, job: Job, budget: int, chunks: list[tuple[Job, int]]) -> int:
        room = job.prompt_room
        assert room is not None
        if room.extend():
            self._has_prefix(job)
        tokens = min(budget, job.prompt_tokens - job.computed_to)
        chunks.append((job, tokens))
        return tokens

    def _start_prompt(self, job: Job) -> None:
        self._started.append(job)
        self._pull(job)
        self._has_prefix(job)

    def _has_prefix(self, job: Job) -> None:
        """The blocks it has of the chain need no computing; of a prompt that is all there, the last token does."""
        assert job.prompt_room is not None
        cached = min(job.prompt_room.named * self._block_tokens, job.prompt_tokens - 1)
        job.computed_to = max(job.computed_to, cached)
        self._recount(job, job.prompt_tokens - job.computed_to)
        self._send(job, job.prompt_room.named)

    def _computed(self, job: Job, tokens: int) -> None:
        job.computed_to += tokens
        job.outcome.computed_tokens += tokens
        self._recount(job, job.prompt_tokens - job.computed_to)
        room = job.prompt_room
        assert room is not None
        room.fill(job.computed_to // self._block_tokens)
        if job.computed_to < job.prompt_tokens:
            self._send(job, room.named)
        else:
            self._send(job, job.prompt_blocks)
            self._prompt_done(job)

    def _prompt_done(self, job: Job) -> None:
        assert job.prompt_room is not None
        now_ms = self._events.now_ms
        self._queued_requests -= 1
        self._started.remove(job)
        job.outcome.first_token_ms = now_ms + HOP_MS
        if job.is_local:
            if job.output_tokens == 1:
                self._end(job)
            else:
                self._expected += 1
                self._expected_tokens += job.prompt_tokens
                self._joining.append(job)
        elif job.output_tokens == 1:
            # The first token was the last: the decode worker need not wait for the blocks.
            job.prompt_room.close()
            self._events.at(now_ms, job.answer_on._ends_early, job)
        else:
            self._events.at(job.kv_ready_ms, self._moved, job)

    def _recount(self, job: Job, tokens: int) -> None:
        self._queued_tokens += tokens - job.counted_tokens
        job.counted_tokens = tokens

    def _give_room(self) -> None:
        """Some became free."""
        for job in self.room.find_for_answers():
            job.prompt_on._enqueue(job)

    # -- transfers

    def _pull(self, job: Job) -> None:
        """From the peer that the placement names, what it really has beyond what is here."""
        peer, room = job.pull_from, job.prompt_room
        assert room is not None
        if peer is None:
            return
        blocks = peer.pool.leading_blocks(job.chain)
        if blocks <= room.named:
            return
        job.pulling = True
        job.outcome.pulled_blocks = blocks - room.named
        pin = peer.pool.pin(job.chain, blocks)
        self._events.at(self._link.receive(blocks - room.named), self._pulled, job, peer, pin)

    def _pulled(self, job: Job, peer: Worker, pin: Holding) -> None:
        assert job.prompt_room is not None
        job.pulling = False
        job.prompt_room.fill(pin.named)
        self._has_prefix(job)
        self._poke()
        self._observer.changed(self, freed=False)
        pin.close()
        peer._give_room()
        peer._poke()

    def _send(self, job: Job, blocks: int) -> None:
        """The leading `blocks` blocks are here: what the decode worker lacks of them goes there."""
        if not job.is_local and blocks > job.sent_blocks:
            job.kv_ready_ms = job.answer_on._link.receive(blocks - job.sent_blocks)
            job.outcome.moved_blocks += blocks - job.sent_blocks
            job.sent_blocks = blocks

    def _moved(self, job: Job) -> None:
        """The decode worker has all blocks of a prompt that was computed here."""
        assert job.prompt_room is not None
        job.prompt_room.close()
        self._give_room()
        self._poke()
        self._observer.changed(self, freed=False)
        job.answer_on._joins(job)

    def _joins(self, job: Job) -> None:
        assert job.answer_room is not None
        job.answer_room.fill(len(job.chain))
        self._joining.append(job)
        self._poke()
        self._observer.changed(self, freed=False)

    def _ends_early(self, job: Job) -> None:
        self._expected -= 1
        self._expected_tokens -= job.prompt_tokens
        self._end(job)
        self._give_room()
        self._poke()
        self._observer.changed(self, freed=True)
