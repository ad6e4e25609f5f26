"""What policies are measured against on one load: the oracle's schedule, the bounds, the fixed sizes for the peak.

It takes many runs to find and depends on load and setting alone, so it can be kept in a file and be taken from there
as long as both are the same (`key`). Policies can then be run again without it.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import msgspec

from antiphon_simulate.autoscale.calls import Load
from antiphon_simulate.autoscale.oracle import OracleSearch, allowed_gpu_hours
from antiphon_simulate.autoscale.records import Setting, Sizes

CLUSTER = 1
"""Of the cluster and the search: raised when either gives other results, so that kept files are not taken for these."""


class ReferenceError(ValueError):
    """A file that holds no reference; the message says what to do."""


class Stretch(msgspec.Struct, frozen=True, array_like=True):
    """So many slots with these sizes."""

    slots: int
    prefill: int
    decode: int


class Reference(msgspec.Struct, frozen=True):
    key: str
    slot_ms: float
    schedule: tuple[Stretch, ...]
    reaches: bool
    """False: not even the largest pools keep the goal."""
    gpu_hours: float
    bound_gpu_hours: float
    """No schedule keeps the goal for less."""
    allowed_gpu_hours: float
    """What is asked of a law: the larger of a tenth and one replica above the oracle."""
    causal_attainment: float
    """Of the best law that does not see the future, at that cost (`causal`)."""
    peak: Sizes
    """The smallest pools that keep the goal without ever changing."""

    @property
    def sizes(self) -> tuple[Sizes, ...]:
        return tuple(Sizes(one.prefill, one.decode) for one in self.schedule for _ in range(one.slots))

    @property
    def begin(self) -> Sizes:
        return Sizes(self.schedule[0].prefill, self.schedule[0].decode)


def find_reference(load: Load, setting: Setting, *, runs: int, seed: int = 0) -> Reference:
    search = OracleSearch(load, setting, runs=runs, seed=seed)
    oracle = search.find()
    return Reference(
        key=key_of(load, setting, seed),
        slot_ms=oracle.slot_ms,
        schedule=tuple(
            Stretch(len(list(same)), sizes.prefill, sizes.decode) for sizes, same in groupby(oracle.schedule)
        ),
        reaches=oracle.reaches,
        gpu_hours=oracle.gpu_hours,
        bound_gpu_hours=search.bound_gpu_hours(),
        allowed_gpu_hours=allowed_gpu_hours(oracle.gpu_hours, load.span_ms),
        causal_attainment=search.causal_attainment(oracle.gpu_hours),
        peak=search.peak(),
    )


def key_of(load: Load, setting: Setting, seed: int) -> str:
    """The same for the same load and setting, however often workers fail: whoever sees the future has no failures."""
    without = replace(setting, site=replace(setting.site, mean_life_h=0.0))
    known = hashlib.sha256(f"{CLUSTER} {without} {seed}".encode())
    for call in load.calls:
        known.update(repr(call).encode())
    return known.hexdigest()[:32]


def read_reference(path: Path, load: Load, setting: Setting, seed: int) -> Reference | None:
    """None: there is no such file, or it is another load's or setting's. Raises ReferenceError."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Reference)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise ReferenceError(f"{path} holds no oracle ({error}): name another file, or remove it") from error
    return found if found.key == key_of(load, setting, seed) else None


def write_reference(path: Path, reference: Reference) -> None:
    """Raises ReferenceError."""
    try:
        path.write_bytes(msgspec.json.encode(reference) + b"\n")
    except OSError as error:
        raise ReferenceError(f"{path} cannot be written: {error.strerror}") from error
