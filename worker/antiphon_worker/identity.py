"""Who a worker process is: its name, which may outlive it, and its incarnation, which may not."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Literal

from antiphon_proto.worker_pb2 import Role

from antiphon_worker.options import WorkerOptions

_ROLES: dict[str, Role.ValueType] = {"prefill": Role.ROLE_PREFILL, "decode": Role.ROLE_DECODE, "both": Role.ROLE_BOTH}


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """Names one process. Whatever spoke of another incarnation of the same `worker_id` is void."""

    worker_id: str
    incarnation: str
    role: Literal["prefill", "decode", "both"]
    """prefill, decode or both."""
    role_version: int = 1

    @property
    def wire_role(self) -> Role.ValueType:
        return _ROLES[self.role]

    @property
    def prefills(self) -> bool:
        """Whether it serves `Prefill.Run`."""
        return self.role in ("prefill", "both")

    @property
    def decodes(self) -> bool:
        """Whether it takes requests from gateways."""
        return self.role in ("decode", "both")


def new_identity(options: WorkerOptions) -> WorkerIdentity:
    """The identity of this process: the name it was given or a random one, and a random incarnation."""
    role: Literal["prefill", "decode", "both"]
    match options.role:
        case "prefill" | "decode" | "both":
            role = options.role
        case other:
            raise ValueError(f"there is no role {other!r}: use prefill, decode or both")
    return WorkerIdentity(
        worker_id=options.worker_id or f"{options.role}-{secrets.token_hex(4)}",
        incarnation=secrets.token_hex(8),
        role=role,
    )
