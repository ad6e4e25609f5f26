"""The same records on the trace span of the request, small enough for OpenTelemetry's usual limits.

Each submission is an event with the decision; the span itself gets what the first choice came to. Names of workers and
texts are cut, lists are short, so that no collector has to drop any of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from antiphon_policy.routing import RouteOption

from antiphon_gateway.explain import RouteRecord, word

_MOST_CHARACTERS = 1024

Attributes = Mapping[str, str | int | float | Sequence[str]]


def submission_attributes(record: RouteRecord) -> Attributes:
    """Of the event `submitted`: what was decided and what else there was."""
    decision = record.decision
    attributes: dict[str, str | int | float | Sequence[str]] = {
        "choice": record.choice,
        "attempt": record.number,
        "revision": record.revision,
        "decode": decision.decode,
        "prefill": decision.prefill or "",
        "reason": decision.reason.value,
        "predicted_ttft_ms": decision.predicted_ttft_ms,
        "predicted_tpot_ms": decision.predicted_tpot_ms,
        "keeps_sla": decision.keeps_sla,
        "waited_ms": round((record.submitted_at - record.waiting_since) * 1e3, 3),
        "prompt_tokens": record.inputs.request.prompt_tokens,
        "blocks": decision.usable_blocks,
        "cached_blocks": decision.prefill_blocks,
        "fallbacks": [word(name) for name in decision.prefill_fallbacks],
        "peers": [f"{word(name)}={blocks}" for name, blocks in decision.prefix_peers],
        "alternatives": [_option(option) for option in decision.alternatives],
        "explanation": decision.explanation[:_MOST_CHARACTERS],
    }
    if decision.cost is not None:
        attributes["cost_ms"] = decision.cost.total_ms
    return attributes


def request_attributes(record: RouteRecord) -> Attributes:
    """Of the request's span, at its end: where it went at last, and how good the prediction was."""
    outcome = record.outcome
    attributes: dict[str, str | int | float | Sequence[str]] = {
        "antiphon.route": record.header().decode(),
        "antiphon.outcome": outcome.state.value,
    }
    if outcome.first_token_at:
        measured_ms = (outcome.first_token_at - record.submitted_at) * 1e3
        attributes["antiphon.ttft_ms"] = round(measured_ms, 3)
        attributes["antiphon.ttft_error_ms"] = round(record.decision.predicted_ttft_ms - measured_ms, 3)
    return attributes


def _option(option: RouteOption) -> str:
    return f"decode={word(option.decode)};prefill={word(option.prefill or '-')};cost-ms={option.cost_ms:.1f}"
