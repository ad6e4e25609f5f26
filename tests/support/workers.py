"""Real worker processes for tests, and a gateway's end of the Attach protocol.

async with Workers(tmp_path) as workers:
    worker = await workers.start("--role", "both")
    async with AttachClient(worker) as client:
        answer = await client.run(client.submission(prompt, max_tokens=8))
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import grpc.aio
from antiphon_engine.timed import timed_logprob
from antiphon_proto import worker_pb2 as wire
from antiphon_proto.worker_pb2_grpc import WorkerStub

from tests.support.fork_server import TIMED_MODULES, TORCH_MODULES, ForkedProcess, start_forked

START_DEADLINE_S = 400.0
ANSWER_DEADLINE_S = 90.0
MAX_MESSAGE_BYTES = 64 * 1024 * 1024

TIMED = ("--engine", "timed", "--transport", "tcp", "--timed-block-bytes", "512")


@dataclass(frozen=True)
class ReadyFile:
    worker_id: str
    incarnation: str
    role: str
    address: str
    status_address: str
    pid: int


class WorkerProcess:
    """One `antiphon worker` process."""

    def __init__(self, process: asyncio.subprocess.Process | ForkedProcess, ready: ReadyFile, log_path: Path) -> None:
        self.process = process
        self.ready = ready
        self.log_path = log_path

    @property
    def worker_id(self) -> str:
        return self.ready.worker_id

    @property
    def peer(self) -> wire.Peer:
        return wire.Peer(worker_id=self.ready.worker_id, incarnation=self.ready.incarnation, address=self.ready.address)

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    async def status(self) -> dict[str, Any]:
        """The /status page."""
        return json.loads(await self.page("/status"))

    async def page(self, path: str) -> str:
        url = f"http://{self.ready.status_address}{path}"

        def get() -> str:
            with urllib.request.urlopen(url, timeout=30) as answer:
                return answer.read().decode()

        return await asyncio.to_thread(get)

    async def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that have these labels; 0 if there is none."""
        total = 0.0
        for line in (await self.page("/metrics")).splitlines():
            if line.startswith("#"):
                continue
            series, _, value = line.rpartition(" ")
            found, _, inside = series.partition("{")
            if found == name and all(f'{key}="{wanted}"' in inside for key, wanted in labels.items()):
                total += float(value)
        return total

    async def until(self, condition: Callable[[dict[str, Any]], bool], deadline_s: float = 60.0) -> dict[str, Any]:
        """The status once `condition` holds; an AssertionError shows the last one."""
        ends_at = time.monotonic() + deadline_s
        while True:
            status = await self.status()
            if condition(status):
                return status
            assert time.monotonic() < ends_at, f"{self.worker_id} did not get there: {status}\n{self.log[-4000:]}"
            await asyncio.sleep(0.05)

    async def until_idle(self, deadline_s: float = 60.0) -> dict[str, Any]:
        """Nothing runs, nothing is held, and the pool's books balance."""
        return await self.until(is_idle, deadline_s)

    def send_signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def stop(self) -> None:
        self.send_signal(signal.SIGSTOP)

    def cont(self) -> None:
        self.send_signal(signal.SIGCONT)

    async def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()

    async def terminate(self, deadline_s: float = 60.0) -> int:
        """SIGTERM; the exit code."""
        if self.process.returncode is None:
            self.process.terminate()
        async with asyncio.timeout(deadline_s):
            return await self.process.wait()


def is_idle(status: dict[str, Any]) -> bool:
    return (
        status["integrity"] == "ok"
        and status["free_blocks"] == status["total_blocks"]
        and status["retained_blocks"] == 0
        and status["used_blocks"] == 0
        and status["requests"] == 0
        and status["running"] == 0
        and status["waiting"] == 0
        and status["active_requests"] == 0
        and status["open_tasks"] == 0
    )


class Workers:
    """Starts workers in `folder` and ends all of them."""

    def __init__(self, folder: Path, *common: str, command: Sequence[str] = ()) -> None:
        """`common`: options of every worker; by default a timed engine over tcp. `command`: what starts one; by default
        they are `antiphon worker`, forked from a process that has imported all (`fork_server`)."""
        self._folder = folder
        self._command = tuple(command)
        self._common = common or TIMED
        self._numbers = itertools.count()
        self._all: list[WorkerProcess] = []
        self._processes: list[asyncio.subprocess.Process | ForkedProcess] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for process in self._processes:
            if process.returncode is None:
                process.kill()
        for process in self._processes:
            await process.wait()

    async def start(self, *options: str, environment: Mapping[str, str] | None = None) -> WorkerProcess:
        """Start one worker and wait until it is ready. `environment`: further variables."""
        number = next(self._numbers)
        ready_path = self._folder / f"worker-{number}.json"
        log_path = self._folder / f"worker-{number}.log"
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("ANTIPHON_", "OTEL_"))}
        words = (*self._common, *options, "--ready-file", str(ready_path))
        process = await self._process(words, {**inherited, **(environment or {})}, log_path)
        self._processes.append(process)
        ends_at = time.monotonic() + START_DEADLINE_S
        while not ready_path.exists():
            assert process.returncode is None, f"the worker ended with {process.returncode}:\n{log_path.read_text()}"
            assert time.monotonic() < ends_at, f"the worker was not ready in time:\n{log_path.read_text()}"
            await asyncio.sleep(0.02)
        worker = WorkerProcess(process, ReadyFile(**json.loads(ready_path.read_bytes())), log_path)
        self._all.append(worker)
        return worker

    async def _process(
        self, words: Sequence[str], environment: Mapping[str, str], log_path: Path
    ) -> asyncio.subprocess.Process | ForkedProcess:
        if not self._command:
            modules = TIMED_MODULES if "timed" in words else TORCH_MODULES
            return await start_forked(modules, ("worker", *words), environment, log_path)
        with log_path.open("wb") as log:
            return await asyncio.create_subprocess_exec(
                *self._command, *words, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, env=environment
            )

    async def start_all(self, *options: Sequence[str]) -> list[WorkerProcess]:
        """Start several at the same time, each with its own options."""
        return list(await asyncio.gather(*(self.start(*own) for own in options)))


