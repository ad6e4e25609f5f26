"""The upper bound: what the same workers would do with one central queue, one shared cache and free transfers.

    policy      places each request on workers that have queues, caches and links of their own
    the bound   one queue of all prompts, the earliest deadline first; those that cannot be in time any more last
                chunk by chunk: each chunk runs wherever a worker is free, on one that decodes too if its answers allow
                one cache, unlimited, that all workers share; what one has computed all have at once
                nothing is moved; an answer goes where it will be complete first, when that makes no other late
                every length and every service time is known, and workers have room for everything

Its steps take what the model says, with the workers' own speeds, chunks and batch limit, and tokens reach the client as
late as from the simulator's workers, so its `RunResult` has the same figures as `simulate`'s.

In what sense it bounds. Everything that tells routings apart is taken away: where a prompt queues, which worker has its
prefix, what evicts it, what moves, what is not known. So the tokens it computes are the least possible (none of a
shared block twice), and no prefill worker idles while a prompt could run. It is looser than what routing could reach:
it also decides what no router does, chunk by chunk, namely who is next on a worker that has begun another prompt, and
how much of a prompt goes into a step beside answers. In what sense it does not bound: it is a schedule,
not a proof. Steps are not preempted; earliest deadline first is optimal for one worker and good, not optimal, for
many; it gives up requests only when they are late already, where a clairvoyant would give up the dearest first; it
packs steps and starts answers greedily. A policy could beat it by a little, and then it is reported so.

Answers. Just as late prompts wait behind others, an answer waits where it would make those too late that are in time
now; one that is late itself goes behind them. Without that, at overload all answers would be a little too late. How
long a chunk may keep answers waiting that come while it is computed is tried two ways, as long as it takes, and (where
anybody was late) at most the time that a token may take; the result is that of the two with fewer late requests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from antiphon_simulate.bound_schedule import NAME, BoundSchedule
from antiphon_simulate.ideal import infeasible
from antiphon_simulate.records import ClusterShape, Ending, Outcome, RunResult, Sla, Timing, TraceRequest
from antiphon_simulate.traces import BLOCK_TOKENS


class UpperBound:
    """A whole schedule, not a policy: `simulate` lets it run by itself."""

    name = NAME

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
        hopeless = infeasible(requests, timing, sla)

        def run(longest_ms: float) -> tuple[int, RunResult]:
            schedule = BoundSchedule(
                requests, shape, timing, sla, longest_ms=longest_ms, window_ms=window_ms, block_tokens=block_tokens
            )
            result = schedule.run(until_ms)
            feasible = (outcome for outcome in result.outcomes if outcome.request.index not in hopeless)
            return sum(not _is_inside(outcome, sla) for outcome in feasible), result

        late, result = run(math.inf)
        if not late:
            return result
        late_otherwise, other = run(sla.tpot_ms)
        return other if late_otherwise < late else result


def _is_inside(outcome: Outcome, sla: Sla) -> bool:
    return (
        outcome.ending is Ending.COMPLETE
        and outcome.ttft_ms <= sla.ttft_limit_ms(outcome.request.prompt_tokens)
        and outcome.tpot_ms <= sla.tpot_ms
    )
