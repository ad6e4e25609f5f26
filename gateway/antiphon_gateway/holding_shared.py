"""Room that other gateways fill too: what they keep back, told to and heard from the workers.

Whose turn it is, `antiphon_policy.sharing` says; here is what is sent and when. A worker is told what waits when
something was just held for it, and, with its reports, while it may soon have room: before it has, the others know. It
is told at once that nothing waits any more. While a worker has no other gateway, nothing is told and nothing is kept.

Owned by `placing`, one for each group. Plain calls.
"""

from __future__ import annotations

from collections.abc import Iterable

from antiphon_policy.admission import Entry, WaitingLine
from antiphon_policy.sharing import NEAR_HORIZONS, NOTHING, Kept, SharedRoom, kept_back
from antiphon_proto import worker_pb2 as pb

from antiphon_gateway.flight import Choice
from antiphon_gateway.load import WorkerLoad

_SUMMED_FOR_S = 0.03
"""As often as workers report: a line is not gone through for less."""

_MOST_TOLD = 16
"""Messages in that time: what others do not hear costs them a wait of `NEWS_MS`, not an error."""


class RoomOfAll:
    """See the module. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._room: SharedRoom | None = None
        """None: never was there another gateway."""
        self._told: dict[str, WorkerLoad] = {}
        self._kept: tuple[Kept, float] = (NOTHING, float("-inf"))
        self._sent = 0
        """Messages since that was summed up."""

    @property
    def others_tokens(self) -> int:
        """Uncached prompt tokens that wait at other gateways."""
        return 0 if self._room is None else self._room.others_tokens

    def heard(self, load: WorkerLoad, now: float) -> bool:
        """The worker reported. Whether room that was left to others is to be looked at again."""
        queue = load.client.queue
        if self._room is None:
            if queue.gateways < 2:
                return False
            self._room = SharedRoom(load.client.gateway_id)
        news = self._room.hear(load.worker_id, {kept.gateway_id: _read(kept, now * 1e3) for kept in queue.kept_back})
        return news and self._room.is_left(load.worker_id)

    def gone(self, load: WorkerLoad) -> None:
        if self._room is not None:
            self._room.forget(load.worker_id)
            self._told.pop(load.worker_id, None)

    def leaves_ms(self, load: WorkerLoad, entry: Entry[Choice], now: float) -> float:
        """For how long the worker's room is left to others; 0: the entry may have it."""
        return 0.0 if self._room is None else self._room.leaves_ms(load.worker_id, entry, now * 1e3)

    def sent(self, load: WorkerLoad) -> None:
        """The worker is given the next request."""
        if self._room is not None:
            self._room.sent(load.worker_id)

    def full(self, load: WorkerLoad, now: float) -> None:
        """The worker has no room."""
        if self._room is not None:
            self._room.full(load.worker_id, now * 1e3)

    def tell(self, line: WaitingLine[Choice], held_for: Iterable[WorkerLoad], now: float) -> None:
        """A look has ended: something is held for these."""
        if self._room is None:
            return
        if not len(line):
            self._kept = (NOTHING, float("-inf"))
            for load in list(self._told.values()):
                self._tell(load, NOTHING, now)
            return
        kept = self._summed(line, now)
        for load in held_for:
            self._tell(load, kept, now)

    def tell_before_room(self, line: WaitingLine[Choice], load: WorkerLoad, now: float) -> None:
        """The worker reported while something waits."""
        if self._room is not None and load.queue_ms(now) <= NEAR_HORIZONS * load.horizon_ms:
            self._tell(load, self._summed(line, now), now)

    def _summed(self, line: WaitingLine[Choice], now: float) -> Kept:
        kept, at = self._kept
        if now - at >= _SUMMED_FOR_S:
            kept = kept_back(line, now * 1e3)
            self._kept = (kept, now)
            self._sent = 0
        return kept

    def _tell(self, load: WorkerLoad, kept: Kept, now: float) -> None:
        # To one that no other gateway hears from there is nothing to say, but to take back what was said.
        if self._room is None or (kept.tokens and (load.client.queue.gateways < 2 or self._sent >= _MOST_TOLD)):
            return
        if self._room.is_news(load.worker_id, kept):
            load.client.keep_back(_written(kept, now * 1e3))
            if kept.tokens:
                self._sent += 1
                self._told[load.worker_id] = load
            else:
                self._told.pop(load.worker_id, None)


def _read(said: pb.KeptBack, now_ms: float) -> tuple[Kept, float]:
    said_ms = now_ms - said.said_ms_ago
    due_ms = said_ms + said.due_in_ms if said.HasField("due_in_ms") else None
    kept = Kept(said.tokens, said.priority, due_ms, float(said.service_ms), said_ms - said.waited_ms)
    return kept, said_ms


def _written(kept: Kept, now_ms: float) -> pb.KeptBack:
    if not kept.tokens:
        return pb.KeptBack()
    return pb.KeptBack(
        tokens=kept.tokens,
        priority=kept.priority,
        due_in_ms=None if kept.due_ms is None else round(kept.due_ms - now_ms),
        service_ms=round(kept.service_ms),
        waited_ms=max(0, round(now_ms - kept.arrived_ms)),
    )
