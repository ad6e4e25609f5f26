"""The scheduler: what each step computes. Decisions over pool and requests; no threads, no I/O, no clock.

`schedule` plans one step, `commit` takes in what the step brought; between the two, the engine computes without a
lock while requests may come, go and be resumed. Per step there is a budget of tokens. Running decodes come first,
then prompts, chunk by chunk, first come, first served; decodes and chunks of many requests share one batch.

Several steps may be in flight (`depth`), planned and committed in the same order. A step then takes its share of the
decodes, one `depth`th, so that equal batches take turns. A request whose next token is being sampled is in no other
step. A prompt runs ahead: its next chunk is planned while the one before it is in flight, because steps run in order,
so the KV it attends to will be there. What steps in flight read and write stays: their requests are not preempted, and
keep their blocks when they are cancelled or failed, until the last of those steps is committed; what a failed chunk's
successors bring is dropped.

Room. Every admitted request is *promised* the blocks for its prompt (and one token more): held and PREFILL requests
when they are accepted, or they are refused; others when they are admitted from the queue. What is promised and not yet
taken is never given away, so the blocks that requests hold plus those promised never exceed the pool.

Why nothing can wait for ever:
  * A request that is being pulled or whose prompt is being computed has its room. (Peers' pins and reads that were
    given up may occupy it for a while; both end by deadlines of their owners.)
  * Only a decode can lack room. It then preempts the running request that was admitted last (blocks freed, KV
    recomputed later from what the cache still has), in the end itself. So the oldest running request goes on. Those in
    flight cannot be preempted: it waits for them to land, while no prompt runs ahead, and comes before them then.
  * Whoever waits for room at the head of the queue is counted before new room is promised, and no unpromised request
    overtakes it; what holds room (runs, pulls, kept PREFILLs) ends without needing more than it has or can preempt.
  * A request alone always fits: its length is limited to the pool as it is to the model's context (finish LENGTH),
    and a prompt that leaves no room for one token is refused as INVALID.

Blocks are immutable once indexed. So where everything is in the cache, the last block is computed anew into a block of
its own (and then dropped in favour of the indexed one), because the last token must be computed to sample the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from antiphon_engine._request import Phase, Request
from antiphon_engine._room import KvRoom
from antiphon_engine._roster import Roster
from antiphon_engine._step import StepNews, StepPart, StepPlan, output_of, part_of, progress_of
from antiphon_engine.executor import NO_TOKEN, SampledToken
from antiphon_engine.interface import (
    FinishReason,
    IntegrityReport,
    Load,
    ModelInfo,
    PrefillProgress,
    RefusalReason,
    RequestOutput,
    RequestRefused,
    Reservation,
    Sampling,
)
from antiphon_engine.pool import BlockPool

MAX_SCORED_ROWS = 128
"""Rows of a prompt whose logits one step computes, of all its requests: what bounds the memory for them."""

NOTHING_LEFT = "no token may be sampled"
"""How the error begins of a request whose limits exclude everything."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    max_batch_tokens: int = 512
    """Tokens computed in one step, of all sequences together."""
    max_sequences: int = 64
    """Sequences in one step, and running ones in all."""
    max_waiting_tokens: int = 32768
    """Prompt tokens that may wait in the queue; more are refused, unless the queue is empty."""

    def __post_init__(self) -> None:
        if min(self.max_batch_tokens, self.max_sequences, self.max_waiting_tokens) < 1:
            raise ValueError("max_batch_tokens, max_sequences and max_waiting_tokens must be at least 1")


