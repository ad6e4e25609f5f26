"""The one long stream between this gateway and one worker.

    CONNECTING -> (Hello, Welcome, card known) -> ATTACHED -> lost -> back-off -> CONNECTING ...

The stream is the health signal. Both ends send heartbeats; a worker that was silent for `lost_after_ms` is lost, as
is one whose stream broke, and every request on it hears of that at once. Silence is counted in heartbeat ticks of
ours, so that a pause of this process does not count against the worker.

Owned by the fleet, which runs `run()` as a task and cancels it. Sending never waits (`grpc_stream`); what comes is
handed to each request's `Submission` by a plain call that must return at once, so a slow client never holds up the
stream. A worker that changes its role says so on the stream before it refuses anything for it, and the stream goes on.
The model card, read once, is an ordinary call of grpc's.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import grpc
import grpc.aio
from antiphon_policy.equals import Fitted
from antiphon_policy.latency import StepModel
from antiphon_policy.routing import WorkerRole
from antiphon_proto import worker_pb2 as pb
from antiphon_proto import worker_pb2_grpc as pb_grpc

from antiphon_gateway.groups import Group
from antiphon_gateway.grpc_stream import MAX_MESSAGE_BYTES, GrpcStream
from antiphon_gateway.wire_ids import submit_message

log = logging.getLogger("antiphon.gateway")

CONNECT_DEADLINE_S = 5.0
CARD_DEADLINE_S = 30.0
_ATTACH = "/antiphon.worker.v1.Worker/Attach"
_BACK_OFF_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2000),
)

_ROLES = {
    pb.ROLE_PREFILL: WorkerRole.PREFILL,
    pb.ROLE_DECODE: WorkerRole.DECODE,
    pb.ROLE_BOTH: WorkerRole.BOTH,
}


class WorkerUnavailable(Exception):
    """The worker cannot be attached to, or its stream is gone; the message says why."""


class Submission(Protocol):
    """One request on a stream, as the stream sees it. All methods return at once and do not raise.

    After `refused`, `lost`, or a step that finishes, nothing more comes.
    """

    def accepted(self) -> None: ...

    def refused(self, reason: pb.RefusalReason.ValueType, message: str) -> None: ...

    def step(self, step: pb.RequestStep) -> None: ...

    def lost(self, why: str) -> None: ...


class FleetEvents(Protocol):
    """What the owner of worker clients is told. Plain calls that return at once, but for `prepare`."""

    async def prepare(self, client: WorkerClient, welcome: pb.Welcome, stub: Any) -> str:
        """Load what is needed to use a worker that answered; the model's name. Raises WorkerUnavailable."""

    def attached(self, client: WorkerClient) -> None: ...

    def detached(self, client: WorkerClient, why: str) -> None: ...

    def load_changed(self, client: WorkerClient) -> None: ...

    def role_changed(self, client: WorkerClient) -> None:
        """Its attachment has another role, and nothing else is another."""


@dataclass(frozen=True, slots=True)
class Attachment:
    """Who is at the other end, while the stream stands."""

    worker_id: str
    incarnation: str
    role: WorkerRole
    group: Group
    """Whom it may work with."""
    hardware: str = ""
    """What its steps are computed by: workers that say the same are equally fast. Empty: not known."""
    role_version: int = 0
    """Grows with each change of its role."""


@dataclass(frozen=True, slots=True)
class Timing:
    heartbeat_ms: int
    lost_after_ms: int


