"""Who a worker process is: its name, which may outlive it, and its incarnation, which may not. What it does is its
role (`role`), which may change."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from antiphon_worker.options import WorkerOptions


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """Names one process. Whatever spoke of another incarnation of the same `worker_id` is void."""

    worker_id: str
    incarnation: str


def new_identity(options: WorkerOptions) -> WorkerIdentity:
    """The identity of this process: the name it was given or a random one, and a random incarnation."""
    return WorkerIdentity(
        worker_id=options.worker_id or f"{options.role}-{secrets.token_hex(4)}",
        incarnation=secrets.token_hex(8),
    )
