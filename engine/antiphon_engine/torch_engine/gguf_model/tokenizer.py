"""The tokenizer of a GGUF file, as the `tokenizers` library runs it and tokenizer.json holds it.

Two kinds: byte-level BPE (`gpt2`), whose way to split a text into words has a name in the file, and SentencePiece BPE
(`llama`), whose merges follow from its pieces and their scores. Which splits there are, and what a name implies beside
the split (whole words before merges, a first token), is llama.cpp's list (src/llama-vocab.cpp); the expressions are
those of the models' own tokenizer.json. A name that is not known here is refused: a wrong split gives other ids and no
error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from antiphon_engine.torch_engine.errors import DamagedCheckpoint, UnsupportedModel
from antiphon_engine.torch_engine.gguf_model.file import GgufFile

_PREFIX = "tokenizer.ggml"
_SPACE = "\u2581"


class _Kind(IntEnum):
    """Of a token."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4


@dataclass(frozen=True, slots=True)
class _Split:
    expression: str = ""
    """Empty: GPT-2's, which the library has."""
    digits: bool = False
    """Each digit is a word."""
    whole_words: bool = False
    """A word that is a token is that token, whatever merges say."""
    bos: bool = False
    """A text begins with the first token, unless the file says otherwise."""
    composed: bool = False
    """Characters are composed first (NFC)."""


_LLAMA3 = _Split(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+",
    whole_words=True,
    bos=True,
)
_QWEN2_EXPRESSION = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = _Split(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    whole_words=True,
    bos=True,
)
_SPLITS: Mapping[str, _Split] = {
    "gpt-2": _Split(),
    "smollm": _Split(digits=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _Split(_QWEN2_EXPRESSION, composed=True),
    "deepseek-r1-qwen": _Split(_QWEN2_EXPRESSION),
    "tekken": _TEKKEN,
}
"""By `tokenizer.ggml.pre`."""


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    tokens: Sequence[str]
    kinds: Sequence[int]

    @property
    def ids(self) -> dict[str, int]:
        """Of a token that is there twice, the first."""
        found: dict[str, int] = {}
        for index, token in enumerate(self.tokens):
            found.setdefault(token, index)
        return found

    def of(self, kind: _Kind) -> list[str]:
        return [token for token, own in zip(self.tokens, self.kinds, strict=True) if own == kind]


def build_tokenizer(file: GgufFile) -> Tokenizer:
    """Raises UnsupportedModel for a kind that is not known here, DamagedCheckpoint."""
    kind = file.text(f"{_PREFIX}.model")
    vocabulary = _vocabulary(file)
    if kind == "gpt2":
        tokenizer, bos = _byte_level(file, vocabulary)
    elif kind == "llama":
        tokenizer, bos = _sentence_piece(file, vocabulary), True
    else:
        raise UnsupportedModel(f"{file.path} has a tokenizer of the kind {kind!r}: only gpt2 and llama are known")
    special = vocabulary.of(_Kind.CONTROL) + (vocabulary.of(_Kind.UNKNOWN) if kind == "llama" else [])
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    own = vocabulary.of(_Kind.USER_DEFINED)
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in own])
    _surround(file, tokenizer, vocabulary, bos)
    return tokenizer


def special_token(file: GgufFile, name: str) -> str:
    """Text of the `bos`, `eos`, `unknown` or `padding` token; empty if there is none. Raises DamagedCheckpoint."""
    key = f"{_PREFIX}.{name}_token_id"
    if key not in file.metadata:
        return ""
    index, tokens = file.integer(key), _vocabulary(file).tokens
    if index >= len(tokens):
        raise DamagedCheckpoint(f"{file.path} says {key}: {index}, of {len(tokens)} tokens: get the file again")
    return tokens[index]


def _vocabulary(file: GgufFile) -> _Vocabulary:
    tokens, kinds = file.get(f"{_PREFIX}.tokens"), file.metadata.get(f"{_PREFIX}.token_type")
    if not isinstance(tokens, list) or not tokens:
        raise DamagedCheckpoint(f"{file.path} has no list of tokens: get the file again")
    if kinds is None:
        kinds = [_Kind.NORMAL] * len(tokens)
    if not isinstance(kinds, list) or len(kinds) != len(tokens):
        raise DamagedCheckpoint(f"{file.path} has not one type for each token: get the file again")
    return _Vocabulary(tokens, kinds)


