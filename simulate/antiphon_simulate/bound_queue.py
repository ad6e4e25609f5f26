"""The one waiting line of the upper bound (`bound.py`), and the one cache behind it.

Prompts wait in the order of their deadlines; those that can no longer be answered in time, even alone on the fastest
worker, wait behind all others. Whoever is free takes the first one's next chunk. Since cache and transfers are free,
the next chunk of a prompt may go to any worker, and what counts as computed is a property of a block, not of a request:
two requests with the same prefix go on where either of them is.

A block that is being computed is not computed by anybody else meanwhile: whoever needs it waits for it, and others go
first. So no token of a shared block is ever computed twice. A prompt that is cached whole still computes its last
token, as engines do, for its logits.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from antiphon_policy.latency import StepModel

from antiphon_simulate.records import Outcome, TraceRequest

_CLOSE_MS = 1e-6
"""Two sums of the same steps differ by less."""


@dataclass(slots=True, eq=False)
class Prompt:
    """One request while its prompt is not computed."""

    request: TraceRequest
    outcome: Outcome
    deadline_ms: float
    """Of its first token."""
    own_tokens: int
    """Still to compute after its last block: tokens that no block id stands for."""
    blocks_done: int = 0
    """Leading blocks known to be computed."""
    has_started: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Tokens of one prompt in one step."""

    prompt: Prompt
    tokens: int
    end_tokens: int
    """Of the prompt, computed or cached, when the step ends: the context of the tokens, as `StepModel` counts it."""
    blocks: tuple[tuple[int, int], ...]
    """(block, tokens of it that are there when the step ends)."""
    own_tokens: int
    is_last: bool
    """The step gives the first token of the answer."""


class CentralQueue:
    """See the module's docstring. `take`, then `done` when the step has ended (or `put_back` if it is not run)."""

    def __init__(self, step: StepModel, *, chunk_tokens: int, block_tokens: int) -> None:
        self._step = step
        """Of the fastest worker."""
        self._chunk_tokens = chunk_tokens
        self._block_tokens = block_tokens
        self._in_time: list[tuple[float, int, Prompt]] = []
        self._late: list[tuple[float, int, Prompt]] = []
        self._computed: dict[int, int] = {}
        """Block -> its tokens that are computed, the first ones."""
        self._running: dict[int, list[Prompt]] = {}
        """Block that a step is computing -> who waits for it."""
        self._waiting = 0

    @property
    def is_waiting(self) -> bool:
        """Somebody is in the line, or waits for a block that a step is computing."""
        return self._waiting > 0

    def new_prompt(self, request: TraceRequest, outcome: Outcome, deadline_ms: float) -> None:
        own_tokens = max(0, request.prompt_tokens - len(request.blocks) * self._block_tokens)
        self._wait(Prompt(request, outcome, deadline_ms, own_tokens))

    def take(self, now_ms: float, budget_tokens: int) -> Part | None:
        """The next chunk that may run, of at most so many tokens. None: nothing waits that could."""
        while (prompt := self._first(now_ms)) is not None:
            blocks = prompt.request.blocks
            if prompt.blocks_done < len(blocks) and blocks[prompt.blocks_done] in self._running:
                self._running[blocks[prompt.blocks_done]].append(prompt)
            else:
                self._waiting -= 1
                return self._cut(prompt, budget_tokens)
        return None

    def put_back(self, part: Part) -> None:
        """It was not run after all."""
        self._stop(part)
        self._wait(part.prompt)

    def done(self, part: Part) -> None:
        """The step has ended: what it computed is there for all."""
        self._computed.update(part.blocks)
        part.prompt.own_tokens -= part.own_tokens
        self._stop(part)
        if not part.is_last:
            self._wait(part.prompt)

    # -- inside

    def _wait(self, prompt: Prompt) -> None:
        self._waiting += 1
        heapq.heappush(self._in_time, (prompt.deadline_ms, prompt.request.index, prompt))

    def _first(self, now_ms: float) -> Prompt | None:
        """Leaves the line."""
        while self._in_time:
            entry = heapq.heappop(self._in_time)
            prompt = entry[2]
            there = self._tokens_there(prompt)
            alone_ms = self._step.prefill_ms(
                new_tokens=max(1, prompt.request.prompt_tokens - there),
                cached_tokens=min(there, prompt.request.prompt_tokens - 1),
                chunk_tokens=self._chunk_tokens,
            )
            if now_ms + alone_ms <= prompt.deadline_ms + _CLOSE_MS:
                return prompt
            heapq.heappush(self._late, entry)
        if not self._late:
            return None
        prompt = heapq.heappop(self._late)[2]
        self._tokens_there(prompt)
        return prompt

    def _tokens_there(self, prompt: Prompt) -> int:
        """Of the prompt, from its first token on. Brings `blocks_done` up to date."""
        blocks, computed = prompt.request.blocks, self._computed
        at = prompt.blocks_done
        while at < len(blocks) and computed.get(blocks[at], 0) >= self._size(prompt.request, at):
            at += 1
        prompt.blocks_done = at
        if at < len(blocks):
            return at * self._block_tokens + computed.get(blocks[at], 0)
        return prompt.request.prompt_tokens - prompt.own_tokens

    def _size(self, request: TraceRequest, at: int) -> int:
        """Tokens of its block there: the last may be partial."""
        return min(self._block_tokens, request.prompt_tokens - at * self._block_tokens)

    def _cut(self, prompt: Prompt, budget_tokens: int) -> Part:
        request = prompt.request
        start = self._tokens_there(prompt)
        if start == request.prompt_tokens:
            return Part(prompt, 1, start, (), 0, is_last=True)
        tokens, at = 0, prompt.blocks_done
        blocks: list[tuple[int, int]] = []
        while tokens < budget_tokens and at < len(request.blocks):
            block, size = request.blocks[at], self._size(request, at)
            have = self._computed.get(block, 0)
            new = min(size - have, budget_tokens - tokens)
            blocks.append((block, have + new))
            self._running[block] = []
            tokens += new
            at += 1
        own_tokens = min(prompt.own_tokens, budget_tokens - tokens)
        tokens += own_tokens
        end = start + tokens
        return Part(prompt, tokens, end, tuple(blocks), own_tokens, is_last=end == request.prompt_tokens)

    def _stop(self, part: Part) -> None:
        for block, _ in part.blocks:
            for prompt in self._running.pop(block):
                self._waiting -= 1
                self._wait(prompt)
