"""Where a text may be cut so that its pieces are encoded each by itself, and give the same ids as the whole.

The tokenizers library takes the added tokens that are not normalised out of a text first (leftmost, then longest), and
normalises, splits and encodes what lies between them piece by piece. A rendered chat is full of them. So the pieces
are independent, unless some part of the tokenizer looks at more than its piece: at whether it is the first one
(Metaspace, Prepend, a prefix space), at spaces beside the token (`lstrip`, `rstrip`, `single_word`), or at chance
(dropout). Which parts do not is an allow-list here: what is not on it means no cuts. And it is not only believed: at
load, awkward texts around the tokens are encoded both ways. `NotCut` says why a tokenizer's texts stay whole.
"""

from __future__ import annotations

import itertools
import re
from array import array
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import msgspec
from tokenizers import Tokenizer

Encode: TypeAlias = "Callable[[str], array[int]]"
Parts: TypeAlias = "list[array[int] | str]"
"""A text in order: what is encoded, and what is to be encoded."""

_MODELS = frozenset({"BPE", "WordLevel"})
_NORMALIZERS = frozenset({"NFC", "NFD", "NFKC", "NFKD"})
_PRE_TOKENIZERS = frozenset({"ByteLevel", "Split", "Digits"})
_POST_PROCESSORS = frozenset({"ByteLevel", "TemplateProcessing"})
"""Without special tokens, which a chat's template writes itself, these two leave ids as they are."""

_AWKWARD = (
    "",
    " ",
    "  \n",
    "\n",
    "\r\n\t",
    "a",
    " a",
    "a ",
    "'s",
    "12",
    "e\u0301",
    "\u0301",
    "\u200d",
    "\U0001f469\u200d\U0001f4bb",
)
_TOKENS_CHECKED_CLOSELY = 3
_BETWEEN_TURNS = ("\n", "\n\n", " ")
"""What templates write between a turn's last token and the next one's first: half of the pieces of many chats, and
nobody's secret. Their ids are at hand; each would cost as much as any piece to look up."""


class NotCut(ValueError):
    """The tokenizer's texts cannot be cut, or that is not certain; the message says why."""


class _File(msgspec.Struct):
    """The parts of tokenizer.json that decide."""

    model: dict[str, Any]
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None
    post_processor: dict[str, Any] | None = None


class Segments:
    """The cuts of one tokenizer. Safe to use from many threads."""

    def __init__(self, tokenizer: Tokenizer, tokenizer_json: bytes, encode: Encode) -> None:
        """`encode`: a whole text's ids, without special tokens around it. Raises NotCut."""
        _check_parts(msgspec.json.decode(tokenizer_json, type=_File))
        self._ids = _cutting_tokens(tokenizer, encode)
        longest_first = sorted(self._ids, key=len, reverse=True)
        self._pattern = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")
        self._between = {piece: encode(piece) for piece in _BETWEEN_TURNS}
        self._check(encode)

    def look_up(self, text: str, known: Callable[[str], array[int] | None]) -> Parts:
        """The text's special tokens as ids, and what lies between them as ids where `known` has them."""
        parts: Parts = []
        for number, piece in enumerate(self._pattern.split(text)):
            if number % 2:
                parts.append(self._ids[piece])
            elif piece:
                ids = self._between.get(piece) or known(piece)
                parts.append(piece if ids is None else ids)
        return parts

    def _check(self, encode: Encode) -> None:
        for text in _awkward_texts(list(self._ids)):
            if joined(self.look_up(text, encode), encode) != encode(text):
                raise NotCut(f"cut at its special tokens, {text!r} has other ids than whole")


def joined(parts: Parts, encode: Encode) -> array[int]:
    """All ids, in an array of their own."""
    ids = array("I")
    for part in parts:
        ids.extend(encode(part) if isinstance(part, str) else part)
    return ids


def _check_parts(file: _File) -> None:
    kind = file.model.get("type")
    if kind not in _MODELS:
        raise NotCut(f"its model {kind!r} is not known to work piece by piece")
    if file.model.get("dropout"):
        raise NotCut("its merges are left out by chance (dropout)")
    for part in _parts(file.normalizer, "normalizers"):
        _known(part, _NORMALIZERS, "normalizer")
    for part in _parts(file.pre_tokenizer, "pretokenizers"):
        _known(part, _PRE_TOKENIZERS, "pre-tokenizer")
        if part.get("add_prefix_space"):
            raise NotCut("its pre-tokenizer puts a space before a text")
    for part in _parts(file.post_processor, "processors"):
        _known(part, _POST_PROCESSORS, "post-processor")


def _parts(part: dict[str, Any] | None, children: str) -> Iterator[dict[str, Any]]:
    if part is None:
        return
    if part.get("type") == "Sequence":
        for child in part.get(children) or ():
            yield from _parts(child, children)
    else:
        yield part


def _known(part: dict[str, Any], known: frozenset[str], what: str) -> None:
    if part.get("type") not in known:
        raise NotCut(f"its {what} {part.get('type')!r} is not known to work piece by piece")


def _cutting_tokens(tokenizer: Tokenizer, encode: Encode) -> dict[str, array[int]]:
    """The added tokens that the library takes out of a text before all else, with their ids."""
    tokens = {}
    for token in tokenizer.get_added_tokens_decoder().values():
        if token.normalized or not token.content:
            continue
        if token.lstrip or token.rstrip or token.single_word:
            raise NotCut(f"its token {token.content!r} looks at the characters beside it")
        ids = encode(token.content)
        if len(ids) != 1:
            raise NotCut(f"its token {token.content!r} is {len(ids)} tokens when it is encoded")
        tokens[token.content] = ids
    if not tokens:
        raise NotCut("it has no added tokens that are taken from a text as they are")
    return tokens


def _awkward_texts(tokens: list[str]) -> Iterator[str]:
    for token in tokens[:_TOKENS_CHECKED_CLOSELY]:
        for before, after in itertools.product(_AWKWARD, _AWKWARD):
            yield f"{before}{token}{after}"
    for one, two in itertools.pairwise([*tokens, tokens[0]]):
        yield f"a {one}{two} b\n{one}\n{two}{one[:-1]}{two}"
