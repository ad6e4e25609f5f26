"""What computes one step: the seam between scheduling (which every engine of ours shares) and compute.

`BlockEngine` (scheduler, pool, thread) decides what each step computes; an `Executor` computes it. `TorchExecutor`
runs a model; `TimedExecutor` waits as long as the latency model says. Executors keep no state of a request between
steps other than KV content in their memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

import msgspec
from antiphon_kvtransfer.local_plane import LocalRankPlane
from antiphon_kvtransfer.offer import TransportOffer
from antiphon_kvtransfer.plane import KvPart, RankPlane
from antiphon_kvtransfer.transport import Region

from antiphon_engine.interface import KvMemory, ModelInfo, Sampling, TokenLogprob
from antiphon_engine.limits import AllowedIds

NO_TOKEN = -1
"""In place of a sampled id: the request's masks together leave none."""


class TokenMask(Protocol):
    """Which ids may be sampled, as a grammar has it."""

    def bits(self) -> bytes | None:
        """Bit i % 8 of byte i // 8 says whether id i may be. May wait: for as long as computing it takes.

        None: it could not be computed. Sample anything, it is dropped.
        """


@dataclass(frozen=True, slots=True)
class KnownMask:
    """A TokenMask."""

    known: bytes

    def bits(self) -> bytes:
        return self.known


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
    allowed: TokenMask | None = None
    """Only these may be. None: all."""
    allowed_ids: AllowedIds | None = None
    """Of these, too, only these may be."""


@dataclass(frozen=True, slots=True)
class ScoreSpec:
    """Choose nothing: how likely is this token there?"""

    target: int
    top: int
    """How many of the best are wanted beside it."""


RowSpec = SampleSpec | ScoreSpec
"""What is wanted of one row of logits. Either way it brings a `SampledToken`."""


@dataclass(eq=False, slots=True)
class Scoring:
    """Log-probabilities wanted of a prompt's own tokens: of those that some rows of a step's part predict."""

    skip: int
    """Leading tokens of the part whose rows are not wanted."""
    targets: Sequence[int]
    """The tokens that the rows behind them predict, one a row."""
    top: int
    found: tuple[TokenLogprob, ...] = ()
    """Put in by the executor, one a target, before the step ends."""


class SequenceStep(msgspec.Struct, frozen=True):
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
    scoring: Scoring | None = None


class SampledToken(msgspec.Struct, frozen=True):
    token_id: int
    """Or NO_TOKEN."""
    logprob: TokenLogprob | None


def row_specs(step: Sequence[SequenceStep]) -> list[RowSpec]:
    """What is wanted of the step's rows of logits (`step_batch`), in their order."""
    specs: list[RowSpec] = []
    for sequence in step:
        if (scoring := sequence.scoring) is not None:
            specs.extend(ScoreSpec(target, scoring.top) for target in scoring.targets)
        if sequence.sample is not None:
            specs.append(sequence.sample)
    return specs


def rows_wanted(step: Sequence[SequenceStep]) -> int:
    return sum(
        (sequence.sample is not None) + (0 if sequence.scoring is None else len(sequence.scoring.targets))
        for sequence in step
    )


def step_results(step: Sequence[SequenceStep], tokens: Sequence[SampledToken]) -> list[SampledToken | None]:
    """From what the step's rows brought to one result a sequence; log-probabilities of prompts go into `scoring`."""
    rows = iter(tokens)
    results: list[SampledToken | None] = []
    for sequence in step:
        if (scoring := sequence.scoring) is not None:
            found = (next(rows).logprob for _ in scoring.targets)
            scoring.found = tuple(logprob for logprob in found if logprob is not None)
        results.append(None if sequence.sample is None else next(rows))
    return results


class ExecutorLost(Exception):
    """The executor cannot compute any more, e.g. because one of its ranks died: start the engine anew.

    Raised by `begin` or by a step's future. The engine fails at once; other errors end the requests of their step only.
    """


@dataclass(frozen=True, slots=True)
class RankTimes:
    """What steps took where ranks of their own compute them, summed over all steps so far."""

    busy_s: float
    """In the model and in exchanges between ranks; the rest of a step is the driver's, and the way to the ranks."""
    exchange_s: float
    """Of that: in exchanges, waiting for other ranks included."""


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

    @property
    def depth(self) -> int:
        """How many steps may be in flight: with several stages, so many that none need be idle."""
        return 1

    @property
    def rank_times(self) -> RankTimes | None:
        """None: the step is computed here, and there is nothing beside it."""
        return None

    def begin(self, step: Sequence[SequenceStep]) -> Future[list[SampledToken | None]]:
        """Start a step; the future has what `execute` returns, or raises what it raises.

        Steps end in the order in which they began. At most `depth` of them are in flight. A sequence is in two of them
        only as consecutive chunks of its prompt: the later one attends to what the earlier one writes.
        Every future ends: when the executor is lost or closed, with an error.
        Here the step is computed before `begin` returns; executors with ranks of their own return at once.
        """
        done: Future[list[SampledToken | None]] = Future()
        try:
            done.set_result(self.execute(step))
        except Exception as error:  # noqa: BLE001 - the future carries it to whoever waits
            done.set_exception(error)
        return done

    def when_lost(self, tell: Callable[[ExecutorLost], None]) -> None:
        """Have `tell` called, once and on any thread, if the executor is lost: an engine with nothing to compute would
        not notice. Called before the first step. An executor without ranks of its own is never lost.
        """
        del tell

    def planes(self, offer: TransportOffer) -> Sequence[RankPlane]:
        """The data plane of each rank, not started. Called once, on the event loop that they are used from."""
        memory, info = self.kv, self.info
        region = Region(memory.address, memory.length_bytes)
        whole = KvPart(0, info.layers, 0, info.kv_heads)
        return [
            LocalRankPlane(0, whole, region, memory.block_bytes, memory.num_blocks, offer.transports(region)),
        ]

    @abstractmethod
    def close(self) -> None: ...
