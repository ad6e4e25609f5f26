"""The reader's side: links to peers, and pulls of KV blocks over them.

`PeerLinks` is one per worker process. It owns the data plane, one `PeerLink` per peer, and every task and channel of
theirs. A link is wired up in the background, before the first request needs it: fetch the peer's card, check that its
blocks are like ours, connect each of our ranks to those of the peer's whose layers and heads it shares, measure, open
the `Pin` call. From then on both ends send heartbeats on that call; when nothing has come for `lost_after_ms` the link
is broken, all its pulls fail, and it is wired up again with back-off for as long as the peer is wanted.

The one idea of a pull: *pin, read, confirm*. Reads are one-sided, so nothing on the wire says that the holder still
meant those blocks while they were read. Only the holder's word, given after the read had completed, that the pin stood
all the time makes the content certain, and `pull` counts nothing without it. And *a read that was given up may still
write*: target blocks are retained in our engine before the read starts, and released by the end of the read itself,
whatever became of the pull by then.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from antiphon_proto import worker_pb2

from antiphon_kvtransfer._session import LinkError, LocalEnd, PeerAddress, PeerLeft, Session, wire_up
from antiphon_kvtransfer.cards import LocalWorker
from antiphon_kvtransfer.data_plane import DataPlane
from antiphon_kvtransfer.identity import BlockHash
from antiphon_kvtransfer.pins import MAX_HASHES_PER_PIN, BlockKeeper, KvBlocksService

__all__ = ["BlockKeeper", "LinkError", "LinkStatus", "LocalWorker", "PeerAddress", "PeerLink", "PeerLinks"]

_log = logging.getLogger("antiphon.kvtransfer.links")

_FIRST_BACK_OFF_S = 0.1
_LONGEST_BACK_OFF_S = 2.0
_IDLE_CLOSE_S = 30.0


@dataclass(frozen=True, slots=True)
class LinkStatus:
    peer_worker_id: str
    transport: str
    """In use; empty while the link is down."""
    gigabytes_per_s: float
    """Measured when wired up; 0 while the link is down."""
    up: bool
    detail: str
    """Why it is down, or why it does not use the transport that was wanted most. Empty: nothing to say."""


class PeerLinks:
    """All links of one worker. Owns the `plane`: starts it, and closes it."""

    def __init__(
        self,
        local: LocalWorker,
        plane: DataPlane,
        keeper: BlockKeeper,
        *,
        heartbeat_ms: int = 500,
        lost_after_ms: int = 1500,
    ) -> None:
        self._end = LocalEnd(local, plane, keeper, heartbeat_ms, lost_after_ms)
        self._links: dict[str, PeerLink] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._service = KvBlocksService(local, plane, keeper, heartbeat_ms=heartbeat_ms, lost_after_ms=lost_after_ms)

    async def start(self) -> None:
        """Start the data plane. Raises TransportUnavailable if no transport can run."""
        await self._end.plane.start()

    @property
    def held_blocks(self) -> int:
        """Blocks pinned here for peers."""
        return self._service.held_blocks

    def servicer(self) -> KvBlocksService:
        """The holder's side, for the local gRPC server."""
        return self._service

    def wanted(self, peers: Sequence[PeerAddress]) -> None:
        """Wire up to these in the background and keep the links up; links to others are closed when idle."""
        named = {peer.worker_id for peer in peers}
        for worker_id, link in self._links.items():
            if worker_id not in named:
                link.want(False)
        for peer in peers:
            if peer.worker_id != self._end.worker.worker_id:
                self._get(peer).want(True)

    async def link(self, peer: PeerAddress, deadline_s: float) -> PeerLink:
        """The link to this incarnation of the peer, wired up if need be. Raises LinkError."""
        link = self._get(peer)
        await link.until_up(deadline_s)
        return link

    def statuses(self) -> list[LinkStatus]:
        return [link.status() for link in self._links.values()]

    async def close(self) -> None:
        """End all links and transports. Pulls fail; pins made here by peers are released."""
        self._service.close()
        for task in self._running:
            task.cancel()
        if self._running:
            await asyncio.wait(set(self._running))
        self._links.clear()
        await self._end.plane.close()

    def _get(self, peer: PeerAddress) -> PeerLink:
        known = self._links.get(peer.worker_id)
        if known is not None:
            if known.peer.incarnation == peer.incarnation:
                known.move(peer)
                return known
            # Another incarnation: whatever spoke of the old one is void.
            known.retire(LinkError(f"worker {peer.worker_id} was replaced by incarnation {peer.incarnation}"))
        link = PeerLink(self._end, peer)
        self._links[peer.worker_id] = link
        task = asyncio.get_running_loop().create_task(link.run(), name=f"link to {peer.worker_id}")
        link.task = task
        self._running.add(task)
        task.add_done_callback(lambda done: self._ended(link, done))
        return link

    def _ended(self, link: PeerLink, done: asyncio.Task[None]) -> None:
        self._running.discard(done)
        if self._links.get(link.peer.worker_id) is link:
            del self._links[link.peer.worker_id]
        if not done.cancelled() and (error := done.exception()) is not None:
            _log.error("the link to %s ended by a fault of its own", link.peer.worker_id, exc_info=error)


