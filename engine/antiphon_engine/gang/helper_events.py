"""What the helper processes say on their standard output: JSON lines."""

from __future__ import annotations

import msgspec


class Progress(msgspec.Struct, frozen=True, tag=True):
    """For people: what is being waited for."""

    text: str


class NodeUp(msgspec.Struct, frozen=True, tag=True):
    """This machine's Ray node runs."""

    address: str
    """host:port of the cluster's head."""
    token_file: str


class Unschedulable(msgspec.Struct, frozen=True, tag=True):
    """There is no room now; the placer goes on waiting. An empty sentence: there is."""

    sentence: str


class Placed(msgspec.Struct, frozen=True, tag=True):
    """Ranks are being started."""

    nodes: list[str]
    """Ray's node id of each stage."""


class RankEnded(msgspec.Struct, frozen=True, tag=True):
    rank: int
    reason: str


class NoPlace(msgspec.Struct, frozen=True, tag=True):
    """The placer's last word: it waited long enough, or no room can ever come."""

    sentence: str


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The last word of a helper that cannot do what it was started for."""

    message: str
    exit_code: int


Event = Progress | NodeUp | Unschedulable | Placed | RankEnded | NoPlace | Failed
EVENTS = msgspec.json.Decoder(Event)
