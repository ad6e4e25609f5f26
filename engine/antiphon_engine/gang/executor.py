"""`GangExecutor`: steps on many ranks. The driver's side, in the worker's process.

`begin` packs a step once, sends the same bytes to all ranks, and returns; one thread reads what they say and ends the
steps' futures, in their order. Every rank writes its own part of the KV; when the sampling rank has answered, all have
(its last layer's sum needed them). So a step costs one send a rank, one receive, and no call of Ray's.

What may fail: a rank. A closed connection, a step that a rank could not compute (the others then wait in a collective
that never ends), silence (`GangSettings.silent_s`), or a step that does not end (`step_s`) lose the executor: all steps
in flight end with `ExecutorLost` at once, and so do later ones. Nothing is mended here: whoever owns the executor
closes it, which ends all ranks, and makes another.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future

import msgspec
from antiphon_kvtransfer.offer import TransportOffer
from antiphon_kvtransfer.plane import RankPlane
from antiphon_kvtransfer.remote_plane import RemoteRankPlane

from antiphon_engine.executor import (
    Executor,
    ExecutorLost,
    RankTimes,
    SampledToken,
    SequenceStep,
    rows_wanted,
    step_results,
)
from antiphon_engine.gang import messages
from antiphon_engine.gang.channel import framed
from antiphon_engine.gang.cluster import RayCluster
from antiphon_engine.gang.gathering import Gang, gather
from antiphon_engine.gang.helper import HelperEnded
from antiphon_engine.gang.helper_events import Failed, RankEnded
from antiphon_engine.gang.histories import SentHistories
from antiphon_engine.gang.rank_link import RankLink
from antiphon_engine.gang.start import GangSettings
from antiphon_engine.interface import KvMemory, ModelInfo
from antiphon_engine.torch_engine.step_batch import build_batch

logger = logging.getLogger("antiphon.engine.gang")

LOOK_S = 0.5
LEAVE_S = 5.0
REASON_S = 1.0
"""How long Ray is asked why a rank's connection ended, for the log alone."""

_Result = list[SampledToken | None]


