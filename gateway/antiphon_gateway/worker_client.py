"""The one long stream between this gateway and one worker.

    CONNECTING -> (Hello, Welcome, card known) -> ATTACHED -> lost -> back-off -> CONNECTING ...

The stream is the health signal. Both ends send heartbeats; a worker that was silent for `lost_after_ms` is lost, as
is one whose stream broke, and every request on it hears of that at once. Silence is counted in heartbeat ticks of
ours, so that a pause of this process does not count against the worker.

Owned by the fleet, which runs `run()` as a task and cancels it. Sending never waits: messages go through a queue that
one task writes; what comes is handed to each request's `Submission` by a plain call that must return at once, so a
slow client never holds up the stream.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
import grpc.aio
from antiphon_policy.latency import StepModel
from antiphon_policy.routing import WorkerRole
from antiphon_proto import worker_pb2 as pb
from antiphon_proto import worker_pb2_grpc as pb_grpc
from grpc.aio import EOF  # type: ignore[attr-defined]  # missing in the stubs only

from antiphon_gateway.groups import Group

log = logging.getLogger("antiphon.gateway")

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
CONNECT_DEADLINE_S = 5.0
CARD_DEADLINE_S = 30.0
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


@dataclass(frozen=True, slots=True)
class Attachment:
    """Who is at the other end, while the stream stands."""

    worker_id: str
    incarnation: str
    role: WorkerRole
    group: Group
    """Whom it may work with."""


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
        self.step_model = StepModel()
        self.tried = False
        """Whether the worker was attached to, or could not be, at least once."""
        self._gateway_id = gateway_id
        self._timing = timing
        self._events = events
        self._refs = itertools.count(1)
        self._requests: dict[int, Submission] = {}
        self._outgoing: asyncio.Queue[pb.GatewayMessage] = asyncio.Queue()
        self._silent_ticks = 0

    # -- for the dispatcher

    @property
    def requests(self) -> int:
        """How many requests of this gateway are on the stream."""
        return len(self._requests)

    def submit(self, submit: pb.Submit, submission: Submission) -> int:
        """Send a request; its ref, for `cancel`. Only while attached."""
        submit.ref = next(self._refs)
        self._requests[submit.ref] = submission
        self._outgoing.put_nowait(pb.GatewayMessage(submit=submit))
        return submit.ref

    def cancel(self, ref: int) -> None:
        """Forget the request and tell the worker. Unknown refs are ignored; no call of the submission follows."""
        if self._requests.pop(ref, None) is not None:
            self._outgoing.put_nowait(pb.GatewayMessage(cancel=pb.Cancel(ref=ref)))

    def send_peers(self, peers: Iterable[pb.Peer]) -> None:
        self._outgoing.put_nowait(pb.GatewayMessage(peers=pb.Peers(peers=peers)))

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
        self._outgoing = asyncio.Queue()
        async with grpc.aio.insecure_channel(self.address, options=CHANNEL_OPTIONS) as channel:
            stub: Any = pb_grpc.WorkerStub(channel)
            call = stub.Attach()
            try:
                welcome = await self._greet(call)
                model = await self._events.prepare(self, welcome, stub)
                if welcome.role not in _ROLES:
                    raise WorkerUnavailable(f"the worker has the unknown role {welcome.role}")
                await self._converse(call, welcome, model)
            finally:
                call.cancel()

    async def _greet(self, call: Any) -> pb.Welcome:
        hello = pb.Hello(gateway_id=self._gateway_id, heartbeat_ms=self._timing.heartbeat_ms)
        try:
            async with asyncio.timeout(CONNECT_DEADLINE_S):
                await call.write(pb.GatewayMessage(hello=hello))
                message = await call.read()
        except TimeoutError as error:
            raise WorkerUnavailable(f"no welcome within {CONNECT_DEADLINE_S:g} s") from error
        except asyncio.InvalidStateError as error:
            raise WorkerUnavailable("the stream ended before the welcome") from error
        if message is EOF:
            raise WorkerUnavailable(f"the stream ended before the welcome: {await call.details()}")
        if message.WhichOneof("kind") != "welcome":
            raise WorkerUnavailable("the first message was no welcome")
        return message.welcome  # type: ignore[no-any-return]

    async def _converse(self, call: Any, welcome: pb.Welcome, model: str) -> None:
        self._take_queue(welcome.queue)
        self.attachment = Attachment(
            worker_id=welcome.worker_id,
            incarnation=welcome.incarnation,
            role=_ROLES[welcome.role],
            group=Group(model, welcome.revision, welcome.card_digest),
        )
        log.info("attached to worker %s (%s) at %s", welcome.worker_id, self.attachment.role.value, self.address)
        self.tried = True
        self._events.attached(self)
        lost_after_ms = max(self._timing.lost_after_ms, 3 * welcome.heartbeat_ms)
        tasks = [
            asyncio.create_task(self._read(call)),
            asyncio.create_task(self._write(call)),
            asyncio.create_task(self._beat(lost_after_ms)),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        why = next((_why(result) for result in results if isinstance(result, Exception)), "the worker ended the stream")
        log.warning("lost worker %s at %s: %s", welcome.worker_id, self.address, why)
        # At once, before the channel is closed: nothing more may be given to this worker.
        self._forget(why)

    def _forget(self, why: str) -> None:
        if self.attachment is None:
            return
        requests, self._requests = self._requests, {}
        self._events.detached(self, why)
        self.attachment = None
        for submission in requests.values():
            submission.lost(why)

    # -- the three tasks of an attached stream

    async def _read(self, call: Any) -> None:
        while (message := await call.read()) is not EOF:
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
            self._take_queue(batch.queue)
            self._events.load_changed(self)

    async def _write(self, call: Any) -> None:
        while True:
            message = await self._outgoing.get()
            try:
                await call.write(message)
            except asyncio.InvalidStateError as error:
                raise WorkerUnavailable("the stream ended") from error

    async def _beat(self, lost_after_ms: int) -> None:
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
            # Whatever waits in the queue will be heard as well as a heartbeat.
            if since_heartbeat_ms >= heartbeat_ms and self._outgoing.empty():
                since_heartbeat_ms = 0
                self._outgoing.put_nowait(pb.GatewayMessage(heartbeat=pb.Heartbeat()))

    def _take_queue(self, queue: pb.QueueState) -> None:
        self.queue = queue
        if queue.HasField("step_model"):
            model = queue.step_model
            self.step_model = StepModel(
                base_ms=model.base_ms,
                per_new_token_ms=model.per_new_token_ms,
                per_token_context_ms=model.per_token_context_ms,
                per_sequence_ms=model.per_sequence_ms,
                per_kv_token_ms=model.per_kv_token_ms,
            )


def _why(error: Exception) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error) or repr(error)
