"""What a worker is told of one choice that it is to serve."""

from __future__ import annotations

from collections.abc import Sequence

from antiphon_proto import worker_pb2 as pb

from antiphon_gateway.fleet import Fleet
from antiphon_gateway.flight import Choice
from antiphon_gateway.placing import Plan

TELL_EVERY_MS = 250
"""How far apart a worker tells what it generates for an answer that is sent whole. Less than it takes to notice that a
worker is lost, so that little more is generated again."""


def submission(choice: Choice, plan: Plan, fleet: Fleet) -> pb.Submit:
    """The message, without `ref` and without the ids of a prompt that is encoded already."""
    decision, ticket = plan.decision, choice.flight.ticket
    submit = pb.Submit(request_id=f"{ticket.request_id}-{choice.index}.{choice.submits}", sampling=choice.sampling)
    if not choice.prompt.encoded:
        submit.prompt_token_ids.extend(choice.prompt.token_ids)
    submit.cache_salt = choice.flight.target.salt
    submit.traceparent = ticket.traceparent
    if choice.told_together:
        submit.tell_every_ms = TELL_EVERY_MS
    # Most have none of these, and an empty list costs as much to give as a short one.
    if choice.output:
        submit.output_token_ids.extend(choice.output)
        if choice.held_logprobs:
            submit.held_logprobs.extend(choice.held_logprobs)
    if choice.prompt_logprobs is not None:
        choice.score_again(submit.sampling)
    if decision.prefill is not None:
        for name in (decision.prefill, *decision.prefill_fallbacks):
            if (peer := fleet.peer(name)) is not None:
                submit.prefill.append(peer)
    for name, blocks in _prefix_peers(choice, plan, fleet):
        if (peer := fleet.peer(name)) is not None:
            submit.prefix_peers.add(peer=peer, blocks=blocks)
    return submit


def _prefix_peers(choice: Choice, plan: Plan, fleet: Fleet) -> Sequence[tuple[str, int]]:
    """Whom to pull from, best first. A worker that gave the answer back comes first while it stands: routing asks
    nothing of one that drains, but this one waits a moment for just that (docs/disaggregation.md)."""
    decision, giver = plan.decision, choice.moved_from
    if not giver or giver == decision.decode or fleet.worker(giver) is None:
        return decision.prefix_peers
    if choice.output:
        # All but the last token, which nobody has computed yet; the index is a moment behind.
        blocks = (plan.inputs.request.prompt_tokens - 1) // plan.inputs.request.block_tokens
    else:
        blocks = plan.inputs.leading.get(giver, 0)
    others = [peer for peer in decision.prefix_peers if peer[0] != giver]
    return [(giver, blocks), *others] if blocks > decision.decode_blocks else others
