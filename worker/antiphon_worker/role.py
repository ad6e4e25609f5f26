"""Which role a worker process has now: prefill or decode, which may change in its life, or both, which does not.

A change costs nothing but a number: every process has the services of both roles, the engine knows neither, and the KV
blocks stay where they are, under the same incarnation. So peers, pins and index go on as they are. What was taken in
the old role goes on to its end: new requests of it are refused from the moment of the change, and gateways are told of
it before they can meet such a refusal.

The object is shared by all parts of one worker, on its event loop. `ChangeRefused` says why a worker keeps its role.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from antiphon_proto.worker_pb2 import Role

RoleName = Literal["prefill", "decode", "both"]

_WIRE: dict[RoleName, Role.ValueType] = {
    "prefill": Role.ROLE_PREFILL,
    "decode": Role.ROLE_DECODE,
    "both": Role.ROLE_BOTH,
}


def role_of(name: str) -> RoleName:
    """Of an option."""
    match name:
        case "prefill" | "decode" | "both":
            return name
        case other:
            raise ValueError(f"there is no role {other!r}: use prefill, decode or both")


class ChangeRefused(Exception):
    """The worker keeps its role; the message says why, and what to do."""


class ChangeOutdated(ChangeRefused):
    """The role has been changed since: ask again with the version that it has now, if it is still wanted."""


class CurrentRole:
    """See the module. Starts as `name`, version 1."""

    def __init__(self, name: RoleName) -> None:
        self.name: RoleName = name
        self.version = 1
        self.on_change: list[Callable[[], None]] = []
        """Called in order, at once, after each change."""

    @property
    def wire(self) -> Role.ValueType:
        return _WIRE[self.name]

    @property
    def prefills(self) -> bool:
        """Whether it serves `Prefill.Run`."""
        return self.name in ("prefill", "both")

    @property
    def decodes(self) -> bool:
        """Whether it takes requests from gateways."""
        return self.name in ("decode", "both")

    def change(self, wanted: Role.ValueType, expected_version: int) -> bool:
        """Take another role; False: it has it already. `expected_version`: 0 for any.

        Raises ChangeRefused, and ChangeOutdated where another change came first.
        """
        name = next((name for name, value in _WIRE.items() if value == wanted), None)
        if name is None or name == "both":
            raise ChangeRefused("the role asked for has to be prefill or decode")
        if name == self.name:
            return False
        if self.name == "both":
            raise ChangeRefused("a worker that does both has none to change: start it with --role prefill or decode")
        if expected_version not in (0, self.version):
            raise ChangeOutdated(
                f"the role is {self.name}, version {self.version}, and was asked to change from version "
                f"{expected_version}: look again"
            )
        self.name = name
        self.version += 1
        for told in self.on_change:
            told()
        return True
