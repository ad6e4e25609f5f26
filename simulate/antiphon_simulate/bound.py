"""The upper bounds: what the same workers would do with one central queue, one shared cache and free transfers.

    policy          places each request on workers that have queues, caches and links of their own
    bound           one queue of all prompts, the earliest deadline that can be met first
                    one cache, unlimited, that all workers share; what one has computed all have at once
                    nothing is moved; an answer goes where it will be complete first, when that makes no other late
                    every length and every service time is known, and workers have room for everything
                    the engines are the same: a prompt stays where it began, in the engine's own chunks
    bound_chunked   the same, and the engines obey too: each chunk of a prompt runs wherever a worker is free, gives
                    way to more urgent prompts, and beside answers is as long as their promises allow

Steps take what the model says, with the workers' own speeds and batch limit, and tokens reach the client as late as
from the simulator's workers, so a `RunResult` has the same figures as `simulate`'s.

In what sense `bound` bounds. Everything that tells routings apart is taken away: where a prompt queues, which worker
has its prefix, what evicts it, what moves, what is not known. What is left is what the engines take. So the tokens it
computes are the least possible (none of a shared block twice), and its goodput is what a router with perfect knowledge,
perfect caches and free links could hope for on these engines. `bound_chunked` is looser: no router reaches it.

In what sense it does not. Both are schedules, not proofs: the best of a few greedy ones, each of which is good and not
optimal for many workers. So a policy could beat one by a little, and then it is reported so. What they are the best of:
whether prompts run beside answers (where no answer gets late; never, with two pools; always, with one), and whether the
dearest of those that cannot all be in time are given up from the start (not in closed loops, where whoever gets no
answer asks nothing more: that would be less work, not better routing) or each is tried until it is late. For
`bound_chunked`: how long a chunk may keep answers waiting that come while it is computed. Those with fewer late
requests win.

Answers. Just as late prompts wait behind others, an answer waits where it would make those too late that are in time
now; one that is late itself goes behind them. Without that, at overload all answers would be a little too late.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from antiphon_simulate.bound_chunked import ChunkedSchedule
from antiphon_simulate.bound_requests import Manner, PromptsBesideAnswers, RequestSchedule
from antiphon_simulate.bound_schedule import BoundSchedule
from antiphon_simulate.ideal import infeasible
from antiphon_simulate.records import ClusterShape, Ending, Outcome, RunResult, Sla, Timing, TraceRequest
from antiphon_simulate.traces import BLOCK_TOKENS


class UpperBound:
    """A whole schedule, not a policy: `simulate` lets it run by itself."""

    name = RequestSchedule.name

    def run(
        self,
        requests: Sequence[TraceRequest],
        shape: ClusterShape,
        timing: Timing,
        sla: Sla,
        *,
        window_ms: float = 60_000.0,
        until_ms: float | None = None,
        block_tokens: int = BLOCK_TOKENS,
    ) -> RunResult:
        """As `simulate`: cut at `until_ms`, and what has not arrived by then has no outcome. Raises WorkloadError."""

        def schedule(manner: Manner) -> BoundSchedule:
            return RequestSchedule(
                requests, shape, timing, sla, manner=manner, window_ms=window_ms, block_tokens=block_tokens
            )

        manners = _manners(shape, is_closed_loop=any(request.after is not None for request in requests))
        return _best((schedule(manner) for manner in manners), until_ms, _is_late(requests, timing, sla))


class ChunkedUpperBound:
    """The looser one."""

    name = ChunkedSchedule.name

    def run(
        self,
        requests: Sequence[TraceRequest],
        shape: ClusterShape,
        timing: Timing,
        sla: Sla,
        *,
        window_ms: float = 60_000.0,
        until_ms: float | None = None,
        block_tokens: int = BLOCK_TOKENS,
    ) -> RunResult:
        """As `UpperBound`."""

        def schedule(longest_ms: float) -> BoundSchedule:
            return ChunkedSchedule(
                requests, shape, timing, sla, longest_ms=longest_ms, window_ms=window_ms, block_tokens=block_tokens
            )

        return _best(map(schedule, (math.inf, sla.tpot_ms)), until_ms, _is_late(requests, timing, sla))


def _manners(shape: ClusterShape, *, is_closed_loop: bool) -> Iterator[Manner]:
    """What mostly is the best first."""
    other = PromptsBesideAnswers.NEVER if shape.decode else PromptsBesideAnswers.ALWAYS
    yield Manner(PromptsBesideAnswers.HARMLESS, gives_up=False)
    if not is_closed_loop:
        yield Manner(PromptsBesideAnswers.HARMLESS, gives_up=True)
    yield Manner(other, gives_up=not is_closed_loop)


def _best(schedules: Iterator[BoundSchedule], until_ms: float | None, is_late: Callable[[Outcome], bool]) -> RunResult:
    """Of those with the fewest late requests the first. No more are tried than until nobody is late."""
    best: tuple[int, RunResult] | None = None
    for schedule in schedules:
        result = schedule.run(until_ms)
        late = sum(map(is_late, result.outcomes))
        if best is None or late < best[0]:
            best = late, result
        if not late:
            break
    assert best is not None
    return best[1]


def _is_late(requests: Sequence[TraceRequest], timing: Timing, sla: Sla) -> Callable[[Outcome], bool]:
    """Of the feasible ones."""
    hopeless = infeasible(requests, timing, sla)

    def is_late(outcome: Outcome) -> bool:
        return outcome.request.index not in hopeless and not (
            outcome.ending is Ending.COMPLETE
            and outcome.ttft_ms <= sla.ttft_limit_ms(outcome.request.prompt_tokens)
            and outcome.tpot_ms <= sla.tpot_ms
        )

    return is_late
