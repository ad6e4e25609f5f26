"""An explanation in words and tables, as page and terminal show it: what was decided, and what happened then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from antiphon_policy.routing import CostParts, RouteReason

from antiphon_gateway.explain import OutcomeState
from antiphon_gateway.explain_document import Attempt, AttemptOutcome, Explanation, Option

_REASONS = {
    RouteReason.PREFILL_REMOTE.value: "a prefill worker was the cheapest place for the prompt",
    RouteReason.LOCAL_CHEAPER.value: "there are prefill workers, but the decode worker itself was cheaper",
    RouteReason.LOCAL_NO_PREFILL_WORKER.value: "there was no prefill worker",
    RouteReason.ROUND_ROBIN.value: "it was their turn, as --routing round-robin wants it",
}


@dataclass(frozen=True, slots=True)
class Table:
    """Cells as text; the first `left` columns are names, the others figures."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: int


def summary(found: Explanation) -> str:
    """The request in a few sentences."""
    text = f"{found.path} for model {found.model}, arrived {found.arrived} at gateway {found.gateway}."
    if found.prepared_ms is not None:
        text += f" It was read and tokenised in {_ms(found.prepared_ms)}."
    if found.running:
        text += " It is still running."
    elif found.status is None:
        text += f" Its client went away after {_ms(found.took_ms)}."
    else:
        text += f" It was answered with status {found.status} after {_ms(found.took_ms)}."
    if found.error:
        text += f" Error: {found.error}"
    if not found.choices:
        text += " No worker was given it."
    if found.choices_left_out:
        text += f" {found.choices_left_out} more choices are not kept."
    return text


def decided(attempt: Attempt) -> str:
    """What was decided, and why."""
    made = attempt.decision
    where = f"{made.prefill} computes the prompt" if made.prefill else "which computes the prompt too"
    text = f"Decode on {made.decode}, {where}: {_REASONS.get(made.reason, made.reason)} ({made.reason})."
    text += f" The prompt has {attempt.prompt_tokens} tokens"
    if attempt.output_tokens:
        text += f", and {attempt.output_tokens} were generated before"
    text += f"; of {made.blocks} blocks that could be cached, {made.prefill or made.decode} held {made.cached_blocks}"
    text += f" and {made.decode} {made.cached_blocks_decode}." if made.prefill else "."
    if made.peers:
        pulled = ", ".join(f"{peer.worker} ({peer.blocks} blocks)" for peer in made.peers)
        text += f" What it lacked it had better pull from {pulled}."
    text += (
        f" Predicted: first token after {_ms(made.predicted_ttft_ms)}, one more every {_ms(made.predicted_tpot_ms)}."
    )
    if made.chosen is not None:
        text += f" Cost {_ms(made.chosen.cost_ms)}"
        if made.alternatives:
            other = made.alternatives[0]
            more_ms = other.cost_ms - made.chosen.cost_ms
            pair = f"{other.decode} with {other.prefill}" if other.prefill else other.decode
            text += f"; the next, {pair}, {_ms(abs(more_ms))} {'more' if more_ms >= 0 else 'less (a near tie)'}"
        text += "."
        if not made.chosen.keeps_sla:
            text += " No pair keeps the promised latency."
    if made.fallbacks:
        text += f" Should {made.prefill} not do it: {', '.join(made.fallbacks)}."
    if attempt.waited_ms >= 0.05:
        text += f" It had waited {_ms(attempt.waited_ms)} in the queue."
    return text


