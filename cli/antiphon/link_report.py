"""How KV blocks move on this machine, in a line for people: which transport is in use, and how fast it was measured.

Workers wire up to each other in the background, as soon as the gateway has told them of their peers. A link that fell
back to a slower transport works, so nothing else would tell.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class Link(msgspec.Struct, frozen=True):
    peer_worker_id: str
    transport: str
    gigabytes_per_s: float
    up: bool
    detail: str = ""


class WorkerStatus(msgspec.Struct, frozen=True):
    """What of a worker's status page is read here."""

    worker_id: str
    role: str
    links: tuple[Link, ...] = ()


class WorkerReady(msgspec.Struct, frozen=True):
    """What of a worker's ready file is read here."""

    status_address: str


def is_complete(statuses: Sequence[WorkerStatus]) -> bool:
    """Whether every decode worker has a link up to every prefill worker."""
    prefill = {status.worker_id for status in statuses if status.role == "prefill"}
    return all(
        prefill <= {link.peer_worker_id for link in status.links if link.up}
        for status in statuses
        if status.role == "decode"
    )


def describe(statuses: Sequence[WorkerStatus]) -> str:
    """The line."""
    prefill = {status.worker_id for status in statuses if status.role == "prefill"}
    links = [
        link
        for status in statuses
        if status.role == "decode"
        for link in status.links
        if link.up and link.peer_worker_id in prefill
    ]
    if not links:
        return "no link between the workers yet: until there is one, decode workers compute prompts themselves"
    slowest: dict[str, float] = {}
    for link in links:
        slowest[link.transport] = min(link.gigabytes_per_s, slowest.get(link.transport, link.gigabytes_per_s))
    shown = " and ".join(f"{name} ({speed:.1f} GB/s measured)" for name, speed in sorted(slowest.items()))
    unfinished = "" if is_complete(statuses) else "; not all links are up yet"
    return f"KV blocks move over {shown}{unfinished}"
