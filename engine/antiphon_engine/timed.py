"""The timed executor: a model that waits instead of computing, and checks every KV block it is given.

For tests of many workers on a small machine. Scheduling, pool, protocol and transfers are the real ones; only compute
is replaced, by waiting as long as `TimedSettings.step_ms` says. Two things keep it honest:

* *Blocks have a content that can be told from right.* A block holds a digest of its tokens and of the content of the
  block before it, so it depends on the whole prefix, as KV does. Before a block is attended to, its content is compared
  with what it must be for the request's tokens: the last block on every step, all of them when a sequence is new here
  (prefix hit, pull, preemption). A difference raises KvCorruption. What may fail: nothing else.
* *Tokens are a hash* of (prompt, seed, choice, position): the same wherever and in whatever chunks a request runs.
  Under a grammar they are chosen by that hash among those that it allows, such that texts come to an end.
  How likely a prompt's token is follows from the token and its position.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from antiphon_engine.executor import NO_TOKEN, Executor, SampledToken, SampleSpec, Scoring, SequenceStep
from antiphon_engine.interface import KvMemory, ModelInfo, TokenLogprob
from antiphon_engine.timed_tokenizer import (
    BYTE_VOCAB_SIZE,
    CHAT_TEMPLATE,
    EOS_TOKEN_ID,
    IM_END_TOKEN_ID,
    PRINTABLE_TOKEN_IDS,
    SPECIAL_TOKENS,
    byte_tokenizer_json,
)

REMEMBERED_SEQUENCES = 256
"""Sequences whose prefix need not be verified from the start again. Forgetting one costs time, not safety."""

_CLOSING_IDS = tuple(b'"]}')


class StepDuration(Protocol):
    """Milliseconds that a step takes; `antiphon_policy.latency.StepModel.step_ms` is one."""

    def __call__(self, *, new_tokens: int, token_context: int, sequences: int, kv_tokens: int) -> float: ...


@dataclass(frozen=True, slots=True)
class TimedSettings:
    """Defaults give a byte-level model with ChatML, so that a gateway can serve text with it."""

    step_ms: StepDuration
    num_blocks: int
    model: str = "timed"
    revision: str = "timed-1"
    block_tokens: int = 64
    block_bytes: int = 256
    vocab_size: int = BYTE_VOCAB_SIZE
    max_context_tokens: int = 8192
    eos_token_ids: tuple[int, ...] = (EOS_TOKEN_ID, IM_END_TOKEN_ID)
    tokenizer_json: bytes = field(default_factory=byte_tokenizer_json)
    tokenizer_config_json: str = "{}"
    chat_template: str = CHAT_TEMPLATE
    bos_token: str = SPECIAL_TOKENS[0]
    eos_token: str = SPECIAL_TOKENS[1]
    sampled_token_ids: tuple[int, ...] = PRINTABLE_TOKEN_IDS
    """What is generated: printable, never EOS or another special token."""


class KvCorruption(Exception):
    """A KV block does not hold what its request's tokens demand: it was corrupted, or published wrongly."""


@dataclass(slots=True)
class _Sequence:
    """How far a sequence is known to be right."""

    tokens: Sequence[int]
    prompt_digest: bytes = b""
    verified_tokens: int = 0
    content_before: bytes = b""
    """Content of the last full block within `verified_tokens`."""


