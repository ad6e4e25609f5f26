"""Probes of a real process: httpGet, tcpSocket and exec, with their periods and thresholds.

Periods are scaled. How long a process may fail a startup or liveness probe is not: its start takes what it takes on
this machine, so a scaled period only asks more often.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from tests.support.kube.controllers.timing import Timing
from tests.support.kube.kubelets.runtime import Health, TestFault

Object = Mapping[str, Any]
LEAST_TIMEOUT_S = 5.0
"""A probe's own time-out is often 1 s, which a machine busy with other tests cannot promise."""
LEAST_PERIOD_S = 0.02


@dataclass(frozen=True, slots=True)
class Target:
    """The process that is probed: where it is, and what runs inside it would see."""

    address: str
    ports: Mapping[str, int]
    environment: Mapping[str, str]
    folder: Path
    argv: Mapping[tuple[str, ...], Sequence[str]]
    """Commands of its exec actions, substituted, by what the pod says."""

    def port(self, named: int | str) -> int:
        return named if isinstance(named, int) else self.ports[named]


class Prober:
    """Does single actions. The session is the runtime's."""

    def __init__(self, session: aiohttp.ClientSession, timing: Timing) -> None:
        self.timing = timing
        self._session = session

    async def once(self, action: Object, target: Target) -> bool:
        """Whether it succeeded within its time-out."""
        try:
            async with asyncio.timeout(max(action.get("timeoutSeconds", 1), LEAST_TIMEOUT_S)):
                return await self._done(action, target)
        except (OSError, aiohttp.ClientError, TimeoutError):
            return False

    async def _done(self, action: Object, target: Target) -> bool:
        if asked := action.get("httpGet"):
            scheme = asked.get("scheme", "HTTP").lower()
            host = asked.get("host") or target.address
            url = f"{scheme}://{host}:{target.port(asked['port'])}/{asked.get('path', '/').lstrip('/')}"
            headers = {each["name"]: each["value"] for each in asked.get("httpHeaders") or ()}
            async with self._session.get(url, headers=headers, allow_redirects=False, ssl=False) as answer:
                return 200 <= answer.status < 400
        if asked := action.get("tcpSocket"):
            _, writer = await asyncio.open_connection(asked.get("host") or target.address, target.port(asked["port"]))
            writer.close()
            return True
        if asked := action.get("exec"):
            return await _executed(target.argv[tuple(asked["command"])], target)
        raise TestFault(f"the process kubelet plays httpGet, tcpSocket and exec, not {sorted(action)}")


async def _executed(argv: Sequence[str], target: Target) -> bool:
    process = await asyncio.create_subprocess_exec(
        *argv,
        env=dict(target.environment),
        cwd=target.folder,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        return await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def watch_health(container: Object, target: Target, prober: Prober) -> AsyncGenerator[Health, None]:
    """What the container's probes say, each time it changes. Ends only with a `failed`."""
    if startup := container.get("startupProbe"):
        async for passed in _verdicts(startup, target, prober, before=False, patient=True):
            if passed:
                break
            yield Health(started=False, ready=False, failed="Startup")
            return
    readiness, liveness = container.get("readinessProbe"), container.get("livenessProbe")
    yield Health(started=True, ready=readiness is None)
    told: asyncio.Queue[Health] = asyncio.Queue()
    tasks = []
    if readiness is not None:
        tasks.append(asyncio.create_task(_tell_readiness(readiness, target, prober, told)))
    if liveness is not None:
        tasks.append(asyncio.create_task(_tell_liveness(liveness, target, prober, told)))
    try:
        while True:
            yield await told.get()
    finally:
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


async def _tell_readiness(probe: Object, target: Target, prober: Prober, told: asyncio.Queue[Health]) -> None:
    async for passed in _verdicts(probe, target, prober, before=False, patient=False):
        told.put_nowait(Health(started=True, ready=passed))


async def _tell_liveness(probe: Object, target: Target, prober: Prober, told: asyncio.Queue[Health]) -> None:
    async for passed in _verdicts(probe, target, prober, before=True, patient=True):
        if not passed:
            told.put_nowait(Health(started=True, ready=False, failed="Liveness"))


async def _verdicts(
    probe: Object, target: Target, prober: Prober, *, before: bool, patient: bool
) -> AsyncGenerator[bool, None]:
    """Each change of the probe's verdict, starting from `before`; for a startup probe that fails from the start, the
    failure itself. `patient`: the time until a failure counts is not scaled."""
    timing = prober.timing
    period_s = max(timing.seconds(probe.get("periodSeconds", 10)), LEAST_PERIOD_S)
    allowed = probe.get("failureThreshold", 3)
    if patient:
        allowed = math.ceil(allowed * probe.get("periodSeconds", 10) / period_s)
    needed = probe.get("successThreshold", 1)
    verdict, passed, failed = before, 0, 0
    await asyncio.sleep(timing.seconds(probe.get("initialDelaySeconds", 0)))
    while True:
        if await prober.once(probe, target):
            passed, failed = passed + 1, 0
        else:
            passed, failed = 0, failed + 1
        if (not verdict and passed >= needed) or (failed == allowed and (verdict or patient)):
            verdict = failed == 0
            yield verdict
        await asyncio.sleep(period_s)