class PeerLink:
    """The link to one incarnation of one peer: up, or being wired up again."""

    def __init__(self, end: LocalEnd, peer: PeerAddress) -> None:
        self.peer = peer
        self.task: asyncio.Task[None] | None = None
        self._end = end
        self._session: Session | None = None
        self._attempt: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """The outcome of the attempt to wire up that runs or comes next."""
        self._problem = "not wired up yet"
        self._wanted = False
        self._hurry = asyncio.Event()
        """Somebody waits: do not back off, do not go to sleep."""
        self._used_at = time.monotonic()

    # -------------------------------------------------------------- pulls

    async def pull(self, hashes: Sequence[BlockHash], local_blocks: Sequence[int], *, deadline_s: float) -> int:
        """Read the leading blocks that the peer has of `hashes` into `local_blocks`.

        Returns how many leading blocks are in and certain: the peer confirmed that its pin stood when the read had
        completed. 0 when it has none or could not confirm. One pull moves at most MAX_HASHES_PER_PIN blocks. Raises
        LinkError when the link broke or time ran out. On any path the target blocks stay retained until nothing can
        write into them any more.
        """
        if len(hashes) != len(local_blocks):
            raise ValueError(f"{len(hashes)} hashes but {len(local_blocks)} local blocks")
        if not hashes:
            return 0
        what = worker_pb2.PinBlocks(hashes=list(hashes[:MAX_HASHES_PER_PIN]))
        return await self._pull(what, local_blocks[:MAX_HASHES_PER_PIN], deadline_s)

    async def pull_partial(self, request_id: str, local_block: int, *, deadline_s: float) -> bool:
        """As `pull`, for the last, not full block of a prefill. False when the peer does not have it."""
        what = worker_pb2.PinBlocks(partial_request_id=request_id)
        return await self._pull(what, [local_block], deadline_s) == 1

    async def _pull(self, what: worker_pb2.PinBlocks, local_blocks: Sequence[int], deadline_s: float) -> int:
        self._used_at = time.monotonic()
        session = self._session
        if session is None:
            raise LinkError(f"the link to worker {self.peer.worker_id} is down: {self._problem}")
        try:
            async with asyncio.timeout(deadline_s):
                return await session.pull(what, local_blocks, deadline_s)
        except TimeoutError as error:
            raise LinkError(
                f"a pull from worker {self.peer.worker_id} ({len(local_blocks)} blocks) did not end in {deadline_s:g} s"
            ) from error
        finally:
            self._used_at = time.monotonic()

    # -------------------------------------------------------------- state

    def status(self) -> LinkStatus:
        session = self._session
        problem = self._problem if session is None else self._end.plane.problem
        if session is None or problem:
            return LinkStatus(self.peer.worker_id, "", 0.0, False, problem)
        wire = session.wire
        return LinkStatus(self.peer.worker_id, wire.transport, wire.gigabytes_per_s, True, wire.detail)

    def want(self, wanted: bool) -> None:
        self._wanted = wanted

    def move(self, peer: PeerAddress) -> None:
        """The same incarnation was named at this address: it is tried next, unless the link is up as it is.

        A worker may go by several addresses (a static one and an advertised one): a link that works does not move.
        """
        if self._session is None:
            self.peer = peer

    async def until_up(self, deadline_s: float) -> None:
        """Returns when the link is up. Raises LinkError when the next attempt fails, or time runs out."""
        self._used_at = time.monotonic()
        if self._session is not None and not self._session.broken.done():
            return
        self._hurry.set()
        try:
            async with asyncio.timeout(deadline_s):
                await asyncio.shield(self._attempt)
        except TimeoutError as error:
            raise LinkError(
                f"the link to worker {self.peer.worker_id} was not up within {deadline_s:g} s: {self._problem}"
            ) from error

    def retire(self, reason: LinkError) -> None:
        """This incarnation is gone for good."""
        self._problem = str(reason)
        if self._session is not None:
            self._session.break_off(reason)
        if self.task is not None:
            self.task.cancel()

    async def run(self) -> None:
        """Wire up, keep up, wire up again. Ends when not wanted and idle; until then its owner cancels it."""
        back_off_s = _FIRST_BACK_OFF_S
        try:
            while not self._idle():
                self._hurry.clear()
                try:
                    await self._one_session()
                    back_off_s = _FIRST_BACK_OFF_S
                except LinkError as error:
                    if str(error) != self._problem:
                        _log.warning("no link to worker %s: %s", self.peer.worker_id, error)
                    self._fail_attempt(error)
                    back_off_s = min(2 * back_off_s, _LONGEST_BACK_OFF_S)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(back_off_s):
                        await self._hurry.wait()
        finally:
            self._fail_attempt(LinkError(f"the link to worker {self.peer.worker_id} is closed: {self._problem}"))

    def _idle(self) -> bool:
        return not self._wanted and not self._hurry.is_set() and time.monotonic() - self._used_at > _IDLE_CLOSE_S

    async def _one_session(self) -> None:
        """Raises LinkError if the wire-up failed; returns when the link broke later, or is not needed any more."""
        async with wire_up(self._end, self.peer) as session:
            wire = session.wire
            self._session = session
            done, self._attempt = self._attempt, asyncio.get_running_loop().create_future()
            done.set_result(None)
            _log.info(
                "link to worker %s is up: %s, %.2f GB/s%s",
                self.peer.worker_id,
                wire.transport,
                wire.gigabytes_per_s,
                f" ({wire.detail})" if wire.detail else "",
            )
            try:
                while not session.broken.done() and not (self._idle() and session.pulls == 0):
                    await asyncio.wait({session.broken}, timeout=_IDLE_CLOSE_S / 4)
            finally:
                self._session = None
                if session.broken.done():
                    reason = session.broken.result()
                    self._problem = str(reason)
                    level = logging.INFO if isinstance(reason, PeerLeft) else logging.WARNING
                    _log.log(level, "link to worker %s broke: %s", self.peer.worker_id, self._problem)
                else:
                    self._problem = "closed"

    def _fail_attempt(self, error: LinkError) -> None:
        self._problem = str(error)
        failed, self._attempt = self._attempt, asyncio.get_running_loop().create_future()
        failed.set_exception(error)
        failed.exception()  # Nobody may be waiting.
