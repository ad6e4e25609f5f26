"""One run of one container as a local process: its log, its end, its probes, and how it is stopped.

The process leads a group of its own. SIGTERM goes to the process, as to a container's first one; when it has ended,
the rest of the group is killed, as a container ends with its first process. The kernel kills it when this process dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.kube.controllers import clock
from tests.support.kube.kubelets.probes import Prober, Target, watch_health
from tests.support.kube.kubelets.runtime import Health
from tests.support.kube.kubelets.status import Exit

Object = dict[str, Any]
MESSAGE_BYTES = 4096
FALLBACK_BYTES = 2048
FALLBACK_LINES = 80
START_ERROR = 128
SIGNALLED = 128
_PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None, use_errno=True).prctl


def _die_with_the_kubelet() -> None:
    """In the child, before exec."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class Command:
    """What is run. All of it in the machine's own terms: paths and addresses are substituted."""

    argv: Sequence[str]
    environment: Mapping[str, str]
    folder: Path
    log: Path
    termination_message: Path


class ProcessRun:
    """Started when made; must be made in a running loop."""

    def __init__(self, container: Object, command: Command, target: Target, prober: Prober, container_id: str) -> None:
        self.container_id = container_id
        self._container, self._command, self._target, self._prober = container, command, target, prober
        self._started_at = clock.now()
        self._exit: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()
        self._process = self._begin()

    @property
    def pid(self) -> int | None:
        """None where it could not be started."""
        return None if self._process is None else self._process.pid

    async def ended(self) -> Exit:
        return await asyncio.shield(self._exit)

    def health(self) -> AsyncGenerator[Health, None]:
        return watch_health(self._container, self._target, self._prober)

    async def stop(self, grace_s: float) -> None:
        """preStop and SIGTERM within the grace, then SIGKILL of the group."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._before_stop()
                self._signal(signal.SIGTERM)
                await self.ended()
        self.kill()
        await self.ended()

    def kill(self) -> None:
        self.signal_group(signal.SIGKILL)

    def signal_group(self, number: signal.Signals) -> None:
        if self._process is not None and not self._exit.done():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def end_now(self) -> None:
        """Killed and reaped before it returns."""
        if self._process is not None and not self._exit.done():
            self.kill()
            self._process.wait()
            self._reap()

    def _begin(self) -> subprocess.Popen[bytes] | None:
        command = self._command
        command.log.parent.mkdir(parents=True, exist_ok=True)
        command.termination_message.write_bytes(b"")
        try:
            with command.log.open("ab") as log:
                process = subprocess.Popen(
                    list(command.argv),
                    env=dict(command.environment),
                    cwd=command.folder,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    preexec_fn=_die_with_the_kubelet,
                )
        except OSError as error:
            self._exit.set_result(Exit(START_ERROR, str(error), reason="StartError", started_at=self._started_at))
            return None
        self._pidfd = os.pidfd_open(process.pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._reap)
        return process

    def _reap(self) -> None:
        if self._exit.done() or self._process is None:
            return
        code = self._process.wait()
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        how = Exit(
            code if code >= 0 else SIGNALLED - code,
            self._message(failed=code != 0),
            signal=max(0, -code),
            started_at=self._started_at,
        )
        self._exit.set_result(how)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and not self._exit.done():
            self._process.send_signal(number)

    def _message(self, *, failed: bool) -> str:
        written = self._command.termination_message.read_bytes()[:MESSAGE_BYTES].decode(errors="replace")
        if written or not failed or self._container.get("terminationMessagePolicy") != "FallbackToLogsOnError":
            return written
        lines = self._command.log.read_text(errors="replace").splitlines(keepends=True)
        return "".join(lines[-FALLBACK_LINES:])[-FALLBACK_BYTES:]

    async def _before_stop(self) -> None:
        hook = (self._container.get("lifecycle") or {}).get("preStop")
        if hook is None or self._exit.done():
            return
        if sleep := hook.get("sleep"):
            await asyncio.wait({self._exit}, timeout=sleep["seconds"])
        else:
            await self._prober.once(hook, self._target)
