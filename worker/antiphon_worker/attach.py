"""The worker's end of the one stream that joins it with each gateway.

Requests come up the stream; what each engine step brought for all of this gateway's requests goes down it in one
message, with the queue's state; a gateway whose requests got nothing is told the state by itself (`load_news`). The
stream is the health signal: both ends send heartbeats, and a gateway that has not been heard for the deadline, or whose
stream broke, is gone: all its requests are cancelled. Silence is counted in ticks of ours, so that a pause of this
process does not count against gateways. A gateway that does not read is broken off before its unread messages cost
memory; it sees a broken stream and may attach again.

`AttachServicer` serves the streams; `_Session` is one of them. What is done with a request is the decode role's:
it is given as a `SubmitHandler`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import grpc
import grpc.aio
from antiphon_proto import worker_pb2 as wire
from antiphon_proto.worker_pb2_grpc import WorkerServicer

from antiphon_worker.channels import is_end
from antiphon_worker.load_news import LoadNews
from antiphon_worker.peers import WantedPeers
from antiphon_worker.role import ChangeOutdated, ChangeRefused
from antiphon_worker.role_change import change_role
from antiphon_worker.service import WorkerContext
from antiphon_worker.wire import peer_address

log = logging.getLogger("antiphon.worker")

TICKS_OF_SILENCE = 6
"""A gateway is lost after so many looks that found nothing of it."""

REST_S = 0.5
"""How long the end of a stream waits for what was said before it. Less than the server's own stop takes."""

MAX_OUTGOING_MESSAGES = 4096
"""Messages that a gateway may leave unread before its stream is broken off."""


class RequestSink(Protocol):
    """Where a request's answers go. After `refused`, or a step with a finish, the request is over."""

    def accepted(self) -> None: ...

    def refused(self, reason: wire.RefusalReason.ValueType, message: str) -> None: ...

    def step(self, step: wire.RequestStep) -> None:
        """Send one step's part. The sink fills in `ref`."""


class LiveRequest(Protocol):
    """A request that was taken."""

    def cancel(self) -> None:
        """End it now; nothing is sent for it any more. Idempotent."""


class SubmitHandler(Protocol):
    """Who takes requests."""

    def submit(self, submit: wire.Submit, sink: RequestSink) -> LiveRequest | None:
        """Take or refuse at once, by calling `sink`; None if refused."""


class AttachServicer(WorkerServicer):
    """Serves `antiphon.worker.v1.Worker`."""

    def __init__(self, context: WorkerContext, handler: SubmitHandler, card: wire.ModelCard) -> None:
        self._context = context
        self._handler = handler
        self._card = card
        self._peers = WantedPeers(context.links, context.identity.worker_id)
        self._sessions: set[_Session] = set()
        self._news = LoadNews(context.load, self._sessions)
        context.bridge.observe(self._news.observe)
        context.role.on_change.append(self._tell_gateways)
        context.drain.on_begin.append(self._tell_gateways)

    @property
    def gateways(self) -> int:
        """Gateways attached now."""
        return len(self._sessions)

    async def GetModelCard(  # noqa: N802
        self,
        request: wire.GetModelCardRequest,
        context: grpc.aio.ServicerContext[wire.GetModelCardRequest, wire.ModelCard],
    ) -> wire.ModelCard:
        return self._card

    async def Attach(  # type: ignore[override]  # noqa: N802
        self, request_iterator: object, context: grpc.aio.ServicerContext[wire.GatewayMessage, wire.WorkerMessage]
    ) -> None:
        session = _Session(self._context, self._handler, self._peers, self._card.digest, context, self._news.changed)
        self._sessions.add(session)
        self._context.load.gateways = len(self._sessions)
        try:
            # By themselves: grpc cannot end a call whose first message, with them inside, is still being written.
            await context.send_initial_metadata(())
            reason = await session.run()
        finally:
            self._sessions.discard(session)
            self._context.load.gateways = len(self._sessions)
            session.keep_nothing_back()
        if not context.done():
            # Where the gateway does not read, this waits with nothing held but the call, until it does or goes away.
            await context.abort(grpc.StatusCode.UNAVAILABLE, reason)

    async def SetRole(  # noqa: N802
        self,
        request: wire.SetRoleRequest,
        context: grpc.aio.ServicerContext[wire.SetRoleRequest, wire.SetRoleReply],
    ) -> wire.SetRoleReply:
        try:
            change_role(self._context, request)
        except ChangeRefused as refused:
            outdated = isinstance(refused, ChangeOutdated)
            await context.abort(
                grpc.StatusCode.ABORTED if outdated else grpc.StatusCode.FAILED_PRECONDITION, str(refused)
            )
        role = self._context.role
        return wire.SetRoleReply(role=role.wire, role_version=role.version)

    def _tell_gateways(self) -> None:
        """The role has changed, or a drain begins. Gateways hear it before any refusal that comes of it, and before the
        end of the worker: all go the same way."""
        if self._sessions:
            message = wire.WorkerMessage(step=wire.StepBatch(queue=self._context.load.now()))
            for session in self._sessions:
                session.tell_at_once(message)

    def break_off(self, reason: str) -> None:
        """End every stream, so that gateways know at once."""
        self._news.close()
        for session in self._sessions:
            session.say_goodbye(reason)


