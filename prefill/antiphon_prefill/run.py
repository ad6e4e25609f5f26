"""One prompt computed for a decode worker: the prefill worker's side of one `Prefill.Run` call.

The request is submitted to the engine as PREFILL with the caller's credit; what the engine's steps bring goes down the
call as it comes. Where peers hold more of the prefix than we do, the request starts held, the prefix is pulled, and the
engine computes the rest. After RunDone the blocks stay, for the caller to pull, until it ends the call.

Everything that is held for the caller is held by this one coroutine. It ends when the caller ends the call, when
nothing was heard of it for the deadline, or when the run fails; its `finally` lets go of all.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence

import grpc.aio
from antiphon_engine.interface import EngineRequest, PrefillProgress, RequestKind, RequestRefused
from antiphon_kvtransfer.identity import BlockHash, chain_hashes
from antiphon_proto import worker_pb2 as wire
from antiphon_telemetry.tracing import extract, tracer
from antiphon_worker.channels import is_end
from antiphon_worker.held import HeldBlocks
from antiphon_worker.prefix import pull_prefix
from antiphon_worker.service import WorkerContext
from antiphon_worker.wire import engine_sampling, wire_logprob
from opentelemetry import trace

_tracer = tracer("antiphon.prefill")

Stream = grpc.aio.ServicerContext[wire.RunUp, wire.RunDown]


class _RunOver(Exception):
    """Nobody waits for this run any more; the message says why."""


class PrefillRun:
    """Serves one call. Raises RequestRefused from `submit`; after that, `serve` once."""

    def __init__(self, context: WorkerContext, stream: Stream, start: wire.RunStart) -> None:
        self._context = context
        self._stream = stream
        self._start = start
        self._outgoing: asyncio.Queue[wire.RunDown] = asyncio.Queue()
        self._hashes: Sequence[BlockHash] = chain_hashes(
            context.root(start.cache_salt), start.prompt_token_ids, context.block_tokens
        )
        self._held = False
        self._span = _tracer.start_span("prefill", context=extract(start.traceparent))
        self._announced_blocks = 0
        self._given_back = False
        self.complete = False
        """Whether the whole prompt was computed."""

    def submit(self) -> None:
        """Give it to the engine. Raises RequestRefused."""
        context, start = self._context, self._start
        # Whoever wants to know how likely the prompt is has all of it computed.
        scores = start.sampling.HasField("prompt_logprobs")
        cached = 0 if scores else context.engine.lookup(self._hashes)
        self._held = not scores and any(
            peer.peer.worker_id != context.identity.worker_id and min(peer.blocks, len(self._hashes)) > cached
            for peer in start.prefix_peers
        )
        # Only the first token is sampled here, whatever the client's limits are for the whole answer.
        sampling = engine_sampling(start.sampling)
        sampling = dataclasses.replace(sampling, max_tokens=1, min_tokens=min(sampling.min_tokens, 1))
        request = EngineRequest(
            request_id=start.request_id,
            prompt=list(start.prompt_token_ids),
            sampling=sampling,
            kind=RequestKind.PREFILL,
            cache_salt=start.cache_salt,
            held=self._held,
            credit_blocks=start.credit_blocks,
        )
        try:
            context.engine.submit(request)
        except RequestRefused as refusal:
            self._span.set_attribute("antiphon.refused", str(refusal))
            self._span.end()
            raise
        context.bridge.subscribe_prefill(start.request_id, self._on_progress)
        self._outgoing.put_nowait(wire.RunDown(accepted=wire.RunAccepted(cached_blocks=cached)))

    async def serve(self) -> str:
        """Until the run is over; says why it is. Whatever happens, the engine holds nothing for it afterwards."""
        context, run_id = self._context, self._start.request_id
        span = self._span
        span.set_attribute("antiphon.request_id", run_id)
        span.set_attribute("antiphon.worker_id", context.identity.worker_id)
        span.set_attribute("antiphon.prompt_tokens", len(self._start.prompt_token_ids))
        ending = "the call was cancelled"
        try:
            with trace.use_span(span, end_on_exit=False, record_exception=False, set_status_on_exception=False):
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._read())
                    group.create_task(self._write())
                    if self._held:
                        group.create_task(self._get_prefix())
        except* _RunOver as over:
            ending = str(over.exceptions[0])
        finally:
            context.bridge.unsubscribe(run_id)
            context.engine.cancel(run_id)
            span.set_attribute("antiphon.ending", ending)
            span.end()
        return ending

    def give_back(self, why: str) -> None:
        """The rest of the prompt is to be computed elsewhere. Nothing, if there is no rest. Idempotent."""
        if not self.complete and not self._given_back:
            self._given_back = True
            self._outgoing.put_nowait(wire.RunDown(failed=wire.RunFailed(message=why)))

    # -- down

    def _on_progress(self, progress: PrefillProgress) -> None:
        """On the event loop, with each step that advanced the prompt."""
        if self._given_back:
            return
        if progress.error:
            self._outgoing.put_nowait(wire.RunDown(failed=wire.RunFailed(message=progress.error)))
            return
        if progress.prompt_logprobs:
            # Before the first token, as the client gets them in this order, and before the blocks that they belong to.
            told = [wire_logprob(logprob) for logprob in progress.prompt_logprobs]
            chunk = wire.ChunkReady(blocks=self._announced_blocks, prompt_logprobs=told)
            self._outgoing.put_nowait(wire.RunDown(chunk=chunk))
        if progress.first_token is not None:
            # Before the last chunk: nothing of it may come between the client and its first token.
            first = wire.FirstToken(token_id=progress.first_token, cached_tokens=progress.cached_tokens)
            if progress.first_logprob is not None:
                first.logprob.CopyFrom(wire_logprob(progress.first_logprob))
            self._span.add_event("first token")
            self._outgoing.put_nowait(wire.RunDown(first_token=first))
        if progress.full_blocks > self._announced_blocks:
            self._announced_blocks = progress.full_blocks
            self._span.add_event("chunk", {"antiphon.blocks": progress.full_blocks})
            self._outgoing.put_nowait(wire.RunDown(chunk=wire.ChunkReady(blocks=progress.full_blocks)))
        if progress.first_token is not None:
            done = wire.RunDone(blocks=progress.full_blocks, partial_tokens=progress.partial_tokens)
            self._outgoing.put_nowait(wire.RunDown(done=done))
            self.complete = True

    async def _write(self) -> None:
        while True:
            try:
                async with asyncio.timeout(self._context.heartbeat_s):
                    message = await self._outgoing.get()
            except TimeoutError:
                message = wire.RunDown(heartbeat=wire.Heartbeat())
            try:
                async with asyncio.timeout(self._context.lost_after_s):
                    await self._stream.write(message)
            except TimeoutError:
                raise _RunOver("the decode worker does not read") from None
            except grpc.aio.BaseError as error:
                raise _RunOver(f"the call broke: {error}") from error
            if message.HasField("failed"):
                raise _RunOver(message.failed.message)

    # -- up

    async def _read(self) -> None:
        lost_after_s = self._context.lost_after_s
        while True:
            try:
                async with asyncio.timeout(lost_after_s):
                    message = await self._stream.read()
            except TimeoutError:
                raise _RunOver(f"the decode worker was not heard for {lost_after_s:.1f} s") from None
            except grpc.aio.BaseError as error:
                raise _RunOver(f"the call broke: {error}") from error
            if is_end(message):
                raise _RunOver("the decode worker ended the call")
            if message.HasField("credit"):
                self._context.engine.grant(self._start.request_id, message.credit.blocks)

    async def _get_prefix(self) -> None:
        context, run_id = self._context, self._start.request_id
        held = HeldBlocks(context.engine, run_id, len(self._start.prompt_token_ids), self._hashes)
        await pull_prefix(context, held, self._start.prefix_peers)
        context.engine.resume(run_id)
