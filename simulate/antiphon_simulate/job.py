"""A placed request on its way through the workers. The workers it is placed on change it; nobody else does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon_simulate.pool import Holding
from antiphon_simulate.records import Outcome, Placement

if TYPE_CHECKING:
    from antiphon_simulate.worker import Worker


class Job:
    __slots__ = (
        "answer_blocks",
        "answer_on",
        "answer_room",
        "chain",
        "computed_to",
        "counted_tokens",
        "gateway",
        "kv_ready_ms",
        "outcome",
        "output_tokens",
        "placement",
        "prompt_blocks",
        "prompt_on",
        "prompt_room",
        "prompt_tokens",
        "pull_from",
        "pulling",
        "sent_blocks",
        "waits_for_room",
    )

    def __init__(
        self,
        outcome: Outcome,
        placement: Placement,
        *,
        block_tokens: int,
        prompt_on: Worker,
        answer_on: Worker,
        pull_from: Worker | None,
        gateway: int = 0,
    ) -> None:
        request = outcome.request
        self.outcome = outcome
        self.placement = placement
        self.gateway = gateway
        """The number of the one that sent it."""
        self.prompt_on = prompt_on
        self.answer_on = answer_on
        self.pull_from = pull_from
        self.prompt_tokens = request.prompt_tokens
        self.output_tokens = max(1, request.output_tokens)
        self.chain = request.blocks[: request.prompt_tokens // block_tokens]
        """Full blocks only: a partial one is never shared."""
        self.prompt_blocks = -(-request.prompt_tokens // block_tokens)
        self.answer_blocks = blocks_needed(request.prompt_tokens, request.output_tokens, block_tokens)
        """Of prompt and answer together."""

        self.prompt_room: Holding | None = None
        """On the worker that computes the prompt, from its first chunk on."""
        self.answer_room: Holding | None = None
        """On the decode worker; where that computes the prompt too, the same one."""
        self.computed_to = 0
        """Prompt tokens that need no more computing."""
        self.counted_tokens = 0
        """Prompt tokens that the worker counts as queued for it."""
        self.pulling = False
        """Its prefix is on the way from a peer."""
        self.waits_for_room = False
        self.sent_blocks = 0
        """Leading blocks that the decode worker has or that are on their way to it."""
        self.kv_ready_ms = 0.0
        """When what was sent so far will have arrived."""

    @property
    def is_local(self) -> bool:
        return self.prompt_on is self.answer_on


def blocks_needed(prompt_tokens: int, output_tokens: int, block_tokens: int) -> int:
    """Blocks of a prompt with its answer."""
    return -(-(prompt_tokens + max(1, output_tokens)) // block_tokens)
