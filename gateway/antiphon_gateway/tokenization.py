"""Text to token ids, and single ids back to text and bytes.

Encoding costs about a microsecond a token. A short text is encoded where it is; a long one in a thread of a small
pool, so that one long prompt does not hold up everybody's streams (the tokenizer releases the interpreter lock).
A rendered chat is encoded piece by piece where the tokenizer allows it (`tokenization_segments`), and pieces that
were encoded before are looked up (`tokenization_cache`).
The text of an answer is never made here: the worker detokenises. Single tokens are, for log-probabilities.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import logging
import re
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import msgspec
from tokenizers import Tokenizer

from antiphon_gateway.tokenization_cache import EncodingCache, Key, Owner, key_of
from antiphon_gateway.tokenization_segments import Encode, NotCut, Parts, Segments, joined

log = logging.getLogger("antiphon.gateway")

INLINE_CHARACTERS = 2000
"""About half a millisecond of work: less than a hop to a thread and back costs a busy loop."""

IDS_PER_CHARACTER = 5
"""Ids that are joined, checked and hashed in the time that one character takes to encode."""
_WIDE = 3
"""Bytes of most characters beyond ASCII, which is what encoding them costs by."""
_BYTE_TOKEN = re.compile(r"^<0x([0-9A-Fa-f]{2})>$")
_Result = TypeVar("_Result")


class TokenizerInvalid(ValueError):
    """The card's tokenizer.json cannot be loaded; the message says why."""


class TextWorkers:
    """The threads for long texts. Owned by the gateway; `close` ends them."""

    def __init__(self, threads: int = 2) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="antiphon-text")

    async def run(self, function: Callable[[], _Result], *, characters: int) -> _Result:
        """`function()`, in a thread if it works on that many characters."""
        if characters <= INLINE_CHARACTERS:
            return function()
        return await asyncio.get_running_loop().run_in_executor(self._pool, function)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True, slots=True)
class TokenText:
    """One token as text (with U+FFFD where it is part of a character only) and as its bytes."""

    text: str
    data: bytes


class BegunEncoding:
    """A text of which some is encoded already: what is left to do may be a thread's work, or next to nothing."""

    __slots__ = ("_encode", "_parts")

    def __init__(self, parts: Parts, encode: Encode) -> None:
        self._parts = parts
        self._encode = encode

    @property
    def work_characters(self) -> int:
        """What is left, in characters to encode: beyond ASCII one is as much work as several, and ids are some, too."""
        work = 0
        for part in self._parts:
            if not isinstance(part, str):
                work += len(part) // IDS_PER_CHARACTER
            else:
                work += len(part) if part.isascii() else _WIDE * len(part)
        return work

    def finish(self) -> array[int]:
        return joined(self._parts, self._encode)


class TokenCodec:
    """The model's tokenizer, as the gateway uses it."""

    def __init__(self, tokenizer_json: bytes, cache: EncodingCache | None = None) -> None:
        """`cache`: where encodings of a chat's pieces are kept; None: all is encoded anew. Raises TokenizerInvalid."""
        try:
            self._tokenizer: Tokenizer = Tokenizer.from_buffer(tokenizer_json)
        except Exception as error:  # the library raises bare exceptions
            raise TokenizerInvalid(f"tokenizer.json cannot be loaded: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._added = frozenset(self._tokenizer.get_added_tokens_decoder())
        self._byte_level = b'"ByteLevel"' in _decoder(tokenizer_json)
        self._texts: dict[int, TokenText] = {}
        self._cache = cache
        self._digest = hashlib.sha256(tokenizer_json).digest()
        self._segments = None if cache is None else self._cut(tokenizer_json)

    def _cut(self, tokenizer_json: bytes) -> Segments | None:
        try:
            return Segments(self._tokenizer, tokenizer_json, self._encode_whole)
        except NotCut as why:
            log.info("encodings of chats are not kept with this tokenizer: %s", why)
            return None

    def begin_chat(self, text: str, salt: bytes, *, add_special_tokens: bool = False) -> BegunEncoding:
        """A rendered chat, whose template has written all special tokens, unless more are to be added. `salt`: the
        tenant's."""
        if add_special_tokens:
            return BegunEncoding([text], lambda whole: array("I", self.encode(whole, add_special_tokens=True)))
        cache, segments = self._cache, self._segments
        if cache is None or segments is None:
            return BegunEncoding([text], self._encode_whole)
        whose = Owner(self._digest + salt)

        keys: dict[str, Key] = {}

        def known(piece: str) -> array[int] | None:
            key = keys[piece] = key_of(whose, piece)
            return cache.get(key, len(piece))

        def encode(piece: str) -> array[int]:
            ids = self._encode_whole(piece)
            cache.put(keys[piece], ids)
            return ids

        return BegunEncoding(segments.look_up(text, known), encode)

    def _encode_whole(self, text: str) -> array[int]:
        return array("I", self.encode(text, add_special_tokens=False))

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text

    @functools.cached_property
    def puts_spaces_between_special_tokens(self) -> bool:
        ids = list(self.special_tokens().values())[:2]
        return self.decode(ids) != "".join(self.decode([token_id]) for token_id in ids)

    def special_tokens(self) -> dict[str, int]:
        """Ids of the tokens that answers do not show, by their texts."""
        added = self._tokenizer.get_added_tokens_decoder()
        return {token.content: token_id for token_id, token in added.items() if token.special}

    def token(self, token_id: int) -> TokenText:
        """One token by itself. Cached: there are as many as the vocabulary has."""
        known = self._texts.get(token_id)
        if known is None:
            data = self._bytes(token_id)
            known = self._texts[token_id] = TokenText(data.decode("utf-8", "replace"), data)
        return known

    def _bytes(self, token_id: int) -> bytes:
        token: str | None = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self._added:
            return token.encode()
        if self._byte_level:
            table = _byte_level_table()
            if all(character in table for character in token):
                return bytes(table[character] for character in token)
        match = _BYTE_TOKEN.match(token)
        if match:
            return bytes.fromhex(match[1])
        return token.replace("\u2581", " ").encode()


def _decoder(tokenizer_json: bytes) -> bytes:
    class _Parts(msgspec.Struct):
        decoder: msgspec.Raw = msgspec.Raw(b"null")

    return bytes(msgspec.json.decode(tokenizer_json, type=_Parts).decoder)


@functools.cache
def _byte_level_table() -> dict[str, int]:
    """The alphabet of byte-level tokenizers: printable Latin-1 as itself, all other bytes from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    table.update({chr(0x100 + offset): byte for offset, byte in enumerate(others)})
    return table
