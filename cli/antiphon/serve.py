"""`antiphon serve`: the whole house on one machine, as processes under one supervisor.

The supervisor checks the port, starts a Valkey (unless one is named), has the model prepared once in a process of its
own, starts workers and gateway, waits until the gateway says that it is ready, and tells where to point a client.
From then on it only watches. It stays small: no model code runs in it.

One SIGINT or SIGTERM ends everything, in the order in which requests flow: the gateway finishes what runs and takes no
more, then the workers, then Valkey; each in bounded time. A second signal ends everything at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import os
import signal
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from antiphon_telemetry.exit import ExitCode

from antiphon.children import Child, ChildSpec, StartFailed
from antiphon.console import Console
from antiphon.deployment import Deployment, ProcessPlan, plan
from antiphon.embedded_valkey import EmbeddedValkey, runtime_folder
from antiphon.link_report import WorkerReady, WorkerStatus, describe, is_complete
from antiphon.options import ServeOptions
from antiphon.redis_check import check_redis

if TYPE_CHECKING:
    from antiphon.autoscale.crew import Crew

_POLL_S = 0.1
_HTTP_DEADLINE_S = 5.0
_LINKS_S = 5.0
"""How long the links between workers are waited for before people are told."""
_END_MARGIN_S = 5.0
"""What a process gets beyond its drain time before it is killed."""


def serve(options: ServeOptions, given: Mapping[str, Any]) -> int:
    """Serve until told to stop; the exit code. `given`: see `deployment.handed_on`."""
    console = Console(prefixed=not options.log_json)
    try:
        port = free_port(options.host, options.port)
        with runtime_folder() as folder:
            return asyncio.run(_Supervisor(options, given, console, Path(folder), port).run())
    except StartFailed as failure:
        console.say(str(failure))
        return failure.code


def free_port(host: str, port: int) -> int:
    """`port`, or a free one for 0. Raises StartFailed when it cannot be listened on."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
            return int(probe.getsockname()[1])
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            reason = f"port {port} is in use by another program: stop it, or choose another port with --port"
        else:
            reason = f"cannot listen on {host} port {port} ({error}): choose others with --host and --port"
        raise StartFailed(ExitCode.UNAVAILABLE, reason) from error


