"""Between protocol messages and the engine's records."""

from __future__ import annotations

from antiphon_engine.interface import (
    FinishReason,
    Grammar,
    GrammarKind,
    RefusalReason,
    RequestRefused,
    Sampling,
    TokenLogprob,
)
from antiphon_kvtransfer.links import PeerAddress
from antiphon_proto import worker_pb2 as wire

_REFUSALS: dict[RefusalReason, wire.RefusalReason.ValueType] = {
    RefusalReason.CAPACITY: wire.RefusalReason.REFUSAL_CAPACITY,
    RefusalReason.DRAINING: wire.RefusalReason.REFUSAL_DRAINING,
    RefusalReason.INVALID: wire.RefusalReason.REFUSAL_INVALID,
}

_FINISHES: dict[FinishReason, wire.Finish.ValueType] = {
    FinishReason.STOP: wire.Finish.FINISH_STOP,
    FinishReason.LENGTH: wire.Finish.FINISH_LENGTH,
    FinishReason.ERROR: wire.Finish.FINISH_ERROR,
}

_GRAMMARS: dict[wire.GrammarKind.ValueType, GrammarKind] = {
    wire.GrammarKind.GRAMMAR_JSON_SCHEMA: GrammarKind.JSON_SCHEMA,
    wire.GrammarKind.GRAMMAR_JSON_OBJECT: GrammarKind.JSON_OBJECT,
    wire.GrammarKind.GRAMMAR_REGEX: GrammarKind.REGEX,
    wire.GrammarKind.GRAMMAR_CHOICE: GrammarKind.CHOICE,
    wire.GrammarKind.GRAMMAR_LARK: GrammarKind.LARK,
}


def engine_sampling(message: wire.Sampling) -> Sampling:
    """How the engine is to choose tokens. Zero stands for 'off' where the protocol's default must mean that.

    Raises RequestRefused for a grammar that this worker cannot know.
    """
    return Sampling(
        temperature=message.temperature,
        top_p=message.top_p or 1.0,
        top_k=message.top_k,
        min_p=message.min_p,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        repetition_penalty=message.repetition_penalty or 1.0,
        logit_bias=dict(message.logit_bias),
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        seed=message.seed,
        choice=message.choice,
        max_tokens=message.max_tokens,
        min_tokens=message.min_tokens,
        stop_token_ids=frozenset(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        grammar=engine_grammar(message.grammar) if message.HasField("grammar") else None,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        allowed_token_ids=tuple(message.allowed_token_ids),
        bad_words=tuple(tuple(word.ids) for word in message.bad_words),
    )


def engine_grammar(message: wire.Grammar) -> Grammar:
    """Raises RequestRefused for a kind that this worker does not know."""
    kind = _GRAMMARS.get(message.kind)
    if kind is None:
        raise RequestRefused(
            RefusalReason.INVALID, f"the worker knows no grammar of kind {message.kind}: it is older than its gateway"
        )
    opening = message.opening_token_id if message.HasField("opening_token_id") else None
    return Grammar(kind, message.text, tuple(message.after_token_ids), opening)


def wire_refusal(reason: RefusalReason) -> wire.RefusalReason.ValueType:
    return _REFUSALS[reason]


def wire_finish(reason: FinishReason | None) -> wire.Finish.ValueType:
    return wire.Finish.FINISH_NONE if reason is None else _FINISHES[reason]


def wire_logprob(logprob: TokenLogprob) -> wire.TokenLogprob:
    return wire.TokenLogprob(
        token_id=logprob.token_id,
        logprob=logprob.logprob,
        top_ids=[token_id for token_id, _ in logprob.top],
        top_logprobs=[value for _, value in logprob.top],
        rank=logprob.rank,
    )


def engine_logprob(message: wire.TokenLogprob) -> TokenLogprob:
    return TokenLogprob(
        token_id=message.token_id,
        logprob=message.logprob,
        top=tuple(zip(message.top_ids, message.top_logprobs, strict=True)),
        rank=message.rank,
    )


def peer_address(peer: wire.Peer) -> PeerAddress:
    return PeerAddress(worker_id=peer.worker_id, incarnation=peer.incarnation, address=peer.address)
