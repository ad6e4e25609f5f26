"""From settings to ranks that are ready for steps: place, connect, agree on the pool, load.

Everything is waited for with a deadline and told while it is waited for. Whatever goes wrong, nothing stays behind.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from antiphon_engine.gang import messages
from antiphon_engine.gang.channel import Guest, Reception, new_secret
from antiphon_engine.gang.cluster import ClusterAddress, RayCluster
from antiphon_engine.gang.errors import GangStartError, GangStopped, GangUnschedulable
from antiphon_engine.gang.helper import Helper, HelperEnded
from antiphon_engine.gang.helper_events import Failed, NoPlace, Placed, Progress, RankEnded, Unschedulable
from antiphon_engine.gang.rank_link import RankLink
from antiphon_engine.gang.start import GangSettings, PlacerStart, RankStart
from antiphon_engine.interface import ModelInfo

logger = logging.getLogger("antiphon.engine.gang")

PLACER_MODULE = "antiphon_engine.gang.placer"
FAILURE = 1
UNAVAILABLE = 4
_LISTEN_S = 0.1
_SAY_EVERY_S = 10.0
_PLACER_MARGIN_S = 90.0
"""Ray's own start of a driver, beyond the time for a place."""
_CLOSE_S = 10.0
_Answer = TypeVar("_Answer", messages.Possible, messages.Ready)


@dataclass(frozen=True, slots=True)
class Gang:
    ranks: Sequence[RankLink]
    info: ModelInfo
    num_blocks: int
    placer: Helper


def gather(
    settings: GangSettings,
    cluster: RayCluster,
    progress: Callable[[str], None],
    stop: threading.Event,
    problem: Callable[[str], None],
) -> Gang:
    """Raises GangStartError, GangStopped."""
    address = cluster.ensure(settings.shape.ranks, progress, stop)
    with contextlib.ExitStack() as failing:
        secret = new_secret()
        try:
            reception = Reception(settings.host, secret)
        except OSError as error:
            raise GangStartError(f"cannot listen for ranks on {settings.host}: {error}", UNAVAILABLE) from error
        with contextlib.closing(reception):
            placer = Helper(PLACER_MODULE, _placer_start(settings, address, reception.port, secret))
            failing.callback(placer.close, _CLOSE_S)
            start = _Start(settings, placer, progress, stop, problem)
            ranks = start.connected(reception)
        for rank in ranks:
            failing.callback(rank.close)
        num_blocks = start.agreed_blocks(ranks)
        info = start.loaded(ranks, num_blocks)
        failing.pop_all()
    return Gang(ranks, info, num_blocks, placer)


def _placer_start(settings: GangSettings, address: ClusterAddress, port: int, secret: str) -> PlacerStart:
    shape = settings.shape
    return PlacerStart(
        address=address.address,
        node_ip=address.node_ip,
        token_file=address.token_file,
        ranks=[
            RankStart(
                rank,
                shape,
                settings.advertise or settings.host,
                port,
                secret,
                settings.maker,
                settings.maker_settings,
            )
            for rank in range(shape.ranks)
        ],
        device=settings.device,
        spread_stages=settings.spread_stages,
        place_s=settings.place_s,
        nodes_may_come=address.nodes_may_come,
    )