class _Supervisor:
    """Everything that runs, from the first child to the last."""

    def __init__(
        self, options: ServeOptions, given: Mapping[str, Any], console: Console, folder: Path, port: int
    ) -> None:
        self._options = dataclasses.replace(options, port=port)
        self._given = given
        self._console = console
        self._folder = folder
        self._stages: list[list[Child]] = []
        """In the order of their start; they are ended in the opposite one."""
        self._keepers: list[asyncio.Task[None]] = []
        self._stop = asyncio.Event()
        self._kill = asyncio.Event()
        self._failure: asyncio.Future[None] | None = None
        """Set, with the exception, when a child is given up."""
        self._scaling: tuple[asyncio.Task[None], Crew] | None = None

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        self._failure = loop.create_future()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # Under nohup, SIGHUP is ignored and has to stay so.
            if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, self._signalled, number)
        stopped = asyncio.create_task(self._stop.wait())
        starting = asyncio.create_task(self._start())
        try:
            waiting: set[asyncio.Future[Any]] = {stopped, starting, self._failure}
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()
                await asyncio.wait(waiting - {starting}, return_when=asyncio.FIRST_COMPLETED)
            if self._failure.done():
                self._failure.result()
        except TimeoutError:
            raise StartFailed(
                ExitCode.FAILURE,
                f"the start did not end within {self._options.start_timeout_s:.0f} s: see the lines above, or give it "
                "more time with --start-timeout-s",
            ) from None
        finally:
            starting.cancel()
            stopped.cancel()
            await asyncio.gather(starting, stopped, return_exceptions=True)
            await self._end()
        return ExitCode.OK

    def _signalled(self, number: signal.Signals) -> None:
        if self._stop.is_set():
            self._kill.set()
            return
        self._console.say(f"{number.name}: stopping")
        self._stop.set()

    # -- start

    async def _start(self) -> None:
        began = time.monotonic()
        async with asyncio.timeout(self._options.start_timeout_s):
            redis_url = self._options.redis_url
            if redis_url:
                await asyncio.to_thread(check_redis, redis_url)
            else:
                valkey = EmbeddedValkey(self._folder)
                redis_url = valkey.url
                await _all_ready(self._launch([valkey.spec()]))
            deployment = plan(
                self._options,
                self._given,
                redis_url=redis_url,
                folder=self._folder,
                cores=len(os.sched_getaffinity(0)),
                environment=os.environ,
            )
            await self._prepare(deployment.prepare)
            names = [process.name for process in deployment.workers]
            self._console.say(f"starting {', '.join(names)} and the gateway: loading the model")
            asked_at = time.monotonic()
            workers = self._launch([_spec(process) for process in deployment.workers])
            worker_stage = self._stages[-1]
            gateway = self._launch([_spec(deployment.gateway)])
            await _all_ready([*workers, *gateway])
            await self._gateway_ready()
            _, listed = await asyncio.to_thread(_http_get, f"{self._url}/v1/models")
            models = msgspec.json.decode(listed, type=_Models)
            if self._options.prefill:
                await self._tell_links([process.ready_file for process in deployment.workers])
        self._console.say(f"ready after {time.monotonic() - began:.1f} s")
        if self._options.autoscale:
            self._autoscale(deployment, workers, worker_stage, asked_at, redis_url, models.data[0].id)
        self._console.show(welcome(self._url, [model.id for model in models.data], names))

    def _autoscale(
        self,
        deployment: Deployment,
        workers: Sequence[Child],
        stage: list[Child],
        asked_at: float,
        redis_url: str,
        model: str,
    ) -> None:
        """Workers are the autoscaler's to change from now on."""
        # Most houses stay as they were started, and need nothing of this.
        from antiphon_kvtransfer.access import redacted

        from antiphon.autoscale.crew import Crew
        from antiphon.autoscale.goals import goals_of
        from antiphon.autoscale.loop import Autoscaler

        end_s = self._options.drain_timeout_s + _END_MARGIN_S
        crew = Crew(deployment.planner, _spec, stage, self._console, end_s=end_s)
        for process, child in zip(deployment.workers, workers, strict=True):
            crew.adopt(process, child, asked_at)
        record = Path(self._options.record_decisions) if self._options.record_decisions else None
        scaler = Autoscaler(goals_of(self._options), crew, redis_url, model, self._console, record)
        self._console.say(
            f"autoscale: on, up to {self._options.most_workers} workers; its decisions are told by "
            f"`antiphon decisions {model} --redis-url {redacted(redis_url)}`"
        )
        self._scaling = (asyncio.create_task(scaler.run(), name="autoscaler"), crew)

    async def _end_scaling(self) -> None:
        """Before anything is ended, so that nothing is started any more."""
        if self._scaling is not None:
            task, crew = self._scaling
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await crew.close()

    async def _prepare(self, process: ProcessPlan) -> None:
        child = Child(ChildSpec(process.name, process.command, process.environment), self._console)
        self._stages.append([child])
        code = await child.once()
        if code != ExitCode.OK and not self._stop.is_set():
            said = f": {child.last_line}" if child.last_line else ""
            raise StartFailed(code if code > 0 else ExitCode.FAILURE, f"the model cannot be prepared{said}")

    def _launch(self, specs: list[ChildSpec]) -> list[Child]:
        """Start `specs` as one stage."""
        children = [Child(spec, self._console) for spec in specs]
        self._stages.append(children)
        for child in children:
            keeper = asyncio.create_task(child.keep(), name=child.spec.name)
            keeper.add_done_callback(self._kept)
            self._keepers.append(keeper)
        return children

    def _kept(self, keeper: asyncio.Task[None]) -> None:
        if keeper.cancelled():
            return
        error = keeper.exception()
        if error is not None and self._failure is not None and not self._failure.done():
            self._failure.set_exception(error)

    # -- the gateway's word

    @property
    def _url(self) -> str:
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self._options.host, self._options.host)
        return f"http://{f'[{host}]' if ':' in host else host}:{self._options.port}"

    async def _gateway_ready(self) -> None:
        while True:
            with contextlib.suppress(OSError):
                status, _ = await asyncio.to_thread(_http_get, f"{self._url}/ready")
                if status == 200:
                    return
            await asyncio.sleep(_POLL_S)

    async def _tell_links(self, ready_files: Sequence[Path]) -> None:
        statuses: list[WorkerStatus] = []
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LINKS_S):
                while not statuses or not is_complete(statuses):
                    await asyncio.sleep(_POLL_S)
                    with contextlib.suppress(OSError):
                        statuses = await asyncio.gather(
                            *(asyncio.to_thread(_worker_status, path) for path in ready_files)
                        )
        self._console.say(describe(statuses))

    # -- end

    async def _end(self) -> None:
        """End all children, the last started first; at once when a second signal comes."""
        await self._end_scaling()
        ending = asyncio.create_task(self._end_in_order())
        killed = asyncio.create_task(self._kill.wait())
        await asyncio.wait({ending, killed}, return_when=asyncio.FIRST_COMPLETED)
        if not ending.done():
            for child in self._children():
                child.kill()
        await ending
        killed.cancel()
        await asyncio.gather(killed, *self._keepers, return_exceptions=True)
        if self._scaling is not None:
            await self._scaling[1].ended()

    async def _end_in_order(self) -> None:
        deadline_s = self._options.drain_timeout_s + _END_MARGIN_S
        for stage in reversed(self._stages):
            await asyncio.gather(*(child.stop(deadline_s) for child in stage))

    def _children(self) -> list[Child]:
        return [child for stage in self._stages for child in stage]


def welcome(url: str, models: Sequence[str], workers: Sequence[str]) -> str:
    """What a person came for: where the endpoint is, and a line to try it with."""
    model = models[0] if models else ""
    body = (
        f'{{"model": "{model}", "messages": [{{"role": "user", "content": "Why is the sky blue?"}}], "max_tokens": 60}}'
    )
    return (
        f"\nAntiphon serves {', '.join(models)} with {', '.join(workers)}.\n"
        f"Point any OpenAI client at {url}/v1, or try it:\n\n"
        f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\\n"
        f"    -d '{body}'\n\n"
        "Ctrl-C ends it.\n"
    )


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


async def _all_ready(children: Sequence[Child]) -> None:
    for child in children:
        await child.ready.wait()


def _worker_status(ready_file: Path) -> WorkerStatus:
    ready = msgspec.json.decode(ready_file.read_bytes(), type=WorkerReady)
    _, page = _http_get(f"http://{ready.status_address}/status")
    return msgspec.json.decode(page, type=WorkerStatus)


def _http_get(url: str) -> tuple[int, bytes]:
    """Status and body of a page of one of our processes. Blocks; raises OSError."""
    # What is on this machine is not to be asked for through a proxy.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=_HTTP_DEADLINE_S) as answer:
            return int(answer.status), answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def _spec(process: ProcessPlan) -> ChildSpec:
    async def is_ready() -> bool:
        return process.ready_file.exists()

    return ChildSpec(
        name=process.name,
        command=process.command,
        environment=process.environment,
        before_start=lambda: process.ready_file.unlink(missing_ok=True),
        is_ready=is_ready,
    )
