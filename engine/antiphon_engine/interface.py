"""What an engine is, to everything above it.

An engine owns the KV pool of one worker and runs requests on it, step by step, in a thread of its own. The roles
above (prefill, decode, both) know only this interface; `torch`, `timed` and later `vllm` stand behind it.

Three ideas make it work:

* *All methods may be called from any thread and return at once.* Pool and request state sit behind one lock that is
  never held while a step computes, so a pin or a cancel never waits for a step. What a step brought comes back through
  `EngineListener`, called on the engine's thread.
* *Pulled KV and computed KV are the same thing at different times.* A request may be submitted `held`: it is not
  scheduled; the caller reserves blocks for it, fills them from a peer, says with `publish` how many leading tokens
  are in and certain, and `resume`s it. Whatever is missing by then (nothing, the last token, everything) the engine
  computes. So fallback to local prefill is `resume` without `publish`.
* *A request's randomness is its own*: see `Sampling`. `output` of an earlier attempt continues where it stopped.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from antiphon_kvtransfer.identity import BlockHash


class RequestKind(enum.Enum):
    GENERATE = "generate"
    """Compute what is missing of the prompt, then decode to the end."""
    PREFILL = "prefill"
    """Compute the prompt, sample one token, then keep the blocks until `cancel`."""


class FinishReason(enum.Enum):
    STOP = "stop"
    """EOS or a stop token id (which is the last of the output ids)."""
    LENGTH = "length"
    """`max_tokens` or the model's context reached."""
    ERROR = "error"
    """The engine failed on this request; `RequestOutput.error` says how."""


class GrammarKind(enum.Enum):
    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    CHOICE = "choice"
    """`text` is a JSON list of strings."""
    LARK = "lark"
    """A grammar as llguidance reads it."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an output has to keep to. Equal ones are compiled once."""

    kind: GrammarKind
    text: str
    after_token_ids: tuple[int, ...] = ()
    """Output ids, in this order, after which it begins (the end of reasoning). Empty: at once."""
    opening_token_id: int | None = None
    """With `after_token_ids`: the output may begin with this id, and only then is there reasoning to end. None: the
    prompt has begun it."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to choose tokens. Noise is a function of (seed, choice, output position) alone (Gumbel-max)."""

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 is off."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    """None: no log-probabilities; n: the chosen token's and the n best. Of the distribution before temperature,
    penalties and filters (as vLLM's raw_logprobs and OpenAI's), and under a grammar's mask."""
    seed: int = 0
    choice: int = 0
    max_tokens: int = 16
    min_tokens: int = 0
    """EOS and stop ids cannot be sampled before that many output tokens."""
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    grammar: Grammar | None = None
    """Only what it allows is sampled; EOS only where it may end. None: anything."""
    prompt_logprobs: int | None = None
    """None: none are wanted; n: of each token of the prompt but the first, with the n best at its place. All positions
    are computed for them, and none is found in a cache. With `max_tokens` 0 that is all there is."""
    allowed_token_ids: tuple[int, ...] = ()
    """Nothing else is sampled. Empty: anything. Log-probabilities do not know of it (as with vLLM)."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences of ids that the output never completes. Log-probabilities do not know of them either."""


@dataclass(frozen=True, slots=True)
class EngineRequest:
    request_id: str
    prompt: Sequence[int]
    """Token ids, at least one."""
    sampling: Sampling
    kind: RequestKind = RequestKind.GENERATE
    output: Sequence[int] = ()
    """Output ids of an earlier attempt: KV is recomputed for them, sampling goes on at position len(output)."""
    cache_salt: bytes = b""
    held: bool = False
    """Start on hold: nothing is computed until `resume`."""
    credit_blocks: int | None = None
    """PREFILL only: how many leading blocks may be computed until `grant` says more. None: no limit."""


class RefusalReason(enum.Enum):
    CAPACITY = "capacity"
    DRAINING = "draining"
    INVALID = "invalid"


