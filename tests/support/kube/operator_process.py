"""The real operator as tests handle it: `antiphon operator` as a process of its own, against any API server.

    async with OperatorProcess(cluster.kubeconfig, tmp_path) as operator:
        await operator.until_acting()
        operator.kill()
        await operator.restart()

It knows neither Redis nor gateways unless it is told of them. Each process has its own folder with a ready-file, which
says where its status pages are, and a log, which goes on through restarts. The kernel ends it with the test's process.
With `revived` it is started again when it lost its Lease and no test had a hand in that, as its Deployment would do:
a machine that stood still for seconds is not what a scenario is about.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import aiohttp

DEADLINE_S = 90.0
"""Longer than a Lease that a killed operator left behind."""
POLL_S = 0.05
LEASE_NAMESPACE = "default"
LEASE_NOT_RENEWED = "the Lease was not renewed"
_PR_SET_PDEATHSIG = 1
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_prctl = ctypes.CDLL(None, use_errno=True).prctl


def _die_with_the_test() -> None:
    """In the child, before exec."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


PATIENT = ("--lease-s", "24")
"""For tests that are not about the Lease: an operator and an API server share a small machine with other tests, and one
that is not answered for a while is not to end of it."""


class OperatorProcess:
    """`options` are further words of `antiphon operator`; they win over those given here."""

    def __init__(
        self,
        kubeconfig: Path,
        folder: Path,
        *options: str,
        name: str = "operator",
        redis_url: str = "",
        credentials_key_file: Path | None = None,
        gateway_url: str = "",
        lease_namespace: str = LEASE_NAMESPACE,
        program: Sequence[str] = (sys.executable, "-m", "antiphon", "operator"),
        environment: Mapping[str, str] | None = None,
        revived: bool = False,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.name = name
        self.log = folder / f"{name}.log"
        self.process: asyncio.subprocess.Process | None = None
        self._ready_file = folder / f"{name}.json"
        self._environment = dict(environment or {})
        words = [
            *("--kubeconfig", str(kubeconfig), "--ready-file", str(self._ready_file)),
            *("--host", "127.0.0.1", "--status-port", "0", "--identity", name, "--lease-namespace", lease_namespace),
        ]
        if redis_url:
            words += ["--redis-url", redis_url]
        if credentials_key_file is not None:
            words += ["--credentials-key-file", str(credentials_key_file)]
        if gateway_url:
            words += ["--gateway-url", gateway_url]
        self._command = [*program, *words, *options]
        self._url = ""
        self._revived = revived
        self._reviving: asyncio.Task[None] | None = None
        self._signalled = False

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._reviving is not None:
            self._reviving.cancel()
            await asyncio.gather(self._reviving, return_exceptions=True)
        if self.is_running:
            self.resume()
            self.kill()
            await self.ended()

    # -- its life

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.returncode is None

    @property
    def was_ended(self) -> bool:
        """By a test, which leaves it so."""
        return self._signalled and not self.is_running

    async def start(self) -> None:
        """Returns when its status pages are there; it may be a standby then."""
        assert not self.is_running, f"{self.name} runs already"
        self._signalled = False
        self._ready_file.unlink(missing_ok=True)
        with self.log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *self._command,
                stdout=log,
                stderr=log,
                env={**_inherited(), "PYTHONUNBUFFERED": "1", **self._environment},
                preexec_fn=_die_with_the_test,
            )
        try:
            async with asyncio.timeout(DEADLINE_S):
                while not self._ready_file.exists():
                    assert self.is_running, f"{self.name} ended at once:\n{self.last_lines()}"
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise AssertionError(
                f"{self.name} has no status pages after {DEADLINE_S} s:\n{self.last_lines()}"
            ) from None
        self._url = f"http://{json.loads(self._ready_file.read_text())['status_address']}"
        if self._revived and self._reviving is None:
            self._reviving = asyncio.create_task(self._revive())

    async def _revive(self) -> None:
        while not self._signalled:
            assert self.process is not None
            await self.process.wait()
            if self._signalled or LEASE_NOT_RENEWED not in self.last_lines(1):
                break
            await self.start()
        self._reviving = None

    def kill(self) -> None:
        """kill -9: its Lease stays until it expires."""
        self._send(signal.SIGKILL)

    def terminate(self) -> None:
        """SIGTERM: it lets go of the Lease and ends."""
        self._send(signal.SIGTERM)

    def pause(self) -> None:
        """SIGSTOP."""
        self._send(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        self._send(signal.SIGCONT)

    async def ended(self) -> int:
        """Its exit status: negative for a signal."""
        assert self.process is not None
        try:
            async with asyncio.timeout(DEADLINE_S):
                return await self.process.wait()
        except TimeoutError:
            raise AssertionError(f"{self.name} did not end in {DEADLINE_S} s:\n{self.last_lines()}") from None

    async def stop(self) -> int:
        """In good order; the exit status."""
        self.terminate()
        return await self.ended()

    async def restart(self) -> None:
        """A fresh process, after the end of the one before, whatever ended it."""
        await self.ended()
        await self.start()

    # -- what it tells

    async def page(self, path: str) -> tuple[int, str]:
        timeout = aiohttp.ClientTimeout(total=5)
        async with aiohttp.ClientSession(timeout=timeout) as session, session.get(self._url + path) as answer:
            return answer.status, await answer.text()

    async def status(self) -> dict[str, Any]:
        """Of the `/status` page: role, identity, models, queue_depth, ..."""
        told: dict[str, Any] = json.loads((await self.page("/status"))[1])
        return told

    async def until_role(self, role: str) -> None:
        """`standby`, `acting`, ..."""
        try:
            async with asyncio.timeout(DEADLINE_S):
                while (await self.status())["role"] != role:  # noqa: ASYNC110 - another process has no event of ours
                    await asyncio.sleep(POLL_S)
        except (TimeoutError, aiohttp.ClientError) as error:
            why = f"{type(error).__name__}: {error}"
            raise AssertionError(f"{self.name} is not {role} ({why}):\n{self.last_lines()}") from error

    async def until_acting(self) -> None:
        await self.until_role("acting")

    async def samples(self, name: str) -> list[tuple[dict[str, str], float]]:
        """All samples of one metric, at one moment: labels and value."""
        found = []
        for line in (await self.page("/metrics"))[1].splitlines():
            sample, _, value = line.rpartition(" ")
            if sample.partition("{")[0] == name:
                found.append((dict(_LABEL.findall(sample)), float(value)))
        return found

    async def metric(self, name: str, **labels: str) -> float:
        """The sum over all samples with these labels; 0 where there are none."""
        samples = await self.samples(name)
        return sum(value for told, value in samples if labels.items() <= told.items())

    def last_lines(self, count: int = 40) -> str:
        """Of its log."""
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return "\n".join(lines[-count:])

    def _send(self, number: signal.Signals) -> None:
        assert self.process is not None
        self._signalled = True
        self.process.send_signal(number)


def _inherited() -> dict[str, str]:
    """Without options that this machine may have set for an operator of its own."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("ANTIPHON_", "POD_"))}
