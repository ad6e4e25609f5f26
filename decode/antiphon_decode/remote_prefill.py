"""One prompt computed by a peer: the decode worker's side of one `Prefill.Run` call.

Several things go on at once while the prefill worker P computes the prompt chunk by chunk, each a task of one group:

* *read* takes what P says: chunks that are ready, the first token, that all is done; silence is a failure;
* *write* sends credit as it is given, and heartbeats in between;
* *grow* reserves our blocks a few chunks ahead of P, each time giving P the credit to compute that far;
* *fetch* pulls the blocks of each chunk while P computes the next one, and publishes them in order.

The first token is handed on at once: it waits for no block. Whatever goes wrong ends the call, upon which P frees
all that it holds for us, and is raised as one of two errors: `PrefillPeerFailed` (another peer may do it) or
`PullFailed` (the blocks do not come over: compute here). Blocks that are in by then stay in.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import grpc
import grpc.aio
from antiphon_kvtransfer.links import LinkError, PeerLink
from antiphon_proto import worker_pb2 as wire
from antiphon_proto.worker_pb2_grpc import PrefillStub
from antiphon_telemetry.tracing import inject
from antiphon_worker.channels import is_end
from antiphon_worker.held import BlockPuller, HeldBlocks
from antiphon_worker.service import WorkerContext
from antiphon_worker.wire import peer_address
from opentelemetry import trace

from antiphon_decode.errors import PrefillPeerFailed, PullFailed

CHUNKS_AHEAD = 4
"""How many chunks of blocks are reserved, and credited to P, beyond what P has finished."""

PULLS_IN_FLIGHT = 2
PROGRESS_DEADLINE_S = 120.0
"""For the next chunk, while P is heard: the longest that a prompt waits in its queue, or for its engine."""

RESERVE_DEADLINE_S = 30.0
"""For room that was promised and is held up by reads that others gave up."""


@dataclass(frozen=True, slots=True)
class PrefillJob:
    """What is asked of a prefill worker."""

    run_id: str
    """Unique among all runs of all decode workers; the partial block is asked for under it."""
    submit: wire.Submit
    token_ids: Sequence[int]
    """To compute: the prompt and, of an answer that another worker began, its output."""
    held: HeldBlocks
    on_first_token: Callable[[wire.FirstToken], None]
    on_prompt_logprobs: Callable[[Sequence[wire.TokenLogprob]], None]
    """Called with those of the prompt's next tokens, before its first output token."""
    on_done: Callable[[int], None]
    """Called when P has finished the prompt, with how many full blocks are not in yet."""


_Call = grpc.aio.StreamStreamCall[wire.RunUp, wire.RunDown]


