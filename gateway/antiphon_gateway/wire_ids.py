"""Token ids as a `Submit` has them on the wire: packed varints, by one look-up in a table for all of a prompt.

protobuf's own way makes an integer object, a check and a varint of each id: 13 to 20 us for 512. Here each id takes
four bytes, the first three with the continuation bit: a varint may have leading zeros, and every reader takes it
(protobuf.dev/programming-guides/encoding: base 128 varints). The look-up refuses what is not in the vocabulary, so
nothing else need check it.
"""

from __future__ import annotations

from array import array

import numpy as np

MOST_IDS = 1 << 28
"""Four varint bytes have so many values."""

_IDS = np.dtype("I")

_PROMPT_TOKEN_IDS = b"\x1a"
_SUBMIT = b"\x12"
"""Tags: field numbers of `Submit.prompt_token_ids` and `GatewayMessage.submit`, both of wire type LEN."""


class WireIds:
    """The ids of one vocabulary."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        ids = np.arange(min(vocab_size, MOST_IDS), dtype="<u4")
        sevens = (ids & 0x7F) | (ids & 0x3F80) << 1 | (ids & 0x1FC000) << 2 | (ids & 0xFE00000) << 3
        self._varints = sevens | 0x808080

    def encoded(self, packed: array[int]) -> bytes:
        """`packed`: of type "I". Raises IndexError where an id is not in the vocabulary."""
        return self._varints.take(np.frombuffer(packed, dtype=_IDS)).tobytes()


def submit_message(submit: bytes, encoded: bytes) -> bytes:
    """A serialised `GatewayMessage` with this serialised `Submit`, which has no prompt, and these ids as its prompt."""
    head = _PROMPT_TOKEN_IDS + _length(len(encoded))
    return b"".join((_SUBMIT, _length(len(submit) + len(head) + len(encoded)), submit, head, encoded))


def _length(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)
