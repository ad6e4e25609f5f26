"""Encodings of texts that come again: system prompts, and the earlier turns of a conversation.

Bounded by bytes; what was used longest ago goes first. One cache serves all models of a gateway, from the event loop
and from the threads for long texts. A key is a hash of whose text it is (`Owner`) and of the text, as with KV blocks:
a tenant never finds what another one brought, so how fast an answer begins tells nobody what others ask.

Nothing that is kept is larger than what Python's own allocator takes (512 bytes). Thousands of larger pieces among
what a tokenizer allocates and frees for each text leave the C library's heap in crumbs: encoding took a quarter longer.

What is found and what is not is counted in characters: a share of look-ups would say little of the work that was saved.
"""

from __future__ import annotations

import hashlib
import threading
from array import array
from collections import OrderedDict
from typing import NewType

Owner = NewType("Owner", bytes)
"""A hash of the tokenizer, and the tenant's salt: nothing is shared beyond both."""
Key = NewType("Key", bytes)
"""Of a text and its owner: `key_of`."""

ENTRY_BYTES = 300
"""Of an entry beside its ids: the key, the objects' heads, its place in the order."""
_KEY_BYTES = 16
_PIECE_BYTES = 448
_LARGEST_SHARE = 8
"""A text whose ids take more than this part of the cache is not kept: it would push out what many requests share."""


class EncodingCache:
    """Owned by the gateway."""

    def __init__(self, max_bytes: int) -> None:
        """0: nothing is kept."""
        self._max_bytes = max_bytes
        self._kept: OrderedDict[Key, tuple[bytes, ...]] = OrderedDict()
        self._lock = threading.Lock()
        self.bytes = 0
        self.found_characters = 0
        self.encoded_characters = 0

    def get(self, key: Key, characters: int) -> array[int] | None:
        """The ids of the text of that key, which has so many characters."""
        with self._lock:
            pieces = self._kept.get(key)
            if pieces is None:
                self.encoded_characters += characters
                return None
            self._kept.move_to_end(key)
            self.found_characters += characters
        return array("I", b"".join(pieces))

    def put(self, key: Key, ids: array[int]) -> None:
        data = ids.tobytes()
        if (ENTRY_BYTES + len(data)) * _LARGEST_SHARE > self._max_bytes:
            return
        pieces = tuple(data[start : start + _PIECE_BYTES] for start in range(0, len(data), _PIECE_BYTES))
        with self._lock:
            # Two threads may have encoded the same text: the ids are the same.
            if key in self._kept:
                return
            self._kept[key] = pieces
            self.bytes += ENTRY_BYTES + len(data)
            while self.bytes > self._max_bytes:
                _, dropped = self._kept.popitem(last=False)
                self.bytes -= ENTRY_BYTES + sum(map(len, dropped))

    def __len__(self) -> int:
        return len(self._kept)


def key_of(whose: Owner, text: str) -> Key:
    # A lone surrogate is the tokenizer's to refuse.
    said = b"%d:%b%b" % (len(whose), whose, text.encode("utf-8", "surrogatepass"))
    return Key(hashlib.sha256(said).digest()[:_KEY_BYTES])
