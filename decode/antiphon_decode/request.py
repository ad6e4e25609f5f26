"""One request's way through a decode worker, from Submit to its last token.

A request without prefill workers (and without a peer that holds more of its prefix) goes straight to the engine. Any
other is submitted *held*, and a task of its own gets its KV in: from a prefill worker, the next one if that fails, or
as a prefix from a peer; then it ends the hold, and whatever is missing by then the engine computes. So every failure
on the way leads to the same place, and none to an error for the client.

An answer that another worker began goes on in the same way: what is brought in is the KV of its prompt and of the
output so far, and the worker that gave it up, while it still stands, is the first one asked.

All output, whoever sampled it, goes through one `OutputText`, on the event loop: first token of a prefill worker,
later tokens of the engine. Log-probabilities of the prompt go before it, from whoever computes them; `_scored` counts
them, so that none is sent again where another goes on. A request ends exactly once, in `_end`: everything that is held
for it, here and on the prefill worker, goes then.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence

from antiphon_engine.interface import EngineRequest, FinishReason, RequestOutput, RequestRefused, TokenLogprob
from antiphon_kvtransfer.identity import chain_hashes
from antiphon_proto import worker_pb2 as wire
from antiphon_telemetry.tracing import extract, tracer
from antiphon_worker.attach import RequestSink
from antiphon_worker.detokenize import Detokenizer
from antiphon_worker.held import HeldBlocks
from antiphon_worker.prefix import pull_prefix
from antiphon_worker.service import TaskOwner, WorkerContext
from antiphon_worker.stops import StopStrings
from antiphon_worker.text import OutputText
from antiphon_worker.wire import engine_logprob, engine_sampling, wire_finish, wire_logprob, wire_refusal
from opentelemetry import trace

from antiphon_decode.errors import PrefillPeerFailed, PullFailed
from antiphon_decode.first_token import finish_after
from antiphon_decode.remote_prefill import CHUNKS_AHEAD, PrefillJob, RemotePrefill
from antiphon_decode.telling import Teller

log = logging.getLogger("antiphon.decode")

_tracer = tracer("antiphon.decode")
_serials = itertools.count(1)


class DecodeRequest:
    """A request that a gateway submitted. `start` once; `cancel` any time."""

    def __init__(
        self,
        context: WorkerContext,
        submit: wire.Submit,
        sink: RequestSink,
        special_token_ids: frozenset[int],
        tasks: TaskOwner,
        on_end: Callable[[DecodeRequest], None],
    ) -> None:
        self._context = context
        self._submit = submit
        self._sink = sink
        # Log-probabilities that wait for their text are of one step each.
        self._teller = Teller(sink, 0 if submit.sampling.HasField("logprobs") else submit.tell_every_ms)
        self._tasks = tasks
        self._on_end = on_end
        # A gateway may send a request again while this worker still cleans up after the first time.
        self._engine_id = f"{submit.request_id}#{next(_serials)}"
        self._sampling = engine_sampling(submit.sampling)
        self._text = OutputText(
            Detokenizer(
                context.tokenizer,
                special_token_ids,
                skip_special_tokens=submit.sampling.skip_special_tokens,
                kept_special_ids=submit.sampling.kept_special_ids,
            ),
            StopStrings(submit.sampling.stop, include_stop_text=submit.sampling.include_stop_text),
            min_tokens=submit.sampling.min_tokens,
            stop_token_ids=self._sampling.stop_token_ids,
            include_stop_text=submit.sampling.include_stop_text,
        )
        self._prepare: asyncio.Task[None] | None = None
        self._held: HeldBlocks | None = None
        self._first_token: int | None = None
        self._scored = 0
        """Tokens of the prompt whose log-probabilities have been sent."""
        self._sent_usage = False
        self._cached_tokens = 0
        self._computed_elsewhere = False
        self._prefill_worker_id = ""
        self._over = False
        self.unpulled_at_done: int | None = None
        """Blocks that were still to be pulled when the prefill worker had finished the prompt."""
        self._span = _tracer.start_span("decode", context=extract(submit.traceparent))
        self._span.set_attribute("antiphon.request_id", submit.request_id)
        self._span.set_attribute("antiphon.worker_id", context.identity.worker_id)
        self._span.set_attribute("antiphon.prompt_tokens", len(submit.prompt_token_ids))

    def start(self) -> bool:
        """Give it to the engine; False if it was refused."""
        submit = self._submit
        from_elsewhere = bool(submit.prefill or submit.prefix_peers)
        try:
            self._context.engine.submit(
                EngineRequest(
                    request_id=self._engine_id,
                    prompt=list(submit.prompt_token_ids),
                    sampling=self._sampling,
                    output=list(submit.output_token_ids),
                    cache_salt=submit.cache_salt,
                    held=from_elsewhere,
                )
            )
        except RequestRefused as refusal:
            self._over = True
            self._span.set_attribute("antiphon.refused", str(refusal))
            self._span.end()
            self._sink.refused(wire_refusal(refusal.reason), str(refusal))
            return False
        self._context.bridge.subscribe_outputs(self._engine_id, self._on_output)
        self._text.replay(submit.output_token_ids, [engine_logprob(held) for held in submit.held_logprobs])
        self._sink.accepted()
        if from_elsewhere:
            self._prepare = self._tasks.start(self._get_prefix(), f"prepare {self._engine_id}")
        return True

    def cancel(self) -> None:
        """The gateway does not want it any more: nothing is sent, everything is freed."""
        self._end("cancelled")

    def give_up(self, why: str) -> None:
        """The worker will not end it: its gateway has it continued elsewhere, from the tokens that it has. What steps
        in flight bring is left out, and sampled there again. Idempotent."""
        if not self._over:
            self._teller.tell(wire.RequestStep(finish=wire.Finish.FINISH_MOVED, error=why))
            self._end("moved")

    # -- until the engine has what can be had from elsewhere

    async def _get_prefix(self) -> None:
        """Owns the held request until it is resumed."""
        try:
            with trace.use_span(self._span, end_on_exit=False, record_exception=False, set_status_on_exception=False):
                await self._fill()
                if not self._over:
                    self._context.engine.resume(
                        self._engine_id,
                        output=[] if self._first_token is None else [self._first_token],
                        scored_tokens=self._scored,
                    )
        except KeyError:
            self._fail("the engine let go of the request while its KV was on its way")
        except Exception as error:
            log.exception("request %s failed while its KV was on its way", self._submit.request_id)
            self._fail(f"{type(error).__name__}: {error}")

    async def _fill(self) -> None:
        """Get as much of the KV as there is to get. Raises KeyError if the engine's request is gone."""
        context, submit = self._context, self._submit
        tokens = [*submit.prompt_token_ids, *submit.output_token_ids]
        hashes = chain_hashes(context.root(submit.cache_salt), tokens, context.block_tokens)
        held = HeldBlocks(context.engine, self._engine_id, len(tokens), hashes)
        self._held = held
        ahead = CHUNKS_AHEAD * context.chunk_blocks
        if not await context.bridge.room(lambda: held.reserve_beyond_own(ahead), context.lost_after_s):
            return
        if len(tokens) - held.own_blocks * context.block_tokens <= context.block_tokens:
            self._span.add_event("the prompt is cached here")
            return
        peers = [peer for peer in submit.prefill if peer.worker_id != context.identity.worker_id]
        if submit.output_token_ids or not peers:
            # Of an answer that has begun somebody may have all of it: then no prefill worker need be troubled.
            # Where the prompt's log-probabilities are wanted, routing names none.
            may_go_on = await pull_prefix(context, held, submit.prefix_peers)
            if not may_go_on or len(tokens) - held.leading * context.block_tokens <= context.block_tokens:
                return
        for attempt, peer in enumerate(peers, start=1):
            if await self._ask(peer, attempt, tokens, held):
                return
            if attempt < len(peers):
                context.metrics.fallbacks.labels("peer").inc()
        if peers:
            context.metrics.fallbacks.labels("local").inc()
            log.warning("request %s: the rest of its prompt is computed here", submit.request_id)

    async def _ask(self, peer: wire.Peer, attempt: int, tokens: Sequence[int], held: HeldBlocks) -> bool:
        """Have one prefill worker compute the KV of `tokens`. False: ask the next one."""
        context = self._context
        told = 0

        def on_prompt_logprobs(logprobs: Sequence[wire.TokenLogprob]) -> None:
            # A run tells them from the first one on, also where an earlier run told some of them.
            nonlocal told
            known = max(0, self._scored - told)
            told += len(logprobs)
            self._on_prompt_logprobs(peer, logprobs[known:])

        job = PrefillJob(
            # Runs of all decode workers meet on one prefill worker, also those of earlier attempts.
            run_id=f"{self._engine_id}@{context.identity.worker_id}/{context.identity.incarnation}/{attempt}",
            submit=self._submit,
            token_ids=tokens,
            held=held,
            on_first_token=lambda token: self._on_first_token(peer, token),
            on_prompt_logprobs=on_prompt_logprobs,
            on_done=self._on_prefill_done,
        )
        with _tracer.start_as_current_span("remote prefill") as span:
            span.set_attribute("antiphon.prefill_worker_id", peer.worker_id)
            try:
                await RemotePrefill(context, job, peer, span).run()
            except PrefillPeerFailed as error:
                context.metrics.remote_prefills.labels("peer_failed").inc()
                span.set_attribute("antiphon.failure", str(error))
                log.warning("request %s: %s", self._submit.request_id, error)
                if self._first_token is not None:
                    # The client has its first token; what is missing is sooner computed here than by another.
                    context.metrics.fallbacks.labels("local").inc()
                    return True
                return False
            except PullFailed as error:
                context.metrics.remote_prefills.labels("pull_failed").inc()
                context.metrics.fallbacks.labels("local").inc()
                span.set_attribute("antiphon.failure", str(error))
                log.warning("request %s: %s; the rest is computed here", self._submit.request_id, error)
                return True
        context.metrics.remote_prefills.labels("complete").inc()
        return True

    def _on_prefill_done(self, unpulled_blocks: int) -> None:
        self._context.metrics.unpulled_at_done.observe(unpulled_blocks)
        self.unpulled_at_done = unpulled_blocks

    # -- output

    def _on_first_token(self, peer: wire.Peer, message: wire.FirstToken) -> None:
        """The prefill worker sampled the first token: it goes out now, long before the KV is here."""
        if self._over or self._first_token is not None or self._submit.output_token_ids:
            # A continued attempt has its first token already; the prefill was for its KV.
            return
        if self._sampling.max_tokens == 0:
            return
        self._first_token = message.token_id
        self._prefill_worker_id = peer.worker_id
        self._computed_elsewhere = True
        self._cached_tokens = message.cached_tokens
        finish = finish_after(
            message.token_id,
            output_tokens=1,
            prompt_tokens=len(self._submit.prompt_token_ids),
            sampling=self._sampling,
            info=self._context.engine.info,
            pool_tokens=self._context.engine.kv.num_blocks * self._context.block_tokens,
        )
        logprobs = (engine_logprob(message.logprob),) if message.HasField("logprob") else ()
        self._send((message.token_id,), logprobs, finish, "")

    def _on_prompt_logprobs(self, peer: wire.Peer, logprobs: Sequence[wire.TokenLogprob]) -> None:
        """The prefill worker tells how likely the prompt's next tokens are."""
        if self._over or not logprobs:
            return
        self._send_prompt_logprobs(logprobs)
        if self._sampling.max_tokens == 0 and self._scored == len(self._submit.prompt_token_ids) - 1:
            self._prefill_worker_id = peer.worker_id
            self._send((), (), FinishReason.LENGTH, "")

    def _send_prompt_logprobs(self, logprobs: Sequence[wire.TokenLogprob]) -> None:
        self._scored += len(logprobs)
        self._sink.step(wire.RequestStep(prompt_logprobs=logprobs))

    def _on_output(self, output: RequestOutput) -> None:
        if self._over:
            return
        if output.prompt_logprobs:
            self._send_prompt_logprobs([wire_logprob(logprob) for logprob in output.prompt_logprobs])
            if not output.token_ids and output.finish is None:
                return
        if not self._computed_elsewhere:
            self._cached_tokens = self._uncomputed_tokens(output.cached_tokens)
        try:
            self._send(output.token_ids, output.logprobs, output.finish, output.error)
        except Exception as error:
            # On the way of a whole step: the other requests in it must not suffer.
            log.exception("the output of request %s could not be made into an answer", self._submit.request_id)
            self._fail(f"{type(error).__name__}: {error}")

    def _uncomputed_tokens(self, cached_tokens: int) -> int:
        """Of the tokens that the engine found, those that nobody computed for this request.

        After a prefill worker failed before its first token, it had computed what was pulled from it.
        """
        if self._held is None or not self._submit.prefill:
            return cached_tokens
        return min(cached_tokens, self._held.own_blocks * self._context.block_tokens)

    def _send(
        self,
        token_ids: tuple[int, ...],
        logprobs: tuple[TokenLogprob, ...],
        finish: FinishReason | None,
        error: str,
    ) -> None:
        delta = self._text.push(token_ids, logprobs, finish)
        step = wire.RequestStep(
            token_ids=delta.token_ids,
            text=delta.text,
            logprobs=[wire_logprob(logprob) for logprob in delta.logprobs],
            held_logprobs=[wire_logprob(logprob) for logprob in delta.held_logprobs],
            finish=wire_finish(delta.finish),
            error=error,
            stop_reason=delta.stop_reason,
        )
        if not self._sent_usage:
            self._context.metrics.prompt_tokens.inc(len(self._submit.prompt_token_ids))
            self._context.metrics.cached_tokens.inc(self._cached_tokens)
            self._span.add_event("first token")
        if not self._sent_usage or delta.finish is not None:
            self._sent_usage = True
            step.usage.CopyFrom(self._usage())
        self._teller.tell(step)
        if delta.finish is not None:
            self._end(delta.finish.value)

    def _usage(self) -> wire.Usage:
        return wire.Usage(
            prompt_tokens=len(self._submit.prompt_token_ids),
            cached_tokens=self._cached_tokens,
            completion_tokens=self._text.tokens,
            prefill_worker_id=self._prefill_worker_id,
            pulled_blocks=self._held.pulled if self._held is not None else 0,
        )

    # -- the end

    def _fail(self, message: str) -> None:
        if not self._over:
            self._teller.tell(wire.RequestStep(finish=wire.Finish.FINISH_ERROR, error=message, usage=self._usage()))
            self._end("error")

    def _let_go(self) -> None:
        # Also after a finish of the engine's own, where it is ignored.
        self._context.engine.cancel(self._engine_id)

    def _end(self, ending: str) -> None:
        if self._over:
            return
        self._over = True
        self._context.bridge.unsubscribe(self._engine_id)
        prepare = self._prepare
        if prepare is None or prepare.done() or prepare is asyncio.current_task():
            self._let_go()
        else:
            # A pull that is about to begin must not find its blocks given to somebody else.
            prepare.add_done_callback(lambda _: self._let_go())
            prepare.cancel()
        self._context.metrics.requests.labels("decode", ending).inc()
        self._span.set_attribute("antiphon.ending", ending)
        self._span.set_attribute("antiphon.completion_tokens", self._text.tokens)
        self._span.end()
        self._on_end(self)
