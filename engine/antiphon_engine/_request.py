"""A request as the scheduler sees it: its tokens, its blocks, and how far it is. No decisions here."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field

from antiphon_kvtransfer.identity import BlockHash, ChainRoot, block_hash, chain_root

from antiphon_engine._grammars import RequestGrammar
from antiphon_engine.executor import Scoring
from antiphon_engine.interface import EngineRequest, FinishReason, ModelInfo, RequestKind, TokenLogprob
from antiphon_engine.limits import AllowedIds, WordBans


class Phase(enum.Enum):
    HELD = "held"
    """Its KV is being pulled: not scheduled until `resume`."""
    WAITING = "waiting"
    RUNNING = "running"
    KEPT = "kept"
    """A PREFILL request that is computed: its blocks stay until `cancel`."""
    OVER = "over"


@dataclass(eq=False, slots=True)
class Request:
    source: EngineRequest
    block_tokens: int
    root: ChainRoot
    stop_ids: frozenset[int]
    """Sampling one of these ends the request."""
    early_stop_ids: frozenset[int]
    """These may not be sampled below `min_tokens`."""
    tokens: list[int]
    """Prompt and output."""
    output: list[int]
    credit_blocks: int | None
    phase: Phase
    arrival: int = 0
    """Order of acceptance; waiting requests are served in this order."""
    blocks: list[int] = field(default_factory=list)
    computed_tokens: int = 0
    """Leading tokens whose KV is in the blocks: computed, found, or published."""
    indexed_blocks: int = 0
    """Leading blocks that are in the pool's index."""
    promised_blocks: int = 0
    """Room promised, of which what `blocks` has already is taken."""
    cached_tokens: int = 0
    announced_blocks: int = 0
    looked_up: bool = False
    preempted: bool = False
    flights: int = 0
    """Steps in flight that use its blocks: these stay as they are until the last of them is committed."""
    flying_tokens: int = 0
    """Tokens that those steps compute, behind `computed_tokens`."""
    grammar: RequestGrammar | None = None
    """What its output keeps to. Set before it is submitted."""
    allowed_ids: AllowedIds | None = None
    bans: WordBans | None = None
    to_score: int = 0
    """Leading positions whose logits say how likely the prompt's next token is, and that are wanted."""
    scored_tokens: int = 0
    """Of these, those that are told. What was computed of others may be found in no cache."""
    _chain: list[BlockHash] = field(default_factory=list)

    @staticmethod
    def of(source: EngineRequest, info: ModelInfo) -> Request:
        sampling = source.sampling
        eos = frozenset(info.eos_token_ids)
        return Request(
            source=source,
            block_tokens=info.block_tokens,
            root=chain_root(
                model=info.model,
                revision=info.revision,
                adapter=info.adapter,
                kv_format=info.kv_format,
                salt=source.cache_salt,
            ),
            stop_ids=sampling.stop_token_ids if sampling.ignore_eos else sampling.stop_token_ids | eos,
            early_stop_ids=sampling.stop_token_ids | eos,
            tokens=[*source.prompt, *source.output],
            output=list(source.output),
            credit_blocks=source.credit_blocks if source.kind is RequestKind.PREFILL else None,
            phase=Phase.HELD if source.held else Phase.WAITING,
            allowed_ids=AllowedIds(sampling.allowed_token_ids) if sampling.allowed_token_ids else None,
            bans=WordBans(sampling.bad_words) if sampling.bad_words else None,
            to_score=0 if sampling.prompt_logprobs is None else len(source.prompt) - 1,
        )

    def hash_blocks(self) -> None:
        """Compute the identities of all full blocks now, rather than when they are first asked for."""
        if len(self.tokens) >= self.block_tokens:
            self.hash_of(len(self.tokens) // self.block_tokens - 1)

    @property
    def request_id(self) -> str:
        return self.source.request_id

    @property
    def is_prefill(self) -> bool:
        return self.source.kind is RequestKind.PREFILL

    @property
    def outstanding_blocks(self) -> int:
        """Promised and not yet taken."""
        return max(0, self.promised_blocks - len(self.blocks))

    @property
    def missing_tokens(self) -> int:
        """Tokens to compute before the next one can be sampled."""
        return len(self.tokens) - self.computed_tokens

    @property
    def planned_tokens(self) -> int:
        """Leading tokens that are computed or in flight: the next step's part starts here."""
        return self.computed_tokens + self.flying_tokens

    @property
    def is_decoding(self) -> bool:
        return self.missing_tokens == 1 and not self.is_prefill

    @property
    def findable_tokens(self) -> int:
        """Leading tokens whose KV may be taken from a cache."""
        return len(self.tokens) if self.scored_tokens >= self.to_score else self.scored_tokens

    @property
    def only_scores(self) -> bool:
        """It ends with its prompt: nothing is sampled."""
        return self.to_score > 0 and self.source.sampling.max_tokens == 0 and not self.is_prefill

    def unscored_rows(self, start: int, end: int) -> range:
        """Of positions [start, end), those to score."""
        return range(max(start, self.scored_tokens), min(end, self.to_score))

    def take_scores(self, start: int, scoring: Scoring) -> tuple[TokenLogprob, ...]:
        """What a step from `start` on found, which is told now."""
        self.scored_tokens = start + scoring.skip + len(scoring.found)
        return scoring.found

    @property
    def computable_tokens(self) -> int:
        """Tokens that a step could compute now: those not planned yet, but no further than the credit."""
        return self._permitted_tokens - self.planned_tokens

    @property
    def is_stalled(self) -> bool:
        """Out of credit: it takes no part in steps until `grant`."""
        return self._permitted_tokens <= self.computed_tokens

    @property
    def can_run_ahead(self) -> bool:
        """Whether a chunk may be planned while the one before it is in flight.

        Not while a full block of it waits to be exchanged for an equal one (`KvRoom.index`): that needs it to land.
        """
        return not self.flights or self.indexed_blocks == self.computed_tokens // self.block_tokens

    @property
    def may_sample(self) -> bool:
        """Not before its grammar is compiled: then all but its last token can be computed."""
        return self.grammar is None or self.grammar.is_ready

    @property
    def grammar_failure(self) -> str:
        """Why no token can be sampled any more; empty: it can."""
        return "" if self.grammar is None else self.grammar.failure

    @property
    def _permitted_tokens(self) -> int:
        permitted = len(self.tokens) if self.may_sample else len(self.tokens) - 1
        if self.credit_blocks is None:
            return permitted
        return min(permitted, self.credit_blocks * self.block_tokens)

    @property
    def wanted_blocks(self) -> int:
        """Room it needs to be admitted: for what is missing and, where it will decode, for one token more."""
        return self.blocks_for(len(self.tokens) + (0 if self.is_prefill else 1))

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_tokens)

    def hash_of(self, number: int) -> BlockHash:
        """Identity of its block `number`, which must be full of tokens."""
        while len(self._chain) <= number:
            start = len(self._chain) * self.block_tokens
            parent = self._chain[-1] if self._chain else self.root
            self._chain.append(block_hash(parent, self.tokens[start : start + self.block_tokens]))
        return self._chain[number]

    def begin_flight(self, num_tokens: int) -> None:
        """A step computes its next `num_tokens` tokens."""
        self.flights += 1
        self.flying_tokens += num_tokens

    def end_flight(self, num_tokens: int) -> None:
        """The oldest of its steps is over, whatever came of it."""
        self.flights -= 1
        self.flying_tokens -= num_tokens

    def append(self, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            self.output.append(token_id)
            self.tokens.append(token_id)

    def finish_reason(self, limit_tokens: int) -> FinishReason | None:
        """Whether the output, as it is, ends the request."""
        if self.output and self.output[-1] in self.stop_ids:
            return FinishReason.STOP
        if len(self.output) >= self.source.sampling.max_tokens or len(self.tokens) >= limit_tokens:
            return FinishReason.LENGTH
        return None