# ------------------------------------------------------------------ byte-level BPE


def _byte_level(file: GgufFile, vocabulary: _Vocabulary) -> tuple[Tokenizer, bool]:
    """And whether a text begins with the first token where the file does not say it."""
    name = file.text(f"{_PREFIX}.pre", "")
    split = _SPLITS.get(name)
    if split is None:
        raise UnsupportedModel(
            f"{file.path} has the pre-tokenizer {name or 'of no name'!r}, which is not known here: use a model with "
            f"one of {', '.join(_SPLITS)}"
        )
    merges = file.get(f"{_PREFIX}.merges")
    pairs = [_pair(file, merge) for merge in merges] if isinstance(merges, list) else []
    tokenizer = Tokenizer(_bpe(file, vocabulary.ids, pairs, ignore_merges=split.whole_words))
    if split.composed:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[pre_tokenizers.PreTokenizer] = []
    if split.digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if split.expression:
        steps.append(pre_tokenizers.Split(Regex(split.expression), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not split.expression))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, split.bos


def _pair(file: GgufFile, merge: object) -> tuple[str, str]:
    left, space, right = str(merge).partition(" ")
    if not (left and space and right):
        raise DamagedCheckpoint(f"{file.path} has the merge {merge!r}, which is no pair: get the file again")
    return left, right


# ------------------------------------------------------------------ SentencePiece


def _sentence_piece(file: GgufFile, vocabulary: _Vocabulary) -> Tokenizer:
    unknown = special_token(file, "unknown") or next(iter(vocabulary.of(_Kind.UNKNOWN)), "")
    tokenizer = Tokenizer(
        _bpe(
            file,
            vocabulary.ids,
            _merges(file, vocabulary),
            unk_token=unknown or None,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefixed = bool(file.metadata.get(f"{_PREFIX}.add_space_prefix", True))
    spaces = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefixed else spaces
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefixed else steps)
    return tokenizer


def _merges(file: GgufFile, vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Every way to make a piece of two, pieces of the highest score first, as SentencePiece merges."""
    scores = file.get(f"{_PREFIX}.scores")
    if not isinstance(scores, list) or len(scores) != len(vocabulary.tokens):
        raise DamagedCheckpoint(f"{file.path} has not one score for each token: get the file again")
    made = (_Kind.NORMAL, _Kind.USER_DEFINED)
    known = {token for token, kind in zip(vocabulary.tokens, vocabulary.kinds, strict=True) if kind in made}
    found = [
        (score, cut, piece)
        for piece, score, kind in zip(vocabulary.tokens, scores, vocabulary.kinds, strict=True)
        if kind in made
        for cut in range(1, len(piece))
        if piece[:cut] in known and piece[cut:] in known
    ]
    found.sort(key=lambda one: (-one[0], -one[1]))
    return [(piece[:cut], piece[cut:]) for _, cut, piece in found]


# ------------------------------------------------------------------ both


def _bpe(file: GgufFile, ids: dict[str, int], pairs: list[tuple[str, str]], **how: object) -> models.BPE:
    try:
        return models.BPE(vocab=ids, merges=pairs, **how)
    except Exception as error:  # the library raises plain Exception
        raise DamagedCheckpoint(f"{file.path} has merges that do not fit its tokens ({error}): get it again") from error


def _surround(file: GgufFile, tokenizer: Tokenizer, vocabulary: _Vocabulary, bos: bool) -> None:
    """What stands before and after a text that is no rendered chat."""
    first = special_token(file, "bos") if file.metadata.get(f"{_PREFIX}.add_bos_token", bos) else ""
    last = special_token(file, "eos") if file.metadata.get(f"{_PREFIX}.add_eos_token", False) else ""
    if not (first or last):
        return
    single = " ".join(part for part in (first, "$A", last) if part)
    tokens = [(token, vocabulary.ids[token]) for token in dict.fromkeys((first, last)) if token]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=tokens)
