"""The one waiting line of the upper bounds (`bound.py`), and the one cache behind it.

Prompts wait in the order of their deadlines; those that can no longer be answered in time, even alone on the fastest
worker, wait behind all others. Since cache and transfers are free, any worker may go on where another one was, and what
counts as computed is a property of a block, not of a request: two requests with the same prefix go on where either is.

A block that is being computed is not computed by anybody else meanwhile: whoever needs it waits for it, and others go
first. So no token of a shared block is ever computed twice. A prompt that is cached whole still computes its last
token, as engines do, for its logits.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from antiphon_policy.latency import StepModel

from antiphon_simulate.records import Outcome, TraceRequest

CLOSE_MS = 1e-6
"""Two sums of the same steps differ by less."""
_MOST_LOOKED_AT = 16
"""Of the line, for a worker that cannot take everything."""


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
    is_late: bool = False
    """When it last was looked at, it could not be in time any more, or was given up."""
    is_given_up: bool = False
    """It is late for good."""

    def __lt__(self, other: Prompt) -> bool:
        return (self.deadline_ms, self.request.index) < (other.deadline_ms, other.request.index)


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
    """See the module's docstring. `take`, then `done` when the step has ended (or `put_back` if it is not run). Then
    either `wait`, and somebody takes the rest, or `resume`."""

    def __init__(self, kinds: Iterable[tuple[StepModel, int]], *, block_tokens: int) -> None:
        """`kinds`: of workers, (step, chunk tokens) of each."""
        self._kinds = frozenset(kinds)
        self._block_tokens = block_tokens
        self._in_time: list[Prompt] = []
        """Sorted."""
        self._late: list[Prompt] = []
        """A heap."""
        self._computed: dict[int, int] = {}
        """Block -> its tokens that are computed, the first ones."""
        self._running: dict[int, list[Prompt]] = {}
        """Block that a step is computing -> who waits for it."""
        self._waiting = 0

    @property
    def is_waiting(self) -> bool:
        """Somebody is in the line, or waits for a block that a step is computing."""
        return self._waiting > 0

    @property
    def has_in_time(self) -> bool:
        """Somebody is in the line who was not late when last looked at."""
        return bool(self._in_time)

    def new_prompt(self, request: TraceRequest, outcome: Outcome, deadline_ms: float) -> None:
        own_tokens = max(0, request.prompt_tokens - len(request.blocks) * self._block_tokens)
        self.wait(Prompt(request, outcome, deadline_ms, own_tokens))

    def wait(self, prompt: Prompt) -> None:
        """Into the line."""
        self._waiting += 1
        prompt.is_late = prompt.is_given_up
        if prompt.is_late:
            heapq.heappush(self._late, prompt)
        else:
            insort(self._in_time, prompt)

    def take(
        self,
        now_ms: float,
        budget_tokens: int,
        *,
        fits: Callable[[Prompt], bool] | None = None,
        late: bool = True,
    ) -> Part | None:
        """The next chunk that may run, of at most so many tokens, of a prompt that `fits`: of one in time, or, with
        `late`, of a late one if there is none. None: nothing waits that could run."""
        at = looked = 0
        line = self._in_time
        while at < len(line) and looked < _MOST_LOOKED_AT:
            prompt = line[at]
            if now_ms + self._alone_ms(prompt, self.tokens_there(prompt)) > prompt.deadline_ms + CLOSE_MS:
                prompt.is_late = True
                heapq.heappush(self._late, line.pop(at))
            elif self._is_running(prompt):
                self._wait_for_block(line.pop(at))
            elif fits is None or fits(prompt):
                self._waiting -= 1
                return self._cut(line.pop(at), budget_tokens)
            else:
                at, looked = at + 1, looked + 1
        while late and self._late:
            prompt = self._late[0]
            self.tokens_there(prompt)
            if self._is_running(prompt):
                self._wait_for_block(heapq.heappop(self._late))
            elif fits is None or fits(prompt):
                self._waiting -= 1
                return self._cut(heapq.heappop(self._late), budget_tokens)
            else:
                break
        return None

    def resume(self, prompt: Prompt, budget_tokens: int) -> Part | None:
        """The next chunk of a prompt that is not in the line. None: a block that it needs is being computed."""
        self.tokens_there(prompt)
        return None if self._is_running(prompt) else self._cut(prompt, budget_tokens)

    def put_back(self, part: Part) -> None:
        """It was not run after all."""
        self._stop(part)
        self.wait(part.prompt)

    def done(self, part: Part) -> None:
        """The step has ended: what it computed is there for all."""
        self._computed.update(part.blocks)
        part.prompt.own_tokens -= part.own_tokens
        self._stop(part)

    def give_up_dearest(self, free: Sequence[tuple[float, float]]) -> None:
        """Where not all can be in time even if their work could be divided among the workers at will: the longest of
        them wait among the late ones from now on, until the others can be (Moore's rule for one machine). `free`: from
        when on each worker is, and its speed, the fastest one's being 1."""
        taken: list[tuple[float, int, Prompt]] = []
        counted: set[int] = set()
        work_ms = 0.0
        for prompt in self._in_time:
            alone_ms = self._alone_ms(prompt, self._tokens_there_after(prompt, counted))
            heapq.heappush(taken, (-alone_ms, prompt.request.index, prompt))
            work_ms += alone_ms
            if work_ms > sum(speed * max(0.0, prompt.deadline_ms - free_ms) for free_ms, speed in free):
                less_ms, _, dearest = heapq.heappop(taken)
                work_ms += less_ms
                dearest.is_given_up = True
        if any(prompt.is_given_up for prompt in self._in_time):
            for prompt in self._in_time:
                if prompt.is_given_up:
                    prompt.is_late = True
                    heapq.heappush(self._late, prompt)
            self._in_time = [prompt for prompt in self._in_time if not prompt.is_given_up]

    def tokens_there(self, prompt: Prompt) -> int:
        """Of the prompt, from its first token on. Brings `blocks_done` up to date."""
        blocks, computed = prompt.request.blocks, self._computed
        at = prompt.blocks_done
        while at < len(blocks) and computed.get(blocks[at], 0) >= self._size(prompt.request, at):
            at += 1
        prompt.blocks_done = at
        if at < len(blocks):
            return at * self._block_tokens + computed.get(blocks[at], 0)
        return prompt.request.prompt_tokens - prompt.own_tokens

    # -- inside

    def _alone_ms(self, prompt: Prompt, there: int) -> float:
        prompt_tokens = prompt.request.prompt_tokens
        there = min(there, prompt_tokens - 1)
        return min(
            step.prefill_ms(new_tokens=prompt_tokens - there, cached_tokens=there, chunk_tokens=chunk_tokens)
            for step, chunk_tokens in self._kinds
        )

    def _tokens_there_after(self, prompt: Prompt, counted: set[int]) -> int:
        """When also the blocks in `counted` are computed, to which its own are added."""
        there, blocks = self.tokens_there(prompt), prompt.request.blocks
        at = prompt.blocks_done
        while at < len(blocks) and blocks[at] in counted:
            at += 1
        counted.update(blocks[at:])
        return max(there, min(at * self._block_tokens, prompt.request.prompt_tokens))

    def _is_running(self, prompt: Prompt) -> bool:
        """The next block that it needs is being computed."""
        blocks = prompt.request.blocks
        return prompt.blocks_done < len(blocks) and blocks[prompt.blocks_done] in self._running

    def _wait_for_block(self, prompt: Prompt) -> None:
        self._running[prompt.request.blocks[prompt.blocks_done]].append(prompt)

    def _size(self, request: TraceRequest, at: int) -> int:
        """Tokens of its block there: the last may be partial."""
        return min(self._block_tokens, request.prompt_tokens - at * self._block_tokens)

    def _cut(self, prompt: Prompt, budget_tokens: int) -> Part:
        request = prompt.request
        start = self.tokens_there(prompt)
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
                self.wait(prompt)
