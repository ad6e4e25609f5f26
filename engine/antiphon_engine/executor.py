"""What computes one step: the seam between scheduling (which every engine of ours shares) and compute.

`BlockEngine` (scheduler, pool, thread) decides what each step computes; an `Executor` computes it. `TorchExecutor`
runs a model; `TimedExecutor` waits as long as the latency model says. Executors keep no state of a request between
steps other than KV content in their memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from antiphon_engine.interface import KvMemory, ModelInfo, Sampling, TokenLogprob


@dataclass(frozen=True, slots=True)
class SampleSpec:
    """Sample one token after the last of this step's tokens."""

    sampling: Sampling
    position: int
    """Output position: 0 for the first generated token."""
    prompt: Sequence[int]
    output: Sequence[int]
    """All output ids before this position."""
    forbidden: frozenset[int]
    """Ids that may not be sampled now (EOS and stop ids below min_tokens)."""


@dataclass(frozen=True, slots=True)
class SequenceStep:
    """One sequence's part of a step: compute KV for `tokens` at positions start, start+1, ..."""

    request_id: str
    tokens: Sequence[int]
    start: int
    """Tokens already in KV: the position of the first new token."""
    blocks: Sequence[int]
    """Physical block of each logical block; covers start + len(tokens) tokens."""
    sample: SampleSpec | None
    """None: a prompt chunk that is not the last."""
    sequence: Sequence[int] = ()
    """All tokens of the request so far (prompt and output): `tokens` is `sequence[start : start + len(tokens)]`."""


@dataclass(frozen=True, slots=True)
class SampledToken:
    token_id: int
    logprob: TokenLogprob | None


class Executor(ABC):
    """Runs steps on one model. Called from the engine's thread only (but for `info` and `kv`)."""

    @property
    @abstractmethod
    def info(self) -> ModelInfo: ...

    @property
    @abstractmethod
    def kv(self) -> KvMemory: ...

    @abstractmethod
    def execute(self, step: Sequence[SequenceStep]) -> list[SampledToken | None]:
        """Compute all sequences in one batch; one result a sequence, None where `sample` was None.

        When it returns, the KV of all tokens is in `kv` memory.
        """

    @abstractmethod
    def close(self) -> None: ...
