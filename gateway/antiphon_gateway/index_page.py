"""`GET /v1/antiphon/index` and `/v1/antiphon/index/WORKER`: what this gateway believes that workers hold.

For whoever asks whether it is right: where the worker's own `/blocks` page has the same incarnation and sequence, it
has the same digest. The hashes themselves stay here, as there may be a million. What the first page costs grows with
the workers, what the second one costs with one worker's blocks, which are sorted on a thread of their own.
"""

from __future__ import annotations

import asyncio

import msgspec
from antiphon_kvtransfer.cluster import ClusterMirror
from antiphon_kvtransfer.identity import contents_digest

from antiphon_gateway.errors import ApiError

PATH = "/v1/antiphon/index"


class WorkerPosition(msgspec.Struct):
    """Up to which change of its set a worker is known."""

    model: str
    incarnation: str
    sequence: int
    """-1: nothing is known yet."""


class IndexPage(msgspec.Struct):
    redis: str
    """`ok`, `down` (what is known stays), `none`."""
    blocks: int
    """(worker, block) pairs in all."""
    sets_loaded: int
    """Whole sets read since the gateway started: it grows by one a worker, and again whenever changes were missed."""
    workers: dict[str, WorkerPosition]


class WorkerIndexPage(msgspec.Struct):
    model: str
    incarnation: str
    sequence: int
    blocks: int
    digest: str
    """SHA-256 of all hashes in order, in hexadecimal digits."""


def overview(mirror: ClusterMirror | None) -> IndexPage:
    if mirror is None:
        return IndexPage("none", 0, 0, {})
    workers = {worker_id: _position(mirror, worker_id) for worker_id in sorted(mirror.workers())}
    return IndexPage("ok" if mirror.healthy else "down", mirror.blocks.blocks, mirror.reloads, workers)


async def of_worker(mirror: ClusterMirror | None, worker_id: str) -> WorkerIndexPage:
    """Raises ApiError (404)."""
    if mirror is None or worker_id not in mirror.workers():
        raise ApiError(
            404,
            f"No worker {worker_id[:200]!r} is announced. GET {PATH} lists those that are.",
            type="invalid_request_error",
            code="worker_not_known",
        )
    at = _position(mirror, worker_id)
    contents = mirror.blocks.contents(at.model, worker_id)
    digest = await asyncio.to_thread(contents_digest, contents)
    return WorkerIndexPage(at.model, at.incarnation, at.sequence, len(contents), digest)


def _position(mirror: ClusterMirror, worker_id: str) -> WorkerPosition:
    record = mirror.workers()[worker_id]
    position = mirror.blocks.position(record.model, worker_id)
    if position is None:
        return WorkerPosition(record.model, record.incarnation, -1)
    return WorkerPosition(record.model, position.incarnation, position.sequence)