class TimedExecutor(Executor):
    def __init__(
        self,
        settings: TimedSettings,
        *,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._settings = settings
        self._sleep = sleep
        self._clock = clock
        self._memory = mmap.mmap(-1, settings.num_blocks * settings.block_bytes)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._kv = KvMemory(address, settings.block_bytes, settings.num_blocks)
        self._info = ModelInfo(
            model=settings.model,
            revision=settings.revision,
            architecture="timed",
            kv_format=f"timed/{settings.block_tokens}/digest",
            block_tokens=settings.block_tokens,
            kv_block_bytes=settings.block_bytes,
            max_context_tokens=settings.max_context_tokens,
            vocab_size=settings.vocab_size,
            eos_token_ids=settings.eos_token_ids,
            tokenizer_json=settings.tokenizer_json,
            tokenizer_config_json=settings.tokenizer_config_json,
            chat_template=settings.chat_template,
            bos_token=settings.bos_token,
            eos_token=settings.eos_token,
        )
        self._sequences: OrderedDict[str, _Sequence] = OrderedDict()

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def kv(self) -> KvMemory:
        return self._kv

    def execute(self, step: Sequence[SequenceStep]) -> list[SampledToken | None]:
        started = self._clock()
        contexts = [part.start + len(part.tokens) for part in step]
        duration_ms = self._settings.step_ms(
            new_tokens=sum(len(part.tokens) for part in step),
            token_context=sum(len(part.tokens) * context for part, context in zip(step, contexts, strict=True)),
            sequences=len(step),
            kv_tokens=sum(contexts),
        )
        results = [self._execute_one(part) for part in step]
        remaining_s = duration_ms / 1e3 - (self._clock() - started)
        if remaining_s > 0:
            self._sleep(remaining_s)
        return results

    def close(self) -> None:
        """Nothing to do: the memory stays for as long as a transport may have it registered."""
        self._sequences.clear()

    # -- inside

    def _execute_one(self, part: SequenceStep) -> SampledToken | None:
        known = self._sequences.pop(part.request_id, None)
        if known is None or known.tokens is not part.sequence or known.verified_tokens != part.start:
            known = _Sequence(part.sequence)
            self._verify(part, known, range(part.start // self._settings.block_tokens))
        self._verify_partial(part, known)
        self._write(part, known)
        sampled = None if part.sample is None else self._sample(part.sample, known)
        if part.scoring is not None:
            self._score(part.scoring, part.start + part.scoring.skip + 1)
        self._sequences[part.request_id] = known
        if len(self._sequences) > REMEMBERED_SEQUENCES:
            self._sequences.popitem(last=False)
        return sampled

    def _verify(self, part: SequenceStep, known: _Sequence, numbers: range) -> None:
        """Compare full blocks before `part.start` with what they must hold."""
        for number in numbers:
            expected = self._content(known.content_before, self._tokens_of(part, number))
            if self._read(part.blocks[number]) != expected:
                raise self._corruption(part, number)
            known.content_before = expected

    def _verify_partial(self, part: SequenceStep, known: _Sequence) -> None:
        """Compare the last block before `part.start`, which appended tokens will change or follow."""
        number, count = divmod(part.start, self._settings.block_tokens)
        if not count:
            if number and self._read(part.blocks[number - 1]) != known.content_before:
                raise self._corruption(part, number - 1)
            return
        found = self._read(part.blocks[number])
        tokens = self._tokens_of(part, number)
        # Whoever filled the block may have been further in the same sequence than this step starts.
        if all(found != self._content(known.content_before, tokens[:n]) for n in range(count, len(tokens) + 1)):
            raise self._corruption(part, number)

    def _write(self, part: SequenceStep, known: _Sequence) -> None:
        block_tokens = self._settings.block_tokens
        end = part.start + len(part.tokens)
        for number in range(part.start // block_tokens, -(-end // block_tokens)):
            tokens = part.sequence[number * block_tokens : min(end, (number + 1) * block_tokens)]
            content = self._content(known.content_before, tokens)
            offset = part.blocks[number] * self._settings.block_bytes
            self._memory[offset : offset + self._settings.block_bytes] = content
            if len(tokens) == block_tokens:
                known.content_before = content
        known.verified_tokens = end

    def _sample(self, spec: SampleSpec, known: _Sequence) -> SampledToken:
        if not known.prompt_digest:
            known.prompt_digest = hashlib.sha256(array("Q", spec.prompt)).digest()
        digest = hashlib.sha256(known.prompt_digest)
        for value in (spec.sampling.seed, spec.sampling.choice, spec.position):
            digest.update(value.to_bytes(16, "little", signed=True))
        number = int.from_bytes(digest.digest()[:8], "little")
        allowed = self._allowed(spec, number)
        if not allowed:
            return SampledToken(NO_TOKEN, None)
        if spec.sampling.logprobs is None:
            return SampledToken(allowed[0], None)
        top = tuple((token_id, -0.5 - rank) for rank, token_id in enumerate(allowed[: spec.sampling.logprobs]))
        return SampledToken(allowed[0], TokenLogprob(allowed[0], -0.5, top))

    def _score(self, scoring: Scoring, position: int) -> None:
        """`position`: of the first target in the prompt."""
        usual = self._settings.sampled_token_ids
        scoring.found = tuple(
            TokenLogprob(
                target,
                timed_logprob(target, place),
                tuple((usual[(place + step) % len(usual)], -0.25 - step) for step in range(scoring.top)),
                rank=1 + (target + place) % 7,
            )
            for place, target in enumerate(scoring.targets, start=position)
        )

    def _allowed(self, spec: SampleSpec, number: int) -> list[int]:
        """What may be sampled, what is sampled first. `number`: drawn for this position."""
        choices: Sequence[int] = self._settings.sampled_token_ids
        bits = None if spec.allowed is None else spec.allowed.bits()
        if bits is not None:
            choices = _choices_of(bits, choices, self._info.eos_token_ids, wants_end=number % 4 == 0)
        if spec.allowed_ids is not None:
            among = frozenset(spec.allowed_ids.ids.tolist())
            choices = [token_id for token_id in choices if token_id in among] if bits else sorted(among)
        if not choices:
            return []
        first = number % len(choices)
        ranked = (choices[(first + step) % len(choices)] for step in range(len(choices)))
        return [token_id for token_id in ranked if token_id not in spec.forbidden]

    def _tokens_of(self, part: SequenceStep, number: int) -> Sequence[int]:
        start = number * self._settings.block_tokens
        return part.sequence[start : start + self._settings.block_tokens]

    def _content(self, before: bytes, tokens: Sequence[int]) -> bytes:
        return hashlib.shake_128(before + array("Q", tokens).tobytes()).digest(self._settings.block_bytes)

    def _read(self, block: int) -> bytes:
        offset = block * self._settings.block_bytes
        return self._memory[offset : offset + self._settings.block_bytes]

    def _corruption(self, part: SequenceStep, number: int) -> KvCorruption:
        return KvCorruption(
            f"block {part.blocks[number]} is not what request {part.request_id} needs as its block {number} "
            f"(it starts at token {part.start})"
        )


def timed_logprob(target: int, position: int) -> float:
    """Of a prompt's token: made up, and another one wherever it stands."""
    return -0.5 - (target * 31 + position * 7) % 64 / 16


def _choices_of(bits: bytes, usual: Sequence[int], ends: Sequence[int], *, wants_end: bool) -> Sequence[int]:
    """What a grammar allows, narrowed so that texts end: its end where there can be one, now and then what closes a
    string, a list or an object, else what is usually sampled, else anything."""

    def allows(token_id: int) -> bool:
        return bool(bits[token_id // 8] >> token_id % 8 & 1)

    closing = _CLOSING_IDS if wants_end else ()
    for wanted in (ends, closing, usual):
        if found := [token_id for token_id in wanted if allows(token_id)]:
            return found
    return [token_id for token_id in range(8 * len(bits)) if allows(token_id)]