class StreamBroken(Exception):
    """The worker ended the stream."""


class RequestRefusedByWorker(Exception):
    def __init__(self, refused: wire.Refused) -> None:
        super().__init__(f"{wire.RefusalReason.Name(refused.reason)}: {refused.message}")
        self.reason = refused.reason


@dataclass
class Answer:
    """Everything that came for one request."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[wire.TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[wire.TokenLogprob] = field(default_factory=list)
    finish: int = wire.Finish.FINISH_NONE
    error: str = ""
    stop_reason: str = ""
    first_usage: wire.Usage | None = None
    usage: wire.Usage | None = None
    steps: list[wire.RequestStep] = field(default_factory=list)

    def take(self, step: wire.RequestStep) -> None:
        self.steps.append(step)
        self.token_ids.extend(step.token_ids)
        self.text += step.text
        self.logprobs.extend(step.logprobs)
        assert not (step.prompt_logprobs and self.token_ids), "told behind the first token"
        self.prompt_logprobs.extend(step.prompt_logprobs)
        if step.HasField("usage"):
            self.usage = step.usage
            self.first_usage = self.first_usage or step.usage
        self.finish, self.error, self.stop_reason = step.finish, step.error, step.stop_reason


class AttachClient:
    """A gateway's end of one Attach stream."""

    _names = itertools.count(1)

    def __init__(
        self, worker: WorkerProcess, *, heartbeat_ms: int = 200, channel_options: Sequence[tuple[str, int]] = ()
    ) -> None:
        self.worker = worker
        self._channel_options = tuple(channel_options)
        self.heartbeat_ms = heartbeat_ms
        self.gateway_id = f"test-gateway-{os.getpid()}-{next(self._names)}"
        self.welcome: wire.Welcome | None = None
        self.batches: list[wire.StepBatch] = []
        self.heartbeats: list[wire.Heartbeat] = []
        self.queue: wire.QueueState | None = None
        self._refs = itertools.count(1)
        self._mail: dict[int, asyncio.Queue[wire.WorkerMessage | StreamBroken]] = {}
        self._write_lock = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []
        self.reading = asyncio.Event()
        """Cleared: nothing is read from the stream, while heartbeats go on."""
        self.reading.set()
        self.silent = False
        """No heartbeats are sent."""
        self.broken: asyncio.Future[StreamBroken] = asyncio.get_running_loop().create_future()

    async def __aenter__(self) -> Self:
        self.channel = grpc.aio.insecure_channel(
            self.worker.ready.address,
            options=[
                ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
                ("grpc.use_local_subchannel_pool", 1),
                *self._channel_options,
            ],
        )
        self.stub = WorkerStub(self.channel)
        self.call = self.stub.Attach()
        await self.send(
            wire.GatewayMessage(hello=wire.Hello(gateway_id=self.gateway_id, heartbeat_ms=self.heartbeat_ms))
        )
        async with asyncio.timeout(ANSWER_DEADLINE_S):
            first = await self.call.read()
        assert first.HasField("welcome"), first
        self.welcome = first.welcome
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._beat())]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.call.cancel()
        await self.channel.close()

    async def card(self) -> wire.ModelCard:
        return await self.stub.GetModelCard(wire.GetModelCardRequest())

    async def send(self, message: wire.GatewayMessage) -> None:
        async with self._write_lock:
            try:
                await self.call.write(message)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
                raise StreamBroken(str(error)) from error

    async def wire_up(self, *peers: WorkerProcess) -> None:
        """Tell the worker its peers and wait until the links stand."""
        await self.send(wire.GatewayMessage(peers=wire.Peers(peers=[peer.peer for peer in peers])))
        names = {peer.worker_id for peer in peers}
        await self.worker.until(
            lambda status: names <= {link["peer_worker_id"] for link in status["links"] if link["up"]}
        )

    def submission(
        self,
        prompt: Sequence[int],
        *,
        request_id: str = "",
        prefill: Sequence[WorkerProcess | wire.Peer] = (),
        prefix_peers: Sequence[tuple[WorkerProcess, int]] = (),
        output: Sequence[int] = (),
        cache_salt: bytes = b"",
        traceparent: str = "",
        **sampling: Any,
    ) -> wire.Submit:
        """A Submit; `sampling` as in the message, with max_tokens 8 and greedy unless said otherwise."""
        ref = next(self._refs)
        return wire.Submit(
            ref=ref,
            request_id=request_id or f"{self.gateway_id}/{ref}",
            prompt_token_ids=prompt,
            output_token_ids=output,
            sampling=wire.Sampling(**({"max_tokens": 8, "skip_special_tokens": True} | sampling)),
            cache_salt=cache_salt,
            prefill=[peer.peer if isinstance(peer, WorkerProcess) else peer for peer in prefill],
            prefix_peers=[wire.PrefixPeer(peer=peer.peer, blocks=blocks) for peer, blocks in prefix_peers],
            traceparent=traceparent,
        )

    async def submit(self, submit: wire.Submit) -> None:
        """Send it and wait until it is taken. Raises RequestRefusedByWorker or StreamBroken."""
        self._mail[submit.ref] = asyncio.Queue()
        await self.send(wire.GatewayMessage(submit=submit))
        message = await self._next(submit.ref)
        if message.HasField("refused"):
            del self._mail[submit.ref]
            raise RequestRefusedByWorker(message.refused)
        assert message.HasField("accepted"), message

    async def steps(self, submit: wire.Submit) -> AsyncIterator[wire.RequestStep]:
        """The steps of a taken request, up to the one with a finish."""
        while True:
            message = await self._next(submit.ref)
            for step in message.step.steps:
                yield step
                if step.finish != wire.Finish.FINISH_NONE:
                    del self._mail[submit.ref]
                    return

    async def run(self, submit: wire.Submit) -> Answer:
        """Submit and collect the whole answer."""
        await self.submit(submit)
        answer = Answer()
        async for step in self.steps(submit):
            answer.take(step)
        return answer

    async def cancel(self, submit: wire.Submit) -> None:
        self._mail.pop(submit.ref, None)
        await self.send(wire.GatewayMessage(cancel=wire.Cancel(ref=submit.ref)))

    async def _next(self, ref: int) -> wire.WorkerMessage:
        async with asyncio.timeout(ANSWER_DEADLINE_S):
            message = await self._mail[ref].get()
        if isinstance(message, StreamBroken):
            raise message
        return message

    async def _read(self) -> None:
        try:
            while (message := await self.call.read()) is not grpc.aio.EOF:
                self._deliver(message)
                await self.reading.wait()
            broken = StreamBroken(f"{await self.call.code()}: {await self.call.details()}")
        except grpc.aio.AioRpcError as error:
            broken = StreamBroken(f"{error.code()}: {error.details()}")
        for mail in self._mail.values():
            mail.put_nowait(broken)
        if not self.broken.done():
            self.broken.set_result(broken)

    def _deliver(self, message: wire.WorkerMessage) -> None:
        match message.WhichOneof("kind"):
            case "accepted" | "refused" as kind:
                self._put(getattr(message, kind).ref, message)
            case "step":
                self.queue = message.step.queue
                self.batches.append(message.step)
                for step in message.step.steps:
                    single = wire.WorkerMessage(step=wire.StepBatch(steps=[step]))
                    self._put(step.ref, single)
            case "heartbeat":
                self.queue = message.heartbeat.queue
                self.heartbeats.append(message.heartbeat)

    def _put(self, ref: int, message: wire.WorkerMessage) -> None:
        mail = self._mail.get(ref)
        if mail is not None:
            mail.put_nowait(message)

    async def _beat(self) -> None:
        try:
            while True:
                await asyncio.sleep(self.heartbeat_ms / 1000)
                if not self.silent:
                    await self.send(wire.GatewayMessage(heartbeat=wire.Heartbeat()))
        except StreamBroken:
            return  # the call is over: `_read` says why


async def eventually(condition: Callable[[], bool], deadline_s: float = 60.0) -> None:
    """Return once `condition` holds; fail after `deadline_s`."""
    ends_at = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < ends_at, "it did not come to that in time"
        await asyncio.sleep(0.01)


async def within(deadline_s: float, awaitable: Awaitable[Any]) -> Any:
    async with asyncio.timeout(deadline_s):
        return await awaitable


def assert_scores_of(prompt: Sequence[int], told: Sequence[wire.TokenLogprob]) -> None:
    """A timed worker's, of each token but the first one once."""
    assert [(one.token_id, one.logprob) for one in told] == [
        (token, timed_logprob(token, place)) for place, token in enumerate(prompt[1:], start=1)
    ]


def prompt_of(length: int, *, seed: int = 0) -> list[int]:
    """Token ids that any of the test models knows; different seeds differ from the first token on."""
    return [(seed * 31 + 7 * position + position * position) % 200 for position in range(length)]