def happened(attempt: Attempt) -> str:
    """What came of it."""
    found = attempt.outcome
    worker = attempt.decision.decode
    if found.state is OutcomeState.SUBMITTED:
        return f"{worker} has not answered yet."
    if found.state is OutcomeState.REFUSED:
        return f"{worker} refused it after {_ms(found.ended_ms)}: {found.why}."
    text = f"{worker} accepted it after {_ms(found.accepted_ms)}." if found.accepted_ms is not None else ""
    if found.ttft_ms is not None:
        text += f" First token after {_ms(found.ttft_ms)}{_against(found.ttft_ms, attempt.decision.predicted_ttft_ms)}."
    if found.tpot_ms is not None:
        predicted_ms = attempt.decision.predicted_tpot_ms
        text += f" {found.tokens} tokens, one every {_ms(found.tpot_ms)}{_against(found.tpot_ms, predicted_ms)}."
    if found.cached_tokens is not None:
        text += (
            f" It says that {found.cached_tokens} prompt tokens were cached and {found.pulled_blocks} blocks pulled,"
        )
        text += f" and that {found.prefill_worker} computed the prompt."
    return f"{text} {_ending(found)}".strip()


def options(attempt: Attempt) -> Table:
    """What was chosen and what else there was, with the parts of the costs in ms, but for those that are 0."""
    made = attempt.decision
    priced = ([("chosen", made.chosen)] if made.chosen is not None else []) + [("", one) for one in made.alternatives]
    costs = [msgspec.structs.asdict(option.cost) for _, option in priced]
    parts = [name for name in CostParts.__struct_fields__ if any(cost[name] for cost in costs)]
    return Table(
        ["", "decode", "prefill", "cost", "TTFT", "TPOT", *(name.removesuffix("_ms") for name in parts), "SLA"],
        [_option_row(mark, option, parts) for mark, option in priced],
        3,
    )


def workers(attempt: Attempt) -> Table:
    """What the gateway knew of the workers that the decision names."""
    made = attempt.decision
    named = {made.decode, made.prefill, *made.fallbacks, *(peer.worker for peer in made.peers)}
    named |= {option.decode for option in made.alternatives} | {option.prefill for option in made.alternatives}
    leading = attempt.inputs.leading
    return Table(
        ["worker", "role", "queued tokens", "running", "KV tokens", "free blocks", "of", "holds", "step, ms"],
        [
            [
                view.worker_id,
                view.role.value,
                str(view.queued_tokens),
                str(view.running),
                str(view.kv_tokens),
                str(view.free_blocks),
                str(view.total_blocks),
                str(leading.get(view.worker_id, 0)),
                f"{view.step.base_ms:.3g} + {view.step.per_new_token_ms:.3g}/token",
            ]
            for view in attempt.inputs.workers
            if view.worker_id in named
        ],
        2,
    )


def _option_row(mark: str, option: Option, parts: Sequence[str]) -> list[str]:
    costs = msgspec.structs.asdict(option.cost)
    figures = [option.cost_ms, option.ttft_ms, option.tpot_ms, *(costs[name] for name in parts)]
    keeps = "kept" if option.keeps_sla else "broken"
    return [mark, option.decode, option.prefill or "itself", *(f"{figure:.1f}" for figure in figures), keeps]


def _ending(found: AttemptOutcome) -> str:
    match found.state:
        case OutcomeState.ACCEPTED:
            return "It runs."
        case OutcomeState.FINISHED:
            return f"It ended ({found.finish}) after {_ms(found.ended_ms)}."
        case OutcomeState.FAILED:
            return f"It failed after {_ms(found.ended_ms)} and {found.tokens} tokens: {found.why}."
        case OutcomeState.MOVED:
            return f"It gave it back after {_ms(found.ended_ms)} and {found.tokens} tokens: {found.why}."
        case OutcomeState.STALLED:
            return f"Nothing came for too long; given up after {_ms(found.ended_ms)} and {found.tokens} tokens."
        case _:
            return f"It was withdrawn after {_ms(found.ended_ms)} and {found.tokens} tokens."


def _against(measured_ms: float, predicted_ms: float) -> str:
    if predicted_ms <= 0:
        return ""
    return f" (predicted {_ms(predicted_ms)}, {(measured_ms - predicted_ms) / predicted_ms * 100:+.0f} %)"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} ms"