class Scheduler:
    """Owns all requests and their blocks. Every method needs the engine's lock."""

    def __init__(self, config: SchedulerConfig, info: ModelInfo, pool: BlockPool, depth: int = 1) -> None:
        """`depth`: steps that may be in flight at once."""
        self.preemptions = 0
        self.limit_tokens = min(info.max_context_tokens, pool.num_blocks * info.block_tokens)
        """Prompt and output of one request together."""
        self._config = config
        self._info = info
        self._pool = pool
        self._depth = depth
        self._room = KvRoom(pool)
        self._roster = Roster(pool, self._room)
        self._to_announce: list[Request] = []  # PREFILLs that advanced without being computed
        self._finished: list[RequestOutput] = []  # of requests that were complete before they could run

    # -- requests come and go

    def validate(self, request: Request) -> None:
        """Raise RequestRefused if this engine could never serve it. Needs no lock."""
        context_tokens, vocab_size = self._info.max_context_tokens, self._info.vocab_size
        length = len(request.tokens) if request.is_prefill else len(request.source.prompt)
        problem = ""
        if not request.source.prompt:
            problem = "the prompt is empty"
        elif min(request.tokens) < 0 or max(request.tokens) >= vocab_size:
            problem = f"a token id is outside the vocabulary of {vocab_size}"
        elif length >= context_tokens:
            problem = f"the prompt has {length} tokens; the context of {context_tokens} must hold one more"
        elif length >= self.limit_tokens:
            problem = f"the prompt has {length} tokens; this worker's KV pool of {self.limit_tokens} must hold one more"
        elif max(request.source.sampling.allowed_token_ids, default=0) >= vocab_size:
            problem = f"an allowed token id is outside the vocabulary of {vocab_size}"
        elif request.source.sampling.grammar is not None:
            problem = self._grammar_obstacle(request.source.sampling)
        if problem:
            raise RequestRefused(RefusalReason.INVALID, problem)

    def _grammar_obstacle(self, sampling: Sampling) -> str:
        if not self._info.eos_token_ids:
            return "the model has no end token, so nothing could say that a structured output is over"
        if sampling.ignore_eos or sampling.min_tokens:
            return "a grammar says where the output ends: ignore_eos and min_tokens cannot be had with it"
        return ""

    def submit(self, request: Request) -> None:
        """Take a valid request, or raise RequestRefused."""
        if request.request_id in self._roster.requests:
            raise RequestRefused(RefusalReason.INVALID, f"there is a request {request.request_id} already")
        if request.phase is Phase.HELD or request.is_prefill:
            head = next((waiting for waiting in self._roster.waiting if not waiting.promised_blocks), None)
            if not self._room.fits(request, spare_blocks=head.wanted_blocks if head else 0):
                raise RequestRefused(RefusalReason.CAPACITY, "no room in the KV pool now: try later or elsewhere")
            self._room.promise(request)
            self._extend(request)
        elif (
            self._roster.waiting and self._roster.queued_tokens + len(request.tokens) > self._config.max_waiting_tokens
        ):
            raise RequestRefused(RefusalReason.CAPACITY, "the waiting queue is full: try later or elsewhere")
        self._roster.add(request)
        if request.phase is not Phase.HELD:
            self._enqueue(request)

    def cancel(self, request_id: str) -> None:
        self._finished = [output for output in self._finished if output.request_id != request_id]
        if request_id in self._roster.requests:
            self._roster.remove(self._roster.requests[request_id])

    def grant(self, request_id: str, credit_blocks: int) -> None:
        request = self._roster.requests.get(request_id)
        if request is not None and request.credit_blocks is not None:
            request.credit_blocks = max(request.credit_blocks, credit_blocks)

    # -- held requests

    def reserve(self, request_id: str, num_tokens: int) -> Reservation | None:
        request = self._roster.held(request_id)
        if num_tokens > len(request.tokens):
            raise ValueError(f"{request_id} has {len(request.tokens)} tokens, not {num_tokens}")
        if not request.looked_up:
            request.looked_up = True
            self._extend(request)
        count = request.blocks_for(num_tokens)
        if not self._room.secure(request, count):
            return None
        filled = count if num_tokens <= request.computed_tokens else request.computed_tokens // request.block_tokens
        return Reservation(blocks=tuple(request.blocks[:count]), filled_blocks=filled)

    def publish(self, request_id: str, num_tokens: int) -> None:
        request = self._roster.held(request_id)
        if num_tokens > len(request.tokens) or request.blocks_for(num_tokens) > len(request.blocks):
            raise ValueError(f"{num_tokens} tokens of {request_id} are published, but fewer have reserved blocks")
        if num_tokens > request.computed_tokens:
            request.computed_tokens = num_tokens
            request.cached_tokens = min(num_tokens, len(request.source.prompt))
            self._room.index(request)
            if request.is_prefill:
                self._to_announce.append(request)

    def resume(self, request_id: str, output: Sequence[int], scored_tokens: int = 0) -> None:
        request = self._roster.held(request_id)
        request.scored_tokens = scored_tokens
        if any(not 0 <= token_id < self._info.vocab_size for token_id in output):
            raise ValueError(f"an output id of {request_id} is outside the vocabulary of {self._info.vocab_size}")
        request.append(output)
        if request.grammar is not None and output:
            request.grammar.advance(output)
        if request.computed_tokens > request.findable_tokens:
            # What is in beyond the tokens that were told is computed here, to be told.
            request.computed_tokens = request.findable_tokens // request.block_tokens * request.block_tokens
        keep = request.blocks_for(request.computed_tokens)
        redo_block = False
        if not request.missing_tokens:
            # The last token is computed here; an indexed block is not written again, so all of it is.
            redo_block = len(request.tokens) % request.block_tokens == 0
            keep -= redo_block
            request.computed_tokens = keep * request.block_tokens if redo_block else request.computed_tokens - 1
        # Reads that were given up may still write into blocks that were not published: never compute into those.
        self._room.detach(request, keep)
        request.indexed_blocks = min(request.indexed_blocks, keep)
        request.cached_tokens = min(request.cached_tokens, request.computed_tokens)
        if redo_block and not self._room.is_covered:
            # The block that it gave back is in use by others, and there is none in its place: it queues for room.
            self._roster.reset(request)
            request.cached_tokens = 0
        self._enqueue(request)

    def partial_block(self, request_id: str) -> list[int]:
        """The last, not full block of a finished PREFILL request, if there is one."""
        request = self._roster.requests.get(request_id)
        if request is None or request.phase is not Phase.KEPT or len(request.tokens) % request.block_tokens == 0:
            return []
        return request.blocks[-1:]

    # -- one step

    def schedule(self) -> StepPlan:
        """Plan the next step, beside those in flight.

        Requests in the plan stay as they are until `commit` or `fail`, whatever is called. Plans are committed or
        failed in the order in which they were made.
        """
        preemptions = self.preemptions
        self._admit()
        parts: list[StepPart] = []
        budget = self._config.max_batch_tokens
        leaving = self._roster.leaving_ids
        decodes: list[Request] = []
        prompts: list[Request] = []
        for request in self._roster.running:
            (decodes if request.is_decoding else prompts).append(request)
        share = min(-(-len(decodes) // self._depth), self._config.max_sequences)
        lacks_room = False
        scored_rows = 0
        for request in decodes:
            if not budget or len(parts) == share:
                break
            if request.flights or request.request_id in leaving or not request.may_sample:
                continue
            if self._make_room(request):
                parts.append(part_of(request, 1))
                budget -= 1
            elif request.phase is Phase.RUNNING:
                lacks_room = True
        for request in prompts:
            if not budget or len(parts) == self._config.max_sequences:
                break
            if request.phase is not Phase.RUNNING or request.request_id in leaving:
                continue  # a decode has just preempted it, or its namesake has not landed
            if not request.can_run_ahead or (request.flights and lacks_room):
                continue
            self._extend(request)
            count = min(budget, request.computable_tokens)
            if request.scored_tokens < request.to_score:
                start = request.planned_tokens
                rows = request.unscored_rows(start, start + count)
                if len(rows) > MAX_SCORED_ROWS - scored_rows:
                    count = rows.start + MAX_SCORED_ROWS - scored_rows - start
                scored_rows += len(request.unscored_rows(start, start + count))
            if count > 0 and self._room.secure(request, request.blocks_for(request.planned_tokens + count)):
                parts.append(part_of(request, count))
                budget -= count
        has_news = bool(self._finished or self._to_announce)
        return StepPlan(tuple(parts), has_news, preempted=self.preemptions > preemptions)

    def commit(self, plan: StepPlan, results: Sequence[SampledToken | None]) -> StepNews:
        """Take in a computed step: KV advances, full blocks are indexed, tokens appended, finished requests freed."""
        outputs, self._finished = self._finished, []
        prefills: list[PrefillProgress] = []
        for part, sampled in zip(plan.parts, results, strict=True):
            request = part.request
            if not self._roster.land(request, len(part.step.tokens)):
                continue
            request.computed_tokens += len(part.step.tokens)
            self._room.index(request)
            scoring = part.step.scoring
            scores = () if scoring is None else request.take_scores(part.step.start, scoring)
            failure = _failure(request, sampled)
            if failure:
                self._end_failed(request, failure, outputs, prefills)
            elif request.is_prefill:
                if sampled is not None:
                    self._roster.keep(request)
                prefills.append(progress_of(request, sampled, scores=scores))
            elif sampled is not None:
                request.append((sampled.token_id,))
                finish = request.finish_reason(self.limit_tokens)
                outputs.append(output_of(request, finish, sampled, scores=scores))
                if finish is not None:
                    self._roster.remove(request)
                elif request.grammar is not None:
                    request.grammar.advance((sampled.token_id,))
            elif request.only_scores and not request.missing_tokens:
                outputs.append(output_of(request, FinishReason.LENGTH, None, scores=scores))
                self._roster.remove(request)
            elif scores:
                outputs.append(output_of(request, None, None, scores=scores))
        for request in self._to_announce:
            if request.phase is not Phase.OVER and request.indexed_blocks > request.announced_blocks:
                prefills.append(progress_of(request, None))
        self._to_announce.clear()
        return StepNews(tuple(outputs), tuple(prefills))

    def fail(self, plan: StepPlan, error: str) -> StepNews:
        """The step could not be computed: its requests are over."""
        outputs: list[RequestOutput] = []
        prefills: list[PrefillProgress] = []
        for part in plan.parts:
            if not self._roster.land(part.request, len(part.step.tokens)):
                continue
            self._end_failed(part.request, error, outputs, prefills)
        return StepNews(tuple(outputs), tuple(prefills))

    def _end_failed(
        self, request: Request, error: str, outputs: list[RequestOutput], prefills: list[PrefillProgress]
    ) -> None:
        if request.is_prefill:
            prefills.append(progress_of(request, None, error))
        else:
            outputs.append(output_of(request, FinishReason.ERROR, None, error))
        self._roster.remove(request)

    # -- observation

    def load(self) -> Load:
        held = sum(request.phase is Phase.HELD for request in self._roster.requests.values())
        prompts = sum(request.missing_tokens for request in self._roster.running if not request.is_decoding)
        return Load(
            running=len(self._roster.running),
            waiting=len(self._roster.waiting) + held,
            waiting_tokens=prompts + self._roster.queued_tokens,
            kv_tokens=sum(request.computed_tokens for request in self._roster.requests.values()),
            free_blocks=self._room.unpromised_blocks,
            total_blocks=self._pool.num_blocks,
            retained_blocks=self._pool.retained_blocks,
            empty_blocks=self._room.empty_blocks,
            chunk_tokens=self._config.max_batch_tokens,
            max_sequences=self._config.max_sequences,
        )

    def check_integrity(self) -> IntegrityReport:
        """Raises IntegrityError."""
        return self.integrity_check()()

    def integrity_check(self) -> Callable[[], IntegrityReport]:
        """As `Roster.integrity_check`."""
        return self._roster.integrity_check()

    # -- inside

    def _enqueue(self, request: Request) -> None:
        self._roster.enqueue(request)
        finish = None if request.is_prefill else request.finish_reason(self.limit_tokens)
        # Complete with the output that it brought along, and with nothing to say of its prompt.
        if finish is not None and request.scored_tokens >= request.to_score:
            self._finished.append(output_of(request, finish, None))
            self._roster.remove(request)

    def _admit(self) -> None:
        if not self._roster.waiting:
            return
        free_places = self._config.max_sequences - sum(not request.is_stalled for request in self._roster.running)
        growing = sum(not request.is_prefill for request in self._roster.running)
        room_is_short = False
        for request in tuple(self._roster.waiting):
            if free_places <= 0:
                break
            if not request.promised_blocks:
                # One block is left to each running request, which will soon want it.
                room_is_short = room_is_short or not self._room.fits(request, spare_blocks=growing)
                if room_is_short:
                    continue
                self._room.promise(request)
                self._extend(request)
            self._roster.run(request)
            free_places -= not request.is_stalled
            growing += not request.is_prefill

    def _extend(self, request: Request) -> None:
        if self._room.extend_from_cache(request) and request.is_prefill:
            self._to_announce.append(request)

    def _make_room(self, request: Request) -> bool:
        """Room for one more token of a decode, by preemption if need be. False: it waits, or was preempted itself."""
        while request.phase is Phase.RUNNING:
            if self._room.secure(request, request.blocks_for(request.computed_tokens + 1)):
                return True
            victim = self._victim(request)
            if victim is None:
                return False
            self.preemptions += 1
            self._roster.preempt(victim)
        return False

    def _victim(self, request: Request) -> Request | None:
        """Who gives its blocks up for `request`: of those in no step, who was admitted last; None: one must land."""
        later_ones_fly = False
        for other in reversed(self._roster.running):
            if other is request:
                break
            if other.is_prefill:
                continue
            if not other.flights:
                return other
            later_ones_fly = True
        return None if later_ones_fly else request


def _failure(request: Request, sampled: SampledToken | None) -> str:
    """Why the request ends with what was sampled for it; empty: it does not."""
    if sampled is None:
        return ""
    if request.grammar_failure:
        return f"structured output failed: {request.grammar_failure}"
    if sampled.token_id == NO_TOKEN:
        return f"{NOTHING_LEFT}: the request's allowed ids, bad words, grammar and min_tokens together leave none"
    return ""
