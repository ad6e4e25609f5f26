"""Decisions written down with their inputs, and made again from them: `antiphon simulate replay FILE`.

A file has one `ScalingDecision` a line as JSON, plain, gzip or xz: of a live system (`antiphon decisions MODEL
--json`), of `antiphon serve --autoscale --record-decisions FILE`, or of `antiphon simulate autoscale --decisions FILE`.
A decision replays if the law, given the inputs that stand with it, decides the same to the last figure of its sentence.
"""

from __future__ import annotations

import gzip
import lzma
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Protocol

import msgspec
from antiphon_policy.scaling import ScalingDecision
from antiphon_policy.scaling.law import decide

_GZIP_MAGIC = b"\x1f\x8b"
_XZ_MAGIC = b"\xfd7zXZ"


class DecisionsError(ValueError):
    """A file that holds no decisions that can be made again; the message says which line and what to do."""


@dataclass(frozen=True, slots=True)
class Difference:
    line: int
    written: str
    """The sentence that stands there."""
    decided: str
    """The one that the law says now."""
    fields: tuple[str, ...]
    """In which the two decisions differ."""


@dataclass(frozen=True, slots=True)
class Replayed:
    decisions: int
    differences: tuple[Difference, ...]


class _Sink(Protocol):
    def write(self, content: bytes, /) -> int: ...
    def close(self) -> None: ...


class DecisionFile(AbstractContextManager["DecisionFile"]):
    """Where decisions are written, one a line; None: nowhere. Compressed if its name ends in .gz."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._file: _Sink | None = None
        self._encoder = msgspec.json.Encoder()

    def __enter__(self) -> DecisionFile:
        if self._path is not None:
            try:
                self._file = gzip.open(self._path, "wb", 3) if self._path.suffix == ".gz" else self._path.open("wb")
            except OSError as error:
                raise DecisionsError(f"{self._path} cannot be written: {error.strerror}") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def keep(self, decision: ScalingDecision) -> None:
        if self._file is not None:
            self._file.write(self._encoder.encode(decision) + b"\n")


def replay(path: Path, *, every: int = 1) -> Replayed:
    """All decisions of a file, or every so manyth, made again. Raises DecisionsError."""
    count = 0
    differences = []
    for line, written in _decisions(path, every):
        count += 1
        assert written.inputs is not None
        decided = decide(written.inputs)
        if decided != written:
            names = tuple(
                name for name in written.__struct_fields__ if getattr(written, name) != getattr(decided, name)
            )
            differences.append(Difference(line, written.sentence, decided.sentence, names))
    if not count:
        raise DecisionsError(f"{path} has no decisions: `antiphon simulate replay --help` says how to record some")
    return Replayed(count, tuple(differences))


def _decisions(path: Path, every: int) -> Iterator[tuple[int, ScalingDecision]]:
    decoder = msgspec.json.Decoder(ScalingDecision)
    try:
        with path.open("rb") as plain:
            magic = plain.read(len(_XZ_MAGIC))
        with _opened(path, magic) as file:
            for number, line in enumerate(file, 1):
                if not line.strip() or number % every:
                    continue
                try:
                    decision = decoder.decode(line)
                except msgspec.DecodeError as error:
                    raise DecisionsError(f"{path}:{number}: {error}; a line is one decision as JSON") from error
                if decision.inputs is None:
                    raise DecisionsError(f"{path}:{number}: the decision has no inputs: record it with them")
                yield number, decision
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise DecisionsError(f"{path} cannot be read: {error}") from error


def _opened(path: Path, magic: bytes) -> gzip.GzipFile | lzma.LZMAFile | IO[bytes]:
    if magic.startswith(_GZIP_MAGIC):
        return gzip.open(path, "rb")
    return lzma.open(path, "rb") if magic == _XZ_MAGIC else path.open("rb")