class _Start:
    def __init__(
        self,
        settings: GangSettings,
        placer: Helper,
        progress: Callable[[str], None],
        stop: threading.Event,
        problem: Callable[[str], None],
    ) -> None:
        self._settings = settings
        self._placer = placer
        self._progress = progress
        self._stop = stop
        self._problem = problem

    def connected(self, reception: Reception) -> list[RankLink]:
        """Every rank, in order."""
        shape = self._settings.shape
        guests: dict[tuple[int, str], Guest] = {}
        wanted = {(rank, channel) for rank in range(shape.ranks) for channel in ("steps", "transfers")}
        try:
            for _ in self._until(self._settings.place_s + _PLACER_MARGIN_S, "the ranks to connect"):
                for guest in reception.guests(_LISTEN_S):
                    place = (guest.hello.rank, guest.hello.channel)
                    if place in guests or place not in wanted:
                        guest.connection.close()
                    else:
                        guests[place] = guest
                if guests.keys() == wanted:
                    break
        except BaseException:
            for guest in guests.values():
                guest.connection.close()
            raise
        ranks = [RankLink(rank, guests[rank, "steps"], guests[rank, "transfers"]) for rank in range(shape.ranks)]
        for link in ranks:
            self._progress(f"rank {link.rank} of {shape} runs as {link.where}")
        return ranks

    def agreed_blocks(self, ranks: Sequence[RankLink]) -> int:
        """As many KV blocks as the smallest rank has room for."""
        here = Counter(rank.node for rank in ranks)
        first = ranks[0]
        level = logging.getLogger("antiphon").getEffectiveLevel()
        for rank in ranks:
            _tell(rank, messages.Prepare(first.address, first.meeting_port, here[rank.node], level))
        possible = {
            rank.rank: answer.num_blocks
            for rank, answer in self._answers(ranks, messages.Possible, self._settings.start_s, "the ranks")
        }
        agreed = min(possible.values())
        if agreed < 1:
            lacking = min(possible, key=lambda number: possible[number])
            raise GangStartError(f"rank {lacking} has no room for a KV block: free memory on its machine", 3)
        return agreed

    def loaded(self, ranks: Sequence[RankLink], num_blocks: int) -> ModelInfo:
        for rank in ranks:
            _tell(rank, messages.Load(num_blocks))
        info: ModelInfo | None = None
        revisions: dict[int, str] = {}
        for rank, ready in self._answers(ranks, messages.Ready, self._settings.start_s, "the ranks to load"):
            rank.part, rank.block_bytes = ready.part, ready.block_bytes
            revisions[rank.rank] = ready.revision
            info = ready.info or info
            if ready.num_blocks != num_blocks:
                raise GangStartError(f"rank {rank.rank} has {ready.num_blocks} KV blocks, not {num_blocks}", FAILURE)
        if len(set(revisions.values())) > 1:
            raise GangStartError(
                f"the ranks have loaded different weights ({revisions}): see that the model's folder is the same "
                "on all machines",
                2,
            )
        if info is None:
            raise GangStartError("no rank said what the model is", FAILURE)
        return info

    def _answers(
        self, ranks: Sequence[RankLink], kind: type[_Answer], deadline_s: float, what: str
    ) -> Iterator[tuple[RankLink, _Answer]]:
        """One of each rank. Raises GangStartError."""
        with selectors.DefaultSelector() as selector:
            for rank in ranks:
                selector.register(rank.steps, selectors.EVENT_READ, rank)
            missing = {rank.rank for rank in ranks}
            for _ in self._until(deadline_s, what):
                for key, _ in selector.select(_LISTEN_S):
                    rank = key.data
                    for message in _received(rank):
                        match message:
                            case messages.Said():
                                rank.log(message)
                            case messages.StartFailed(exit_code, text):
                                raise GangStartError(f"rank {rank.rank}: {text}", exit_code)
                            case _ if isinstance(message, kind):
                                missing.discard(rank.rank)
                                yield rank, message
                if not missing:
                    return

    def _until(self, deadline_s: float, what: str) -> Iterator[None]:
        """Again and again until the deadline, with an eye on the placer. Raises GangStartError, GangStopped."""
        ends_at = time.monotonic() + deadline_s
        say_at = time.monotonic() + _SAY_EVERY_S
        while True:
            self._look_at_placer()
            if self._stop.is_set():
                raise GangStopped
            now = time.monotonic()
            if now >= ends_at:
                raise GangStartError(f"waited {deadline_s:.0f} s for {what}, in vain", UNAVAILABLE)
            if now >= say_at:
                self._progress(f"waiting for {what}")
                say_at = now + _SAY_EVERY_S
            yield

    def _look_at_placer(self) -> None:
        try:
            while (event := self._placer.next(0.0)) is not None:
                match event:
                    case Progress(text):
                        self._progress(text)
                    case Unschedulable(sentence):
                        self._problem(sentence)
                        self._progress(f"the ranks find no place yet: {sentence}" if sentence else "there is room now")
                    case Placed(nodes):
                        self._progress(f"Ray has placed {len(nodes)} stages on {len(set(nodes))} nodes")
                    case RankEnded(rank, reason):
                        raise GangStartError(f"rank {rank} ended at its start: {reason}", FAILURE)
                    case NoPlace(sentence):
                        raise GangUnschedulable(sentence, UNAVAILABLE)
                    case Failed(message, exit_code):
                        raise GangStartError(message, exit_code)
        except HelperEnded as error:
            raise GangStartError(str(error), FAILURE) from error


def _tell(rank: RankLink, message: messages.ToRank) -> None:
    try:
        rank.tell(message)
    except OSError as error:
        raise GangStartError(f"rank {rank.rank} ({rank.where}) is gone: {error}", FAILURE) from error


def _received(rank: RankLink) -> list[messages.FromRank]:
    try:
        received = rank.receive()
    except (OSError, msgspec.DecodeError) as error:
        raise GangStartError(f"rank {rank.rank} ({rank.where}) is gone: {error}", FAILURE) from error
    if received is None:
        raise GangStartError(f"rank {rank.rank} ({rank.where}) ended at its start", FAILURE)
    return received