class RemotePrefill:
    """One run. `run` is called once; cancelling it ends the call."""

    def __init__(self, context: WorkerContext, job: PrefillJob, peer: wire.Peer, span: trace.Span) -> None:
        self._context = context
        self._job = job
        self._held = job.held
        self._peer = peer
        self._span = span
        self._puller = BlockPuller(job.held, context.metrics, context.engine.info.kv_block_bytes)
        self._ready_blocks = 0
        self._done: wire.RunDone | None = None
        self._given_up: PrefillPeerFailed | None = None
        """P said that it will not go on: what is being pulled still comes in, so that another may go on from there."""
        self._advanced = asyncio.Event()
        """P got further: `grow` may go on."""
        self._fetchable = asyncio.Event()
        """Something changed that `fetch` waits for."""
        self._claimed = 0
        """Leading blocks that are in or being pulled."""
        self._pulls: set[asyncio.Task[None]] = set()
        self._outgoing: asyncio.Queue[wire.RunUp] = asyncio.Queue()

    async def run(self) -> None:
        """Return once the KV of the whole prompt is in and published.

        Raises PrefillPeerFailed or PullFailed, or KeyError if the engine says that our request is gone.
        """
        address = peer_address(self._peer)
        try:
            link = await self._context.links.link(address, self._context.lost_after_s)
        except LinkError as error:
            raise PrefillPeerFailed(f"no link to {self._peer.worker_id}: {error}") from error
        call: _Call = PrefillStub(self._context.channels.channel(address)).Run()  # type: ignore[call-arg]
        try:
            async with asyncio.TaskGroup() as group:
                helpers = [
                    group.create_task(self._read(call)),
                    group.create_task(self._write(call)),
                    group.create_task(self._grow()),
                ]
                await self._fetch(link, group)
                for helper in helpers:
                    helper.cancel()
        except BaseExceptionGroup as failures:
            raise self._failure(failures) from None
        finally:
            # Ends the run on P, which then frees what it holds for us.
            call.cancel()

    # -- read

    async def _read(self, call: _Call) -> None:
        loop = asyncio.get_running_loop()
        progress_at = loop.time()
        while True:
            try:
                async with asyncio.timeout(self._context.lost_after_s):
                    message = await call.read()
            except TimeoutError:
                raise self._failed(f"was not heard for {self._context.lost_after_s:.1f} s") from None
            except grpc.aio.AioRpcError as error:
                raise self._failed(f"broke the call: {error.code().name} {error.details()}") from error
            if is_end(message):
                raise self._failed(f"ended the call: {(await call.code()).name} {await call.details()}")
            down = cast(wire.RunDown, message)
            if down.HasField("failed"):
                self._given_up = self._failed(f"gave it up: {down.failed.message}")
                self._fetchable.set()
                return
            if not down.HasField("heartbeat") or self._done is not None:
                progress_at = loop.time()
            elif loop.time() - progress_at > PROGRESS_DEADLINE_S:
                raise self._failed(f"made no progress for {PROGRESS_DEADLINE_S:.0f} s")
            self._take(down)

    def _take(self, message: wire.RunDown) -> None:
        match message.WhichOneof("kind"):
            case "accepted":
                self._span.add_event("accepted", {"antiphon.cached_blocks": message.accepted.cached_blocks})
            case "refused":
                reason = wire.RefusalReason.Name(message.refused.reason)
                raise self._failed(f"refused the prompt ({reason}): {message.refused.message}")
            case "chunk":
                if message.chunk.prompt_logprobs:
                    self._job.on_prompt_logprobs(message.chunk.prompt_logprobs)
                self._advance(message.chunk.blocks)
            case "first_token":
                self._span.add_event("first token")
                self._job.on_first_token(message.first_token)
            case "done":
                self._span.add_event("done")
                self._finish(message.done)
            case _:
                pass  # a heartbeat: being heard is all there is to it

    def _advance(self, blocks: int) -> None:
        self._ready_blocks = max(self._ready_blocks, min(blocks, self._held.full_blocks))
        self._advanced.set()
        self._fetchable.set()

    def _finish(self, done: wire.RunDone) -> None:
        partial_tokens = len(self._job.token_ids) % self._context.block_tokens
        if done.blocks != self._held.full_blocks or done.partial_tokens != partial_tokens:
            raise self._failed(
                f"finished {done.blocks} blocks and {done.partial_tokens} tokens where "
                f"{self._held.full_blocks} and {partial_tokens} were asked for: do its block sizes differ?"
            )
        self._done = done
        self._job.on_done(self._held.full_blocks - self._held.own_blocks - self._held.pulled)
        self._advance(done.blocks)

    def _failed(self, what: str) -> PrefillPeerFailed:
        return PrefillPeerFailed(f"prefill worker {self._peer.worker_id} {what}")

    # -- write

    async def _write(self, call: _Call) -> None:
        submit = self._job.submit
        start = wire.RunStart(
            request_id=self._job.run_id,
            incarnation=self._peer.incarnation,
            prompt_token_ids=self._job.token_ids,
            sampling=submit.sampling,
            cache_salt=submit.cache_salt,
            credit_blocks=self._held.reserved,
            prefix_peers=submit.prefix_peers,
            traceparent=inject(self._span),
        )
        if submit.output_token_ids:
            # What P samples then is dropped, and its grammar would not begin there; of the prompt all has been said.
            start.sampling.ClearField("grammar")
            start.sampling.ClearField("prompt_logprobs")
        message = wire.RunUp(start=start)
        while True:
            try:
                async with asyncio.timeout(self._context.lost_after_s):
                    await call.write(message)
            except TimeoutError:
                raise self._failed(f"did not read for {self._context.lost_after_s:.1f} s") from None
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                return  # the call is over: `read` hears why
            try:
                async with asyncio.timeout(self._context.heartbeat_s):
                    message = await self._outgoing.get()
            except TimeoutError:
                message = wire.RunUp(heartbeat=wire.Heartbeat())

    # -- grow

    async def _grow(self) -> None:
        held, chunk = self._held, self._context.chunk_blocks
        while held.reserved < held.total_blocks:
            ahead = min(max(self._ready_blocks, held.leading) + CHUNKS_AHEAD * chunk, held.total_blocks)
            if held.reserved >= ahead:
                self._advanced.clear()
                await self._advanced.wait()
            elif await self._context.bridge.room(partial(held.reserve, ahead), RESERVE_DEADLINE_S):
                self._outgoing.put_nowait(wire.RunUp(credit=wire.Credit(blocks=held.reserved)))
                self._fetchable.set()
            else:
                raise PullFailed(f"no room for the blocks within {RESERVE_DEADLINE_S:.0f} s")

    # -- fetch

    async def _fetch(self, link: PeerLink, group: asyncio.TaskGroup) -> None:
        held = self._held
        while self._done is None or held.leading < held.full_blocks:
            if self._given_up is not None and not self._pulls:
                raise self._given_up
            while len(self._pulls) < PULLS_IN_FLIGHT and (stretch := self._next_stretch()) is not None:
                pull = group.create_task(self._pull(link, *stretch))
                self._pulls.add(pull)
                pull.add_done_callback(self._pulled)
            self._fetchable.clear()
            await self._fetchable.wait()
        if held.total_blocks > held.full_blocks:
            await self._pull_partial(link)
        held.publish_all()

    def _next_stretch(self) -> tuple[int, int] | None:
        if self._given_up is not None:
            return None
        begin = max(self._claimed, self._held.leading)
        end = min(self._ready_blocks, begin + self._context.chunk_blocks)
        stretch = self._held.missing(begin, end)
        if stretch is not None:
            self._claimed = stretch[1]
        return stretch

    def _pulled(self, pull: asyncio.Task[None]) -> None:
        # One that was given up stays: its read may still be writing.
        if not pull.cancelled() and pull.exception() is None:
            self._pulls.discard(pull)
            self._fetchable.set()

    async def _pull(self, link: PeerLink, begin: int, end: int) -> None:
        """Pull full blocks [begin, end), asking once more for what the peer did not give or could not confirm."""
        for _ in range(2):
            try:
                begin += await self._puller.pull(link, begin, end)
            except LinkError as error:
                # Not tried again: the read that was given up may still write into these blocks.
                raise PullFailed(str(error)) from error
            if begin == end:
                return
        raise PullFailed(f"worker {self._peer.worker_id} does not have {end - begin} blocks that it announced")

    async def _pull_partial(self, link: PeerLink) -> None:
        for _ in range(2):
            try:
                if await self._puller.pull_partial(link, self._job.run_id):
                    return
            except LinkError as error:
                raise PullFailed(str(error)) from error
        raise PullFailed(f"worker {self._peer.worker_id} does not have the last, partial block")

    def _failure(self, failures: BaseExceptionGroup[BaseException]) -> BaseException:
        """The one that tells. With a read under way, another peer's must not land in the same blocks."""
        failure = failures.exceptions[0]
        reading = bool(self._pulls) or self._done is not None
        if isinstance(failure, PrefillPeerFailed) and reading:
            return PullFailed(f"{failure}, in mid-pull")
        return failure