class WorkerClient:
    """See the module. `attachment` is None while there is no usable stream."""

    def __init__(self, address: str, gateway_id: str, timing: Timing, events: FleetEvents) -> None:
        self.address = address
        self.attachment: Attachment | None = None
        self.queue = pb.QueueState()
        """As the worker last said."""
        self.fitted = Fitted(StepModel())
        """What the worker has learnt of its own steps."""
        self.step_model = self.fitted.model
        """What it is priced by (`equals`)."""
        self.tried = False
        """Whether the worker was attached to, or could not be, at least once."""
        self._gateway_id = gateway_id
        self._timing = timing
        self._events = events
        self._refs = itertools.count(1)
        self._requests: dict[int, Submission] = {}
        self._stream: GrpcStream | None = None
        self._silent_ticks = 0

    # -- for the dispatcher

    @property
    def requests(self) -> int:
        """How many requests of this gateway are on the stream."""
        return len(self._requests)

    def submit(self, submit: pb.Submit, encoded: bytes, submission: Submission) -> int:
        """Send a request; its ref, for `cancel`. Only while attached. `encoded`: the prompt's ids (`wire_ids`), where
        they are not in the message."""
        submit.ref = ref = next(self._refs)
        self._requests[ref] = submission
        if self._stream is not None:
            self._stream.send(submit_message(submit.SerializeToString(), encoded))
        return ref

    def cancel(self, ref: int) -> None:
        """Forget the request and tell the worker. Unknown refs are ignored; no call of the submission follows."""
        if self._requests.pop(ref, None) is not None:
            self._send(pb.GatewayMessage(cancel=pb.Cancel(ref=ref)))

    @property
    def gateway_id(self) -> str:
        """Of this gateway, as the worker knows it."""
        return self._gateway_id

    def keep_back(self, kept: pb.KeptBack) -> None:
        """Tell the worker, and so the other gateways, what waits here."""
        self._send(pb.GatewayMessage(kept_back=kept))

    def send_peers(self, peers: Iterable[pb.Peer]) -> None:
        self._send(pb.GatewayMessage(peers=pb.Peers(peers=peers)))

    def _send(self, message: pb.GatewayMessage) -> None:
        """Nothing happens without a stream: whoever is concerned hears of its loss."""
        if self._stream is not None:
            self._stream.send(message.SerializeToString())

    # -- life

    async def run(self) -> None:
        """Attach, and attach again whenever the stream is lost, until cancelled."""
        failures = 0
        try:
            while True:
                try:
                    await self._attach()
                    failures = 0
                except Exception as error:
                    if not isinstance(error, WorkerUnavailable | grpc.aio.AioRpcError):
                        log.exception("the stream to the worker at %s failed by a fault of this gateway", self.address)
                    failures += 1
                    self.tried = True
                    if failures in (1, 10):
                        log.warning("worker at %s cannot be used: %s; trying again", self.address, _why(error))
                delay = _BACK_OFF_S[min(failures, len(_BACK_OFF_S) - 1)]
                await asyncio.sleep(delay * random.uniform(0.8, 1.2))
        finally:
            self._forget("the gateway ends")

    async def _attach(self) -> None:
        """One life of the stream: returns when it was attached and is lost.

        Raises WorkerUnavailable or AioRpcError where it does not come to that.
        """
        early: list[bytes] = []
        greeted: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def before_attached(message: bytes) -> None:
            early.append(message)
            if not greeted.done():
                greeted.set_result(None)

        try:
            async with asyncio.timeout(CONNECT_DEADLINE_S):
                stream = self._stream = await GrpcStream.open(self.address, _ATTACH, before_attached)
        except TimeoutError as error:
            raise WorkerUnavailable(f"no connection within {CONNECT_DEADLINE_S:g} s") from error
        except OSError as error:
            raise WorkerUnavailable(f"no connection ({error.strerror or error})") from error
        try:
            welcome = await self._greet(stream, greeted, early)
            async with grpc.aio.insecure_channel(self.address, options=CHANNEL_OPTIONS) as channel:
                model = await self._events.prepare(self, welcome, pb_grpc.WorkerStub(channel))
            if welcome.role not in _ROLES:
                raise WorkerUnavailable(f"the worker has the unknown role {welcome.role}")
            await self._converse(stream, welcome, model, early)
        finally:
            self._stream = None
            stream.close()

    async def _greet(self, stream: GrpcStream, greeted: asyncio.Future[None], early: list[bytes]) -> pb.Welcome:
        hello = pb.Hello(gateway_id=self._gateway_id, heartbeat_ms=self._timing.heartbeat_ms)
        self._send(pb.GatewayMessage(hello=hello))
        answers: set[asyncio.Future[Any]] = {greeted, stream.closed}
        await asyncio.wait(answers, timeout=CONNECT_DEADLINE_S, return_when=asyncio.FIRST_COMPLETED)
        if not greeted.done():
            if stream.closed.done():
                raise WorkerUnavailable(f"the stream ended before the welcome: {stream.closed.result()}")
            raise WorkerUnavailable(f"no welcome within {CONNECT_DEADLINE_S:g} s")
        message = pb.WorkerMessage.FromString(early.pop(0))
        if message.WhichOneof("kind") != "welcome":
            raise WorkerUnavailable("the first message was no welcome")
        return message.welcome

    async def _converse(self, stream: GrpcStream, welcome: pb.Welcome, model: str, early: list[bytes]) -> None:
        """`early`: what came since the welcome."""
        self.fitted = Fitted(StepModel())
        self._take_queue(welcome.queue)
        self.attachment = Attachment(
            worker_id=welcome.worker_id,
            incarnation=welcome.incarnation,
            role=_ROLES[welcome.role],
            group=Group(model, welcome.revision, welcome.card_digest),
            hardware=welcome.hardware,
            role_version=welcome.role_version,
        )
        log.info("attached to worker %s (%s) at %s", welcome.worker_id, self.attachment.role.value, self.address)
        self.tried = True
        fault: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        why = "the gateway ends"

        def take(message: bytes) -> None:
            if fault.done():
                return
            try:
                self._take(pb.WorkerMessage.FromString(message))
            except Exception as error:
                log.exception("a message of worker %s met a fault of this gateway", welcome.worker_id)
                fault.set_exception(error)

        self._events.attached(self)
        for message in early:
            take(message)
        stream.on_message = take
        lost_after_ms = max(self._timing.lost_after_ms, 3 * welcome.heartbeat_ms)
        beating = asyncio.create_task(self._beat(stream, lost_after_ms))
        try:
            ends: set[asyncio.Future[Any]] = {stream.closed, fault, beating}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stream.on_message = _ignore
            beating.cancel()
            silent = await asyncio.gather(beating, return_exceptions=True)
            failed = [fault.exception()] if fault.done() else silent
            why = next((_why(error) for error in failed if isinstance(error, Exception)), why)
            if stream.closed.done():
                why = stream.closed.result()
            fault.cancel()
            log.warning("lost worker %s at %s: %s", welcome.worker_id, self.address, why)
            # At once, before the connection is closed: nothing more may be given to this worker.
            self._forget(why)

    def _forget(self, why: str) -> None:
        if self.attachment is None:
            return
        requests, self._requests = self._requests, {}
        self._events.detached(self, why)
        self.attachment = None
        for submission in requests.values():
            submission.lost(why)

    # -- what comes

    def _take(self, message: pb.WorkerMessage) -> None:
        self._silent_ticks = 0
        match message.WhichOneof("kind"):
            case "step":
                self._step(message.step)
            case "heartbeat":
                self._take_queue(message.heartbeat.queue)
                self._events.load_changed(self)
            case "accepted":
                submission = self._requests.get(message.accepted.ref)
                if submission is not None:
                    submission.accepted()
            case "refused":
                submission = self._requests.pop(message.refused.ref, None)
                if submission is not None:
                    submission.refused(message.refused.reason, message.refused.message)
            case other:
                log.warning("worker at %s sent an unexpected message: %s", self.address, other)

    def _step(self, batch: pb.StepBatch) -> None:
        # First: what a worker that drains gives back must not be given to it again.
        if batch.HasField("queue"):
            self._take_queue(batch.queue)
        requests = self._requests
        for step in batch.steps:
            ref = step.ref
            submission = requests.get(ref)
            if submission is None:
                continue
            if step.finish:
                del requests[ref]
            submission.step(step)
        if batch.HasField("queue"):
            self._events.load_changed(self)

    async def _beat(self, stream: GrpcStream, lost_after_ms: int) -> None:
        heartbeat_ms = self._timing.heartbeat_ms
        tick_ms = max(1, min(heartbeat_ms, lost_after_ms // 6))
        since_heartbeat_ms = 0
        self._silent_ticks = 0
        while True:
            await asyncio.sleep(tick_ms / 1000)
            self._silent_ticks += 1
            if self._silent_ticks * tick_ms > lost_after_ms:
                raise WorkerUnavailable(f"it was silent for {lost_after_ms} ms")
            since_heartbeat_ms += tick_ms
            # Whatever waits to be sent will be heard as well as a heartbeat.
            if since_heartbeat_ms >= heartbeat_ms and not stream.unsent_bytes:
                since_heartbeat_ms = 0
                self._send(pb.GatewayMessage(heartbeat=pb.Heartbeat()))

    def _take_queue(self, queue: pb.QueueState) -> None:
        self.queue = queue
        if self.attachment is not None and queue.role_version > self.attachment.role_version and queue.role in _ROLES:
            self._take_role(self.attachment, queue)
        if queue.HasField("step_model"):
            said = queue.step_model
            # Twice a second at most there is something new in it. A worker that says no samples may say anything.
            if said.samples and said.samples == self.fitted.samples:
                return
            model = StepModel(
                base_ms=said.base_ms,
                per_new_token_ms=said.per_new_token_ms,
                per_token_context_ms=said.per_token_context_ms,
                per_sequence_ms=said.per_sequence_ms,
                per_kv_token_ms=said.per_kv_token_ms,
            )
            self.fitted = Fitted(model, said.samples, said.relative_error)
            self.step_model = model

    def _take_role(self, attachment: Attachment, queue: pb.QueueState) -> None:
        role = _ROLES[queue.role]
        self.attachment = replace(attachment, role=role, role_version=queue.role_version)
        log.info("worker %s is a %s worker now (version %d)", attachment.worker_id, role.value, queue.role_version)
        self._events.role_changed(self)


def _ignore(message: bytes) -> None:
    """For what comes when nobody is concerned any more."""


def _why(error: Exception) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error) or repr(error)
