"""A runtime without processes: containers start, become ready and end as a script says, by default within some tens
of milliseconds.

The script of a pod comes from a hook, else from its annotations, else from the names of its images: `missing` cannot be
pulled, `crash` ends with an error, `slow` takes its time to be ready. Containers of pods that are not restarted (Jobs)
complete.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from tests.support.kube.kubelets.runtime import Health, ImageMissing
from tests.support.kube.kubelets.status import Exit

Object = dict[str, Any]
PREFIX = "test.antiphon.dev/"
TERMINATION_MESSAGE = f"{PREFIX}termination-message"
EXIT_CODE = f"{PREFIX}exit-code"
READY_AFTER_S = f"{PREFIX}ready-after-s"
STOP_AFTER_S = f"{PREFIX}stop-after-s"
CRASH_LINE = "RuntimeError: the engine could not start"
QUICK_S = 0.02
SLOW_S = 1.0
CRASHED = 137


@dataclass(frozen=True, slots=True)
class Script:
    """What each container of a pod does."""

    missing: bool = False
    """The image is not there."""
    start_s: float = QUICK_S
    ready_s: float | None = QUICK_S
    """After its start; None: never."""
    end_s: float | None = None
    """After its start; None: runs until it is stopped."""
    exit_code: int = 0
    message: str = ""
    """Its termination message."""
    log: tuple[str, ...] = ("started",)
    stop_s: float = QUICK_S
    """From the deletion of its pod to its end; cut off by the grace."""


def script_of(pod: Object, container: Object) -> Script:
    """By annotation and image name."""
    image = container.get("image", "")
    annotations = pod["metadata"].get("annotations") or {}
    script = Script()
    if pod["spec"].get("restartPolicy", "Always") != "Always":
        script = replace(script, end_s=QUICK_S)
    if "missing" in image:
        script = replace(script, missing=True)
    if "crash" in image:
        script = replace(script, end_s=QUICK_S, ready_s=None, exit_code=1, message=CRASH_LINE, log=(CRASH_LINE,))
    if "slow" in image:
        script = replace(script, ready_s=SLOW_S)
    if message := annotations.get(TERMINATION_MESSAGE):
        script = replace(script, message=message)
    if code := annotations.get(EXIT_CODE):
        script = replace(script, exit_code=int(code), end_s=QUICK_S)
    if ready := annotations.get(READY_AFTER_S):
        script = replace(script, ready_s=None if ready == "never" else float(ready))
    if stop := annotations.get(STOP_AFTER_S):
        script = replace(script, stop_s=float(stop))
    return script


class SimulatedRuntime:
    """`hook(pod, container)` may answer a script of its own; None leaves it to the annotations and the image."""

    def __init__(self, hook: Callable[[Object, Object], Script | None] | None = None) -> None:
        self.hook = hook
        self.addresses: Iterator[str] = (
            f"10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}" for number in itertools.count(1)
        )
        """Of the pods, one after another."""
        self._runs: dict[tuple[str, str], list[SimulatedRun]] = {}

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def sandbox(self, pod: Object) -> SimulatedSandbox:
        return SimulatedSandbox(self, pod, next(self.addresses))

    def script(self, pod: Object, container: Object) -> Script:
        return (self.hook and self.hook(pod, container)) or script_of(pod, container)

    def crash(self, namespace: str, pod: str, *, code: int = CRASHED, message: str = "", line: str = "") -> None:
        """The running containers of this pod end by themselves, now."""
        for run in self._runs[namespace, pod]:
            if line:
                run.lines.append(line)
            run.end(Exit(code, message))

    def set_ready(self, namespace: str, pod: str, ready: bool) -> None:
        """What its readiness probe says from now on."""
        for run in self._runs[namespace, pod]:
            run.set_ready(ready)

    def freeze(self, pod_uid: str) -> None:
        """Nothing runs that could be frozen; the kubelet writes nothing of it anyway."""

    def thaw(self, pod_uid: str) -> None: ...

    def began(self, pod: Object, run: SimulatedRun) -> None:
        self._runs.setdefault((pod["metadata"]["namespace"], pod["metadata"]["name"]), []).append(run)

    def over(self, pod: Object, run: SimulatedRun) -> None:
        self._runs[pod["metadata"]["namespace"], pod["metadata"]["name"]].remove(run)


class SimulatedSandbox:
    def __init__(self, runtime: SimulatedRuntime, pod: Object, address: str) -> None:
        self.address = address
        self._runtime, self._pod = runtime, pod
        self._logs: dict[str, list[list[str]]] = {}
        self._runs: list[SimulatedRun] = []

    async def start(self, container: Object) -> SimulatedRun:
        script = self._runtime.script(self._pod, container)
        await asyncio.sleep(script.start_s)
        if script.missing:
            raise ImageMissing(f"{container['image']}: not found")
        logs = self._logs.setdefault(container["name"], [])
        run = SimulatedRun(script, f"simulated://{self._pod['metadata']['uid']}/{container['name']}/{len(logs)}")
        logs.append(run.lines)
        self._runs.append(run)
        self._runtime.began(self._pod, run)
        run.on_end(lambda: self._runtime.over(self._pod, run))
        return run

    def log(self, container: str, *, previous: bool) -> str | None:
        runs = self._logs.get(container) or []
        wanted = 2 if previous else 1
        return None if len(runs) < wanted else "".join(f"{line}\n" for line in runs[-wanted])

    async def close(self) -> None:
        for run in self._runs:
            run.end(Exit(CRASHED))


class SimulatedRun:
    def __init__(self, script: Script, container_id: str) -> None:
        loop = asyncio.get_running_loop()
        self.container_id = container_id
        self.lines = list(script.log)
        self._script = script
        self._exit: asyncio.Future[Exit] = loop.create_future()
        self._ready = asyncio.Queue[bool]()
        self._timers = []
        if script.end_s is not None:
            self._timers.append(loop.call_later(script.end_s, self.end, Exit(script.exit_code, script.message)))
        if script.ready_s is not None:
            self._timers.append(loop.call_later(script.ready_s, self.set_ready, True))

    def on_end(self, call: Callable[[], None]) -> None:
        self._exit.add_done_callback(lambda _: call())

    def set_ready(self, ready: bool) -> None:
        self._ready.put_nowait(ready)

    def end(self, how: Exit) -> None:
        """The first end counts."""
        for timer in self._timers:
            timer.cancel()
        if not self._exit.done():
            self._exit.set_result(how)

    async def ended(self) -> Exit:
        return await asyncio.shield(self._exit)

    async def health(self) -> AsyncGenerator[Health, None]:
        while True:
            yield Health(started=True, ready=await self._ready.get())

    async def stop(self, grace_s: float) -> None:
        if not self._exit.done():
            if self._script.stop_s > grace_s:
                await asyncio.wait({self._exit}, timeout=grace_s)
                self.end(Exit(CRASHED, reason="Error"))
            else:
                await asyncio.wait({self._exit}, timeout=self._script.stop_s)
                self.end(Exit(0))
        await self.ended()