class _Session:
    """One gateway's stream."""

    def __init__(
        self,
        context: WorkerContext,
        handler: SubmitHandler,
        peers: WantedPeers,
        card_digest: str,
        stream: grpc.aio.ServicerContext[wire.GatewayMessage, wire.WorkerMessage],
        news: Callable[[], None],
    ) -> None:
        """`news`: all gateways are told of the load soon."""
        self._context = context
        self._handler = handler
        self._peers = peers
        self._card_digest = card_digest
        self._stream = stream
        self._news = news
        self._loop = asyncio.get_running_loop()
        self._gateway_id = "?"
        self._welcomed = False
        self._requests: dict[int, LiveRequest] = {}
        self._steps: list[wire.RequestStep] = []
        self._outgoing: deque[wire.WorkerMessage] = deque()
        self._outgoing_ready = asyncio.Event()
        self._all_written = asyncio.Event()
        self._all_written.set()
        self._silent_s = 0.0
        self._sent_at = self._loop.time()
        self._writing = False
        self._unread_s = 0.0
        """For how long the message that is being written was not taken."""
        self._lost_after_s = context.lost_after_s
        self.owed_load = False
        self._says_the_rest = False
        """At the end, what was said before still goes down."""
        self._ended: asyncio.Future[str] = self._loop.create_future()

    async def run(self) -> str:
        """Until the stream is over for whatever reason, which is returned."""
        tasks = [
            self._loop.create_task(self._read(), name="attach-read"),
            self._loop.create_task(self._write(), name="attach-write"),
            self._loop.create_task(self._watch(), name="attach-watch"),
        ]
        reason = "the stream was cancelled"
        try:
            waited: list[asyncio.Future[Any]] = [*tasks, self._ended]
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            reason = self._reason(tasks)
            if self._says_the_rest:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(REST_S):
                        await self._all_written.wait()
        finally:
            self.break_off(reason)
            self._peers.depart(self)
            live = list(self._requests.values())
            self._requests.clear()
            for request in live:
                request.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            log.info("gateway %s detached: %s (%d requests cancelled)", self._gateway_id, reason, len(live))
        return reason

    def say_goodbye(self, reason: str) -> None:
        """The worker ends: the last tokens of the last answers may be on their way."""
        self._says_the_rest = True
        self.break_off(reason)

    def break_off(self, reason: str) -> None:
        if not self._ended.done():
            self._ended.set_result(reason)

    def _reason(self, tasks: list[asyncio.Task[None]]) -> str:
        if self._ended.done():
            return self._ended.result()
        for task in tasks:
            if task.done() and not task.cancelled():
                error = task.exception()
                if error is not None and not isinstance(error, grpc.aio.BaseError | grpc.RpcError):
                    log.error("the stream of gateway %s failed", self._gateway_id, exc_info=error)
                return "the stream broke" if error is None else f"the stream failed: {error}"
        return "the stream broke"

    # -- up

    async def _read(self) -> None:
        try:
            async with asyncio.timeout(self._lost_after_s):
                first = await self._stream.read()
        except TimeoutError:
            return self.break_off("no Hello came in time")
        if is_end(first) or first.WhichOneof("kind") != "hello":
            return self.break_off("the first message must be Hello")
        self._welcome(first.hello)
        while True:
            message = await self._stream.read()
            if is_end(message):
                return self.break_off("the gateway ended the stream")
            self._silent_s = 0.0
            match message.WhichOneof("kind"):
                case "submit":
                    self._submit(message.submit)
                case "cancel":
                    request = self._requests.pop(message.cancel.ref, None)
                    if request is not None:
                        request.cancel()
                case "peers":
                    self._peers.replace(self, [peer_address(peer) for peer in message.peers.peers])
                case "kept_back":
                    self._keep_back(message.kept_back)
                case _:
                    pass  # a heartbeat: being heard is all there is to it

    def _welcome(self, hello: wire.Hello) -> None:
        self._gateway_id = hello.gateway_id
        self._welcomed = True
        self._lost_after_s = max(self._context.lost_after_s, 3 * hello.heartbeat_ms / 1000.0)
        self._silent_s = 0.0
        identity, role = self._context.identity, self._context.role
        self._send(
            wire.WorkerMessage(
                welcome=wire.Welcome(
                    worker_id=identity.worker_id,
                    incarnation=identity.incarnation,
                    role=role.wire,
                    role_version=role.version,
                    card_digest=self._card_digest,
                    heartbeat_ms=self._context.options.heartbeat_ms,
                    queue=self._context.load.now(),
                    revision=self._context.options.revision,
                    hardware=self._context.hardware,
                )
            )
        )
        log.info("gateway %s attached", self._gateway_id)

    def _submit(self, submit: wire.Submit) -> None:
        if submit.ref in self._requests:
            self.break_off(f"ref {submit.ref} was used twice")
            return
        sink = _Sink(self, submit.ref)
        request = self._handler.submit(submit, sink)
        if request is not None and not sink.over:
            self._requests[submit.ref] = request

    def _keep_back(self, kept: wire.KeptBack) -> None:
        if kept.tokens:
            self._context.load.kept_back[self._gateway_id] = (kept, time.monotonic())
            self._news()
        else:
            self.keep_nothing_back()

    def keep_nothing_back(self) -> None:
        if self._context.load.kept_back.pop(self._gateway_id, None) is not None:
            self._news()

    # -- down

    def answer(self, message: wire.WorkerMessage) -> None:
        self._send(message)

    def answer_step(self, step: wire.RequestStep) -> None:
        """Collect what one engine step brought; it goes out when the current turn of the event loop ends."""
        if not self._steps:
            self._loop.call_soon(self._flush_steps)
        self._steps.append(step)

    @property
    def takes_load(self) -> bool:
        # Behind the welcome, which has the load; and not where steps with the load are about to go.
        return self._welcomed and not (self._steps or self._outgoing or self._writing or self._ended.done())

    def tell_load(self, message: wire.WorkerMessage) -> None:
        self.owed_load = False
        self._send(message)

    def tell_at_once(self, message: wire.WorkerMessage) -> None:
        """Whoever was not welcomed yet hears it then."""
        if self._welcomed and not self._ended.done():
            self.tell_load(message)

    def forget(self, ref: int) -> None:
        self._requests.pop(ref, None)

    def _flush_steps(self) -> None:
        steps, self._steps = self._steps, []
        if steps and not self._ended.done():
            self.owed_load = False
            batch = wire.StepBatch(steps=steps, queue=self._context.load.of_last_step())
            self._send(wire.WorkerMessage(step=batch))

    def _send(self, message: wire.WorkerMessage) -> None:
        if len(self._outgoing) >= MAX_OUTGOING_MESSAGES:
            self.break_off(f"the gateway left {len(self._outgoing)} messages unread")
            return
        self._outgoing.append(message)
        self._all_written.clear()
        self._outgoing_ready.set()

    async def _write(self) -> None:
        while True:
            while self._outgoing:
                message = self._outgoing.popleft()
                self._unread_s, self._writing = 0.0, True
                await self._stream.write(message)
                self._writing = False
                self._sent_at = self._loop.time()
            self._outgoing_ready.clear()
            self._all_written.set()
            await self._outgoing_ready.wait()

    async def _watch(self) -> None:
        """Heartbeats down while nothing else goes; the deadline of what comes up and of what is not read."""
        heartbeat_s = self._context.heartbeat_s
        tick_s = min(heartbeat_s, self._context.lost_after_s / TICKS_OF_SILENCE)
        while True:
            await asyncio.sleep(tick_s)
            self._silent_s += tick_s
            self._unread_s += tick_s
            if self._silent_s > self._lost_after_s:
                return self.break_off(f"the gateway was not heard for {self._lost_after_s:.1f} s")
            if self._writing and self._unread_s > self._lost_after_s:
                return self.break_off(f"the gateway did not read for {self._lost_after_s:.1f} s")
            is_due = self._loop.time() >= self._sent_at + heartbeat_s - tick_s
            if self._welcomed and is_due and not self._outgoing and not self._writing:
                self.owed_load = False
                self._send(wire.WorkerMessage(heartbeat=wire.Heartbeat(queue=self._context.load.now())))


class _Sink:
    """The answers of one request on one stream."""

    def __init__(self, session: _Session, ref: int) -> None:
        self._session = session
        self._ref = ref
        self.over = False

    def accepted(self) -> None:
        self._session.answer(wire.WorkerMessage(accepted=wire.Accepted(ref=self._ref)))

    def refused(self, reason: wire.RefusalReason.ValueType, message: str) -> None:
        self._end()
        self._session.answer(wire.WorkerMessage(refused=wire.Refused(ref=self._ref, reason=reason, message=message)))

    def step(self, step: wire.RequestStep) -> None:
        step.ref = self._ref
        if step.finish != wire.Finish.FINISH_NONE:
            self._end()
        self._session.answer_step(step)

    def _end(self) -> None:
        self.over = True
        self._session.forget(self._ref)
