"""Server-sent events, from bytes as they come to the data of each event. Pure: it reads no socket.

The format is the WHATWG's: lines end with LF, CR or both, a line `data: ...` adds to the event, an empty line ends it,
and what begins with a colon is a comment. Bytes may be cut anywhere, inside a character or between CR and LF.
"""

from __future__ import annotations


class EventTooLong(ValueError):
    """An event is larger than any part of an answer can be."""


_MOST_BYTES = 16 * 1024 * 1024
_MARK = "\ufeff".encode()
"""May stand before the first line, and is no part of it."""


class EventParser:
    """Put bytes in, get the data of the events that they complete."""

    def __init__(self) -> None:
        self._line = bytearray()
        """The line that has not ended."""
        self._data: list[bytes] = []
        """Of the event that has not ended."""
        self._size_bytes = 0
        self._after_return = False
        """The last byte was a CR: an LF that follows belongs to it."""
        self._first = True

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of each event that ends in `piece`. Raises EventTooLong."""
        if self._after_return and piece:
            self._after_return = False
            piece = piece.removeprefix(b"\n")
        self._after_return |= piece.endswith(b"\r")
        *ended, rest = piece.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        found = []
        for line in ended:
            self._line += line
            data = self._take(bytes(self._line))
            self._line.clear()
            if data is not None:
                found.append(data)
        self._line += rest
        if self._size_bytes + len(self._line) > _MOST_BYTES:
            raise EventTooLong(f"an event of more than {_MOST_BYTES} bytes")
        return found

    def _take(self, line: bytes) -> bytes | None:
        """One whole line; the event's data if the line ends one that has any."""
        if self._first:
            self._first = False
            line = line.removeprefix(_MARK)
        if not line:
            data, self._data, self._size_bytes = self._data, [], 0
            return b"\n".join(data) if data else None
        field, _, value = line.partition(b":")
        if field == b"data":
            self._data.append(value.removeprefix(b" "))
            self._size_bytes += len(value)
        return None
