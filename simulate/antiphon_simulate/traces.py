"""Reads recorded workloads: who came when, with how long a prompt, which blocks of it, and how long an answer.

What a file is, its content says: gzip or not, and one of

- JSON lines with `timestamp` (ms), `input_length`, `output_length`, `hash_ids` (one for each block of 512 prompt
  tokens, the last of them whole or partial), as Mooncake publishes them;
- the same with `session_id`, and where recorded `agent`, `t_ms` and `think_ms`: sessions, replayed as closed loops,
  for whoever sends the next request has read the last answer first;
- CSV with the header `arrival_s,input_tokens,output_tokens`: arrivals and lengths. No two of its blocks are the same.

A block id stands for the block and all before it. All that reads traces rests on that, so it is checked here. Whatever
is wrong is a `TraceError` that names the line and says what to do.
"""

from __future__ import annotations

import enum
import gzip
import hashlib
import math
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import msgspec

from antiphon_simulate.records import TraceRequest

BLOCK_TOKENS = 512
"""Of every trace that can be read."""

_CSV_HEADER = "arrival_s,input_tokens,output_tokens"
_GZIP_MAGIC = b"\x1f\x8b"


class TraceError(ValueError):
    """A file that cannot be replayed; the message says which line, why, and what to do."""


class TraceFormat(enum.Enum):
    MOONCAKE = "mooncake"
    SESSIONS = "sessions"
    LENGTHS = "lengths"
    """Arrivals and lengths only."""


@dataclass(frozen=True, slots=True)
class Trace:
    name: str
    """The file's."""
    sha256: str
    """Of the file as it is on disk."""
    format: TraceFormat
    requests: tuple[TraceRequest, ...]
    """By time; `arrival_ms` as recorded. Of those that wait for an answer first (`after`): the session's start, or,
    where no pause was recorded, the recorded time, before which they do not come."""

    def head(self, limit: int | None) -> Trace:
        """Its first `limit` requests."""
        return self if limit is None else replace(self, requests=self.requests[:limit])


_Count = Annotated[int, msgspec.Meta(ge=0)]
_Ms = Annotated[float, msgspec.Meta(ge=0)]


class _Row(msgspec.Struct, frozen=True):
    """One line. Fields that are not named here are passed over."""

    timestamp: _Ms
    input_length: Annotated[int, msgspec.Meta(ge=1)]
    output_length: _Count
    hash_ids: tuple[int, ...]
    block_size: int = BLOCK_TOKENS
    session_id: str = ""
    agent: int = 0
    t_ms: _Ms | None = None
    think_ms: _Ms | None = None


