"""From token ids to text, a token at a time, never half a character.

A token may hold part of a UTF-8 character, and what a token decodes to may depend on its neighbours (a leading space,
runs of byte tokens). So a token is decoded together with the segment before it, and its text is what the pair has
beyond the segment alone. While that ends in U+FFFD, a character may be unfinished and the text waits for the next
token. Joined, the pieces equal the decoding of all ids at once.
"""

from __future__ import annotations

from collections.abc import Collection

from tokenizers import Tokenizer

MAX_PENDING_TOKENS = 64
"""No character has so many tokens: what still ends in U+FFFD then is no beginning of one."""

_REPLACEMENT = "�"


class Detokenizer:
    """Decodes the output of one request."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        special_token_ids: frozenset[int],
        *,
        skip_special_tokens: bool,
        kept_special_ids: Collection[int] = (),
    ) -> None:
        """`special_token_ids`: see `special_token_ids`. `kept_special_ids`: those of them that have text all the same,
        as tool calls and reasoning are marked by special tokens in many models."""
        self._tokenizer = tokenizer
        self._ignored = special_token_ids.difference(kept_special_ids) if skip_special_tokens else frozenset()
        # What is to be skipped never comes as far as the decoder, which knows no exceptions.
        self._skip = skip_special_tokens and not kept_special_ids
        self._segment: list[int] = []
        self._segment_text = ""
        self._pending: list[int] = []

    @property
    def holds_back(self) -> bool:
        """Whether there are tokens whose text is not out yet."""
        return bool(self._pending)

    def push(self, token_id: int) -> str:
        """The text that became certain with this token, often empty."""
        if token_id in self._ignored:
            return ""
        self._pending.append(token_id)
        text = self._text_of(self._segment + self._pending)
        if text.endswith(_REPLACEMENT) and len(self._pending) < MAX_PENDING_TOKENS:
            return ""
        return self._commit(text)

    def flush(self) -> str:
        """What is still held back, when no token follows."""
        return self._commit(self._text_of(self._segment + self._pending)) if self._pending else ""

    def _commit(self, text: str) -> str:
        delta = text[len(self._segment_text) :]
        if delta:
            self._segment, self._pending = self._pending, []
            self._segment_text = self._text_of(self._segment)
        elif len(self._pending) >= MAX_PENDING_TOKENS:
            self._pending = []
        return delta

    def _text_of(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip)


def special_token_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Ids that have no text when special tokens are skipped."""
    return frozenset(number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special)
