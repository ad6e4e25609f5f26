"""Text to token ids, and single ids back to text and bytes.

Encoding costs about a microsecond a token. A short text is encoded where it is; a long one in a thread of a small
pool, so that one long prompt does not hold up everybody's streams (the tokenizer releases the interpreter lock).
The text of an answer is never made here: the worker detokenises. Single tokens are, for log-probabilities.
"""

from __future__ import annotations

import asyncio
import functools
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import msgspec
from tokenizers import Tokenizer

INLINE_CHARACTERS = 2000
"""About half a millisecond of work: less than a hop to a thread and back costs a busy loop."""

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


class TokenCodec:
    """The model's tokenizer, as the gateway uses it."""

    def __init__(self, tokenizer_json: bytes) -> None:
        try:
            self._tokenizer: Tokenizer = Tokenizer.from_buffer(tokenizer_json)
        except Exception as error:  # the library raises bare exceptions
            raise TokenizerInvalid(f"tokenizer.json cannot be loaded: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._added = frozenset(self._tokenizer.get_added_tokens_decoder())
        self._byte_level = b'"ByteLevel"' in _decoder(tokenizer_json)
        self._texts: dict[int, TokenText] = {}

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text

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
