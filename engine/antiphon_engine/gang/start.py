"""What a gang is to be, and what its helpers and ranks are told at the start."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from antiphon_engine.parallel import ParallelShape


@dataclass(frozen=True, slots=True)
class GangSettings:
    shape: ParallelShape
    maker: str
    """`module:callable` (`runner.MakerFactory`): what each rank runs."""
    maker_settings: bytes
    """For the maker alone."""
    host: str = "127.0.0.1"
    """Where the driver listens for ranks."""
    advertise: str = ""
    """Where ranks find it; empty: at `host`."""
    device: str = "CPU"
    """What a rank needs one of, as Ray calls it: CPU or GPU."""
    spread_stages: bool = False
    """Every stage on a node of its own."""
    place_s: float = 300.0
    """How long ranks may wait for a place."""
    start_s: float = 600.0
    """How long they may take to load, once placed."""
    silent_s: float = 20.0
    """A rank that says nothing for so long is given up. Ranks say `Alive` every second, whatever they compute; loading
    a library or a large allocation may keep one from it for some."""
    step_s: float = 300.0
    """A step that is not done so long after the one before it is given up. Above what ranks wait for each other in a
    collective, so that a rank that waits in vain says so first."""


class RankStart(msgspec.Struct, frozen=True):
    """What Ray carries to a rank's process."""

    rank: int
    shape: ParallelShape
    driver_host: str
    driver_port: int
    secret: str
    maker: str
    maker_settings: bytes


class PlacerStart(msgspec.Struct, frozen=True):
    """What the placer is told on its standard input, which nobody else can read."""

    address: str
    node_ip: str
    """Of this machine's Ray node; empty: Ray finds it."""
    token_file: str
    """Empty: a cluster without authentication."""
    ranks: list[RankStart]
    device: str
    spread_stages: bool
    place_s: float
    nodes_may_come: bool
    """False: a cluster of our own on this machine, to which no node will be added."""