class RequestRefused(Exception):
    """The engine does not take this request (now, or ever: see `reason`)."""

    def __init__(self, reason: RefusalReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(token id, log-probability), best first."""
    rank: int = 0
    """Of a prompt's token: its place among all ids, the most likely having 1. 0: not said."""


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What one step brought for one GENERATE request."""

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    """One per token if asked for, else empty."""
    finish: FinishReason | None
    cached_tokens: int
    """Prompt tokens found in the prefix cache or published by `publish`: not computed here."""
    error: str = ""
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    """Of the prompt's next tokens, from the second on: each once, in order, before or with the first token."""


@dataclass(frozen=True, slots=True)
class PrefillProgress:
    """How far a PREFILL request is. Sent after each step that advanced it."""

    request_id: str
    full_blocks: int
    """Leading full blocks whose KV is finished (in all)."""
    cached_tokens: int
    first_token: int | None
    """Set once, with the step that completed the prompt."""
    first_logprob: TokenLogprob | None
    partial_tokens: int
    """With `first_token`: tokens in the last, not full block; 0 when there is none."""
    error: str = ""
    """Not empty: the engine failed on this request, which is over and holds nothing."""
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    """As `RequestOutput.prompt_logprobs`."""


@dataclass(frozen=True, slots=True)
class StepSample:
    """Inputs and duration of one step, for fitting the latency model (`antiphon_policy.latency`)."""

    duration_ms: float
    new_tokens: int
    token_context: int
    """Sum over sequences of new_tokens * context."""
    sequences: int
    kv_tokens: int
    """Sum over sequences of the tokens attended to."""


@dataclass(frozen=True, slots=True)
class Load:
    running: int
    waiting: int
    waiting_tokens: int
    """Tokens of accepted requests that are still to be computed before their first output token."""
    kv_tokens: int
    free_blocks: int
    """Free, or cached and evictable, and not promised to an accepted request."""
    total_blocks: int
    retained_blocks: int
    """Blocks kept by `pin` or `retain`."""
    empty_blocks: int = 0
    """Of the free ones, those with nothing in them: so many can be stored without evicting any."""
    chunk_tokens: int = 0
    """Tokens that one step computes at most."""
    max_sequences: int = 0
    """Requests that one step computes at most; 0: not said."""


@dataclass(frozen=True, slots=True)
class StepResult:
    outputs: tuple[RequestOutput, ...]
    prefills: tuple[PrefillProgress, ...]
    load: Load
    sample: StepSample | None


@dataclass(frozen=True, slots=True)
class BlocksChanged:
    """Change of the set of indexed blocks. Sequence numbers are consecutive from 1 within an incarnation."""

    sequence: int
    stored: tuple[BlockHash, ...]
    removed: tuple[BlockHash, ...]


class EngineListener(ABC):
    """Called on the engine's thread, or on the thread of the call that caused the change. Must return at once."""

    @abstractmethod
    def on_step(self, result: StepResult) -> None: ...

    @abstractmethod
    def on_blocks(self, change: BlocksChanged) -> None:
        """Called in order of `sequence`."""

    @abstractmethod
    def on_capacity(self) -> None:
        """Blocks became free: a `reserve` that returned None may now succeed."""

    @abstractmethod
    def on_failure(self, error: BaseException) -> None:
        """The engine's thread died. The process cannot serve any more."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the engine knows of its model; the worker makes the ModelCard message of it."""

    model: str
    revision: str
    architecture: str
    kv_format: str
    block_tokens: int
    kv_block_bytes: int
    max_context_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    tokenizer_json: bytes
    """Content of tokenizer.json (Hugging Face `tokenizers`)."""
    tokenizer_config_json: str
    chat_template: str
    bos_token: str
    eos_token: str
    adapter: str = ""
    layers: int = 1
    kv_heads: int = 1


@dataclass(frozen=True, slots=True)
class KvMemory:
    """The pool's memory as one region of `num_blocks` equal, contiguous blocks."""

    address: int
    block_bytes: int
    num_blocks: int

    @property
    def length_bytes(self) -> int:
        return self.block_bytes * self.num_blocks


@dataclass(frozen=True, slots=True)
class Reservation:
    blocks: tuple[int, ...]
    """Physical block numbers for the leading blocks of the request, as many as cover the tokens asked for."""
    filled_blocks: int
    """Leading blocks of these whose content is already in (found in the prefix cache or published)."""


@dataclass(frozen=True, slots=True)
class IntegrityReport:
    """What `check_integrity` counted. It raises IntegrityError where the counts contradict each other."""

    free_blocks: int
    cached_blocks: int
    used_blocks: int
    total_blocks: int
    requests: int


class IntegrityError(Exception):
    """The pool's books do not balance: a bug. The message names block and counts."""


class Engine(ABC):
    """One model on one worker. See the module's docstring for threads and for held requests."""

    @property
    @abstractmethod
    def info(self) -> ModelInfo: ...

    @property
    @abstractmethod
    def kv(self) -> KvMemory: ...

    @abstractmethod
    def start(self, listener: EngineListener) -> None:
        """Start the engine's thread."""

    @abstractmethod
    def close(self, deadline_s: float = 10.0) -> None:
        """Stop after the steps that are in flight; requests end without a word; release the executor. Idempotent."""

    # -- requests

    @abstractmethod
    def submit(self, request: EngineRequest) -> None:
        """Take a request, or raise RequestRefused at once.

        Room for the whole prompt is promised to a taken request that is held or PREFILL, so that neither can end up
        waiting for room while holding some.
        """

    @abstractmethod
    def cancel(self, request_id: str) -> None:
        """Forget the request, at any phase, and free its blocks (at the end of the step that uses them).

        No output comes after the steps that are in flight. Unknown ids are ignored. Also ends a finished PREFILL.
        """

    @abstractmethod
    def grant(self, request_id: str, credit_blocks: int) -> None:
        """PREFILL: the leading `credit_blocks` blocks may now be computed (a running total). Unknown: ignored."""

    # -- held requests: pulled KV

    @abstractmethod
    def reserve(self, request_id: str, num_tokens: int) -> Reservation | None:
        """Blocks for the leading `num_tokens` tokens of a held request; None when there is no room now.

        The first call looks the prompt up in the prefix cache. Raises KeyError if the request is gone.
        """

    @abstractmethod
    def publish(self, request_id: str, num_tokens: int) -> None:
        """The KV of the leading `num_tokens` tokens of a held request is in place and certain. Full blocks are indexed.

        Raises KeyError if the request is gone.
        """

    @abstractmethod
    def resume(self, request_id: str, output: Sequence[int] = (), scored_tokens: int = 0) -> None:
        """End the hold. `output`: ids already sampled elsewhere (the first token), which count as output.
        `scored_tokens`: how many tokens of the prompt have had their log-probabilities computed elsewhere.

        Raises KeyError if the request is gone.
        """

    # -- blocks kept for others

    @abstractmethod
    def pin(self, hashes: Sequence[BlockHash]) -> list[int]:
        """Physical numbers of the leading hashes that are held, each kept until `release`d."""

    @abstractmethod
    def pin_partial(self, request_id: str) -> list[int]:
        """The last, not full block of a finished PREFILL request ([] if it is gone or has none), kept."""

    @abstractmethod
    def retain(self, blocks: Sequence[int]) -> None:
        """Keep blocks of a live request (targets of a read) from reuse, whatever becomes of the request."""

    @abstractmethod
    def release(self, blocks: Sequence[int]) -> None:
        """Undo one `pin`, `pin_partial` or `retain` of each block."""

    @abstractmethod
    def lookup(self, hashes: Sequence[BlockHash]) -> int:
        """How many leading hashes are held."""

    # -- observation

    @abstractmethod
    def indexed_blocks(self) -> tuple[int, frozenset[BlockHash]]:
        """(sequence of the last BlocksChanged, the whole set at that moment)."""

    @abstractmethod
    def load(self) -> Load: ...

    @abstractmethod
    def check_integrity(self) -> IntegrityReport:
        """Count every block and every reference. Raises IntegrityError.

        Other calls do not wait for it, but with a large pool it takes its time: not for an event loop.
        """