def read_trace(path: Path) -> Trace:
    """The trace in a file. Raises `TraceError`."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror}") from error
    try:
        text = (gzip.decompress(raw) if raw.startswith(_GZIP_MAGIC) else raw).decode()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise TraceError(f"{path} is neither text nor whole gzip ({error}): fetch it again") from error
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not lines:
        raise TraceError(f"{path} is empty: a trace has at least one request")
    is_csv = lines[0][1].strip() == _CSV_HEADER
    rows = list(_csv_rows(path, lines) if is_csv else _json_rows(path, lines))
    if not rows:
        raise TraceError(f"{path} has a header and no requests")
    rows.sort(key=lambda row: row.timestamp)
    if any(row.session_id for row in rows):
        form, requests = TraceFormat.SESSIONS, tuple(_closed_loop(rows))
    else:
        form = TraceFormat.LENGTHS if is_csv else TraceFormat.MOONCAKE
        requests = tuple(_open_loop(rows))
    return Trace(name=path.name, sha256=hashlib.sha256(raw).hexdigest(), format=form, requests=requests)


def _json_rows(path: Path, lines: Iterable[tuple[int, str]]) -> Iterator[_Row]:
    decoder = msgspec.json.Decoder(_Row)
    before: dict[int, int | None] = {}
    for number, line in lines:
        try:
            row = decoder.decode(line)
        except msgspec.DecodeError as error:  # also what does not fit the row
            raise TraceError(
                f"{path}:{number}: {error}; a line is a JSON object with timestamp (ms), input_length, output_length "
                f"and hash_ids, or the file is CSV and begins with {_CSV_HEADER}"
            ) from error
        _check_blocks(f"{path}:{number}", row, before)
        yield row


def _check_blocks(place: str, row: _Row, before: dict[int, int | None]) -> None:
    if row.block_size != BLOCK_TOKENS:
        raise TraceError(
            f"{place}: its blocks are of {row.block_size} tokens: regroup the ids to blocks of {BLOCK_TOKENS} tokens"
        )
    least, rest = divmod(row.input_length, BLOCK_TOKENS)
    most = least + (1 if rest else 0)
    if not least <= len(row.hash_ids) <= most:
        raise TraceError(
            f"{place}: {len(row.hash_ids)} hash_ids for {row.input_length} tokens, which are {least} to {most} blocks "
            f"of {BLOCK_TOKENS}: regroup ids of blocks of another size"
        )
    last: int | None = None
    for block in row.hash_ids:
        if before.setdefault(block, last) != last:
            raise TraceError(
                f"{place}: block {block} comes after {_said(last)} here and after {_said(before[block])} on a line "
                "before: an id must stand for its block and all before it, so number the hashes of a chain"
            )
        last = block


def _said(block: int | None) -> str:
    return "nothing" if block is None else f"block {block}"


def _csv_rows(path: Path, lines: Iterable[tuple[int, str]]) -> Iterator[_Row]:
    blocks = 0
    for number, line in list(lines)[1:]:
        try:
            arrival_s, input_tokens, output_tokens = line.split(",")
            begin, blocks = blocks, blocks + math.ceil(int(input_tokens) / BLOCK_TOKENS)
            yield msgspec.convert(
                {
                    "timestamp": float(arrival_s) * 1000.0,
                    "input_length": int(input_tokens),
                    "output_length": int(output_tokens),
                    "hash_ids": tuple(range(begin, blocks)),
                },
                _Row,
            )
        except (ValueError, msgspec.ValidationError) as error:
            raise TraceError(
                f"{path}:{number}: {error}; a line is {_CSV_HEADER}: seconds from the start, then two counts"
            ) from error


def _open_loop(rows: Iterable[_Row]) -> Iterator[TraceRequest]:
    for index, row in enumerate(rows):
        yield _request(index, row, row.timestamp)


def _closed_loop(rows: Iterable[_Row]) -> Iterator[TraceRequest]:
    """One sequence for each agent of a session: a sub-agent begins when it was recorded to, then waits for its own
    answers only."""
    starts: dict[str, float] = {}
    last: dict[str, int] = {}
    for index, row in enumerate(rows):
        name = session_name(row.session_id, row.agent)
        start_ms = starts.setdefault(row.session_id, row.timestamp - (row.t_ms or 0.0))
        after = last.get(name) if row.session_id else None
        last[name] = index
        if after is None:
            yield _request(index, row, row.timestamp, session=name)
        elif row.think_ms is None:  # not before its recorded time, nor before the answer
            yield _request(index, row, row.timestamp, session=name, after=after)
        else:
            yield _request(index, row, start_ms, session=name, after=after, think_ms=row.think_ms)


def session_name(session_id: str, agent: int) -> str:
    return f"{session_id}/{agent}" if agent else session_id


def _request(
    index: int, row: _Row, arrival_ms: float, *, session: str = "", after: int | None = None, think_ms: float = 0.0
) -> TraceRequest:
    return TraceRequest(
        index=index,
        arrival_ms=arrival_ms,
        prompt_tokens=row.input_length,
        output_tokens=max(1, row.output_length),  # the first token is what tells that there is no more
        blocks=row.hash_ids,
        session=session,
        after=after,
        think_ms=think_ms,
    )