class GangExecutor(Executor):
    @classmethod
    def start(
        cls,
        settings: GangSettings,
        cluster: RayCluster,
        progress: Callable[[str], None],
        stop: threading.Event,
        problem: Callable[[str], None] = lambda _: None,
    ) -> GangExecutor:
        """Have the ranks placed, started and loaded. Takes as long as that does.

        `progress` gets a line for whatever is waited for, `problem` a sentence while ranks find no place, and an empty
        one when they do. Raises GangStartError, GangStopped (`stop` was set).
        """
        return cls(settings, gather(settings, cluster, progress, stop, problem))

    def __init__(self, settings: GangSettings, gang: Gang) -> None:
        self._settings = settings
        self._info = gang.info
        self._kv = KvMemory(0, gang.info.kv_block_bytes, gang.num_blocks)
        self._ranks = gang.ranks
        self._placer = gang.placer
        self._histories = SentHistories()
        self._lock = threading.Lock()
        self._waiting: deque[tuple[int, Sequence[SequenceStep], Future[_Result]]] = deque()
        """Steps in flight: number, what is computed, and who waits."""
        self._oldest_since = 0.0
        """When the first of them became that: it was begun, or the one before it ended."""
        self._next_step = 0
        self._rank_times = RankTimes(0.0, 0.0)
        self._lost: ExecutorLost | None = None
        self._when_lost: Callable[[ExecutorLost], None] = lambda _: None
        self._closing = threading.Event()
        self._reader = threading.Thread(target=self._read, name="gang-reader", daemon=True)
        self._reader.start()

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def kv(self) -> KvMemory:
        """Of whole blocks. They lie in the ranks' processes: there is no address here."""
        return self._kv

    @property
    def depth(self) -> int:
        return self._settings.shape.pipeline

    @property
    def rank_times(self) -> RankTimes:
        """Of the steps that have ended; counted before a step's future ends."""
        return self._rank_times

    @property
    def pids(self) -> tuple[int, ...]:
        """Of the ranks' processes, each on its own machine."""
        return tuple(rank.pid for rank in self._ranks)

    @property
    def nodes(self) -> tuple[str, ...]:
        """Ray's node of each rank."""
        return tuple(rank.node for rank in self._ranks)

    def when_lost(self, tell: Callable[[ExecutorLost], None]) -> None:
        with self._lock:
            self._when_lost = tell
            lost = self._lost
        if lost is not None:
            tell(lost)

    def planes(self, offer: TransportOffer) -> Sequence[RankPlane]:
        """Called once."""
        self._send(framed(messages.ENCODER.encode(messages.ServeTransfers(offer))))
        return [
            RemoteRankPlane(rank.rank, rank.part, self._kv.num_blocks, rank.block_bytes, rank.take_transfers())
            for rank in self._ranks
        ]

    def execute(self, step: Sequence[SequenceStep]) -> _Result:
        return self.begin(step).result()

    def begin(self, step: Sequence[SequenceStep]) -> Future[_Result]:
        future: Future[_Result] = Future()
        if not step:
            future.set_result([])
            return future
        info = self._info
        try:
            batch = build_batch(
                step,
                block_tokens=info.block_tokens,
                num_blocks=self._kv.num_blocks,
                vocab_size=info.vocab_size,
                max_context_tokens=info.max_context_tokens,
            )
            data = framed(messages.pack_step(self._next_step, batch, self._histories.pack(step)))
        except Exception as error:  # noqa: BLE001 - the future carries it to whoever waits
            future.set_exception(error)
            return future
        with self._lock:
            if self._lost is not None:
                future.set_exception(self._lost)
                return future
            if not self._waiting:
                self._oldest_since = time.monotonic()
            self._waiting.append((self._next_step, step, future))
        self._next_step += 1
        self._send(data)
        return future

    def close(self) -> None:
        """End all ranks and give their places back. Idempotent."""
        self._lose("it is closed", expected=True)
        self._closing.set()
        end = framed(messages.ENCODER.encode(messages.End()))
        for rank in self._ranks:
            with contextlib.suppress(OSError):
                rank.steps.settimeout(0.2)
                rank.steps.sendall(end)
        self._reader.join(LEAVE_S)
        for rank in self._ranks:
            rank.close()
        self._placer.close(2 * LEAVE_S)

    # -- inside

    def _send(self, data: bytes) -> None:
        for rank in self._ranks:
            try:
                rank.send(data)
            except OSError as error:
                self._lose(f"rank {rank.rank} takes no steps: {error}")
                return

    def _read(self) -> None:
        """All ranks' messages, until all connections are closed."""
        heard = {rank.rank: time.monotonic() for rank in self._ranks}
        with selectors.DefaultSelector() as selector:
            for rank in self._ranks:
                selector.register(rank.steps, selectors.EVENT_READ, rank)
            leave_at = float("inf")
            while selector.get_map() and time.monotonic() < leave_at:
                for key, _ in selector.select(LOOK_S):
                    rank = key.data
                    heard[rank.rank] = time.monotonic()
                    if not self._take_from(rank):
                        selector.unregister(rank.steps)
                        del heard[rank.rank]
                if self._closing.is_set():
                    leave_at = min(leave_at, time.monotonic() + LEAVE_S)
                else:
                    self._look_at_the_clock(heard)

    def _look_at_the_clock(self, heard: Mapping[int, float]) -> None:
        now = time.monotonic()
        silent_s, step_s = self._settings.silent_s, self._settings.step_s
        silent = min(heard, key=lambda rank: heard[rank], default=None)
        if silent is not None and now - heard[silent] > silent_s:
            self._lose(f"rank {silent} has said nothing for {silent_s:.0f} s")
            return
        with self._lock:
            late = self._waiting[0][0] if self._waiting and now - self._oldest_since > step_s else None
        if late is not None:
            self._lose(f"step {late} is not done after {step_s:.0f} s, and no rank says why")

    def _take_from(self, rank: RankLink) -> bool:
        """False: the connection is over."""
        try:
            received = rank.receive()
            for message in received or ():
                self._take(rank, message)
        except (OSError, msgspec.DecodeError) as error:
            self._lose(f"rank {rank.rank} is gone: {error}")
            return False
        if received is None:
            if self._lost is None:
                self._lose(f"rank {rank.rank} is gone")
                logger.error("rank %d (%s) is gone: %s", rank.rank, rank.where, self._why_gone(rank.rank))
            return False
        return True

    def _take(self, rank: RankLink, message: messages.FromRank) -> None:
        match message:
            case messages.Sampled():
                self._finish(rank, message)
            case messages.StepFailed(number, text):
                self._lose(f"rank {rank.rank} failed in step {number}: {text}")
            case messages.Said():
                rank.log(message)
            case messages.Alive():
                pass
            case _:
                self._lose(f"rank {rank.rank} said {type(message).__name__} in the middle of its work")

    def _finish(self, rank: RankLink, message: messages.Sampled) -> None:
        number, tokens = message.step, message.tokens
        with self._lock:
            if self._lost is not None:
                return
            expected, step, future = self._waiting[0] if self._waiting else (-1, (), Future())
            fitting = number == expected and len(tokens) == rows_wanted(step)
            if fitting:
                self._waiting.popleft()
                known = self._rank_times
                self._rank_times = RankTimes(known.busy_s + message.busy_s, known.exchange_s + message.exchange_s)
                self._oldest_since = time.monotonic()
        if not fitting:
            self._lose(f"rank {rank.rank} answered step {number} with {len(tokens)} tokens, out of turn")
            return
        future.set_result(step_results(step, tokens))

    def _lose(self, reason: str, *, expected: bool = False) -> None:
        with self._lock:
            if self._lost is not None:
                return
            self._lost = ExecutorLost(f"the ranks are lost: {reason}")
            waiting, self._waiting = list(self._waiting), deque()
            tell = self._when_lost
        if not expected:
            logger.error("the ranks are lost: %s", reason)
            tell(self._lost)
        for _, _, future in waiting:
            future.set_exception(self._lost)
        if not expected:
            # The others wait for one that is gone, or are about to.
            for rank in self._ranks:
                with contextlib.suppress(OSError):
                    rank.steps.shutdown(socket.SHUT_RDWR)

    def _why_gone(self, rank: int) -> str:
        """What Ray says. For people only, who wait for it a moment."""
        ends_at = time.monotonic() + REASON_S
        with contextlib.suppress(HelperEnded):
            while (left_s := ends_at - time.monotonic()) > 0 and not self._closing.is_set():
                match self._placer.next(min(left_s, 0.1)):
                    case RankEnded(ended, reason) if ended == rank:
                        return reason
                    case Failed(message):
                        return message
        return "Ray does not say why"
