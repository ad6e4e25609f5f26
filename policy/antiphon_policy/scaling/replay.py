"""The last window at other sizes: which share of its requests would have been late, and the fewest workers that keep
the percentile.

A prefill pool is judged by first tokens (`prompts`), a decode pool by those after it (`answers`), a pool of both by
both: there, a prompt's chunks take longer by the answers in the same steps, and tokens by the chunks.

More workers are taken never to be worse: the search looks for the border between the sizes that fall short and those
that suffice, starting from a guess; what it returns kept the percentile, and the size below it did not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from antiphon_policy.route_records import WorkerRole
from antiphon_policy.scaling.answers import Prompting, crowd_of, late_answers, mean_sequences, streams_of
from antiphon_policy.scaling.prompts import PromptRun, line_of, run_prompts
from antiphon_policy.scaling.records import PoolView, Promise
from antiphon_policy.scaling.work import Window, decode_ms

UNPROMISED = 0.95
"""The percentile where only the other latency is promised."""

_ROUNDING = 1e-9
INFINITE = float("inf")


SURELY = 0.75
"""Of the requests that may be late, the part that may be late where workers are to go."""


@dataclass(frozen=True, slots=True)
class Late:
    """Weights of late requests, counted until there were more than `most` times as many as may be (`is_cut`)."""

    ttft: float
    tpot: float
    most: float
    is_cut: bool


class Replay:
    """One window on one pool, at any number of workers."""

    def __init__(self, window: Window, pool: PoolView, promise: Promise) -> None:
        self._window = window
        self._pool = pool
        self._promise = promise
        self._prompts = pool.role is not WorkerRole.DECODE
        self._answers = pool.role is not WorkerRole.PREFILL
        typical_ms = promise.tpot.limit_ms if promise.tpot else decode_ms(pool.step, 1.0, 0.0)
        self._streams = streams_of(window, typical_ms) if self._answers else []
        self._crowd = crowd_of(self._streams, promise.tpot.limit_ms) if promise.tpot and not self._prompts else None
        self._line = line_of(window) if self._prompts else None
        self._feasible = sum([one.weight for one in window.work if one.feasible])
        self._answering = sum([one.weight for one in window.work if one.feasible and one.tokens > 0])
        ttft, tpot = promise.ttft, promise.tpot
        self._may_ttft = (1.0 - (ttft.percentile if ttft else UNPROMISED)) * self._feasible
        self._may_tpot = (1.0 - (tpot.percentile if tpot else UNPROMISED)) * self._answering
        self._found: dict[int, Late] = {}

    @property
    def offered_workers(self) -> float:
        """How many workers its prompts keep busy in the mean: with fewer, those that are late would wait for ever."""
        return self._line.offered_workers if self._line is not None else 0.0

    def of_may_be(self, workers: int, most: float) -> float:
        """Those late, as a share of those that may be: the larger of both latencies. Infinite: more than `most`."""
        if not self._window.work:
            return 0.0
        if workers <= 0:
            return INFINITE
        late = self._found.get(workers)
        if late is None or (late.is_cut and late.most < most):
            late = self._found[workers] = self._count(workers, most)
        if late.is_cut:
            return INFINITE
        found = max(_part(late.ttft, self._may_ttft), _part(late.tpot, self._may_tpot))
        return found if found <= most else INFINITE

    def keeps(self, workers: int, part: float = 1.0) -> bool:
        """Whether so many keep all that is promised, with no more late than `part` of those that may be."""
        return workers >= self.offered_workers and self.of_may_be(workers, part) <= part

    def late_share(self, workers: int) -> tuple[float, float]:
        """(of the feasible requests, of those that have an answer of two tokens or more)."""
        if workers <= 0:
            return float(self._prompts and self._feasible > 0.0), float(self._answers and self._answering > 0.0)
        late = self._found.get(workers)
        if late is None or late.is_cut:
            late = self._found[workers] = self._count(workers, INFINITE)
        return (
            late.ttft / self._feasible if self._feasible else 0.0,
            late.tpot / self._answering if self._answering else 0.0,
        )

    def fewest(self, guess: int, most: int, part: float = 1.0) -> int:
        """The fewest workers, up to `most`, that keep it; `most` + 1: not even those."""
        return fewest(lambda workers: self.keeps(workers, part), guess, most)

    def _count(self, workers: int, most: float) -> Late:
        may_ttft = self._may_ttft * most + _ROUNDING if most < INFINITE else INFINITE
        may_tpot = self._may_tpot * most + _ROUNDING if most < INFINITE else INFINITE
        run, late_ttft, late_tpot = None, 0.0, 0.0
        if self._prompts:
            run = self._run(workers, may_ttft)
            late_ttft = run.late
            if late_ttft > may_ttft:
                return Late(late_ttft, 0.0, most, True)
        if self._answers:
            late_tpot = self._late_answers(workers, may_tpot, run)
        return Late(late_ttft, late_tpot, most, late_tpot > may_tpot)

    def _run(self, workers: int, most_late: float) -> PromptRun:
        dearer = 1.0
        if self._answers:
            # The steps of its chunks decode too.
            pool = self._pool
            alone_ms = pool.step.step_ms(new_tokens=pool.chunk_tokens, token_context=0, sequences=1, kv_tokens=0)
            with_ms = decode_ms(pool.step, *mean_sequences(self._window, pool, workers)) - pool.step.base_ms
            dearer = 1.0 + with_ms / max(alone_ms, _ROUNDING)
        assert self._line is not None
        return run_prompts(self._line, workers, most_late=most_late, dearer=dearer, starts=self._answers)

    def _late_answers(self, workers: int, most_late: float, run: PromptRun | None) -> float:
        tpot = self._promise.tpot
        prompting = None
        if self._crowd is not None and tpot is not None:
            if self._crowd.is_served(self._pool, workers, tpot.limit_ms):
                return 0.0
            if decode_ms(self._pool.step, *mean_sequences(self._window, self._pool, workers)) > tpot.limit_ms:
                # Even the mean answer is late.
                return min(self._answering, most_late + 1.0)
        if run is not None:
            prompting = self._prompting(run)
        return late_answers(
            self._streams,
            self._pool,
            workers,
            tpot.limit_ms if tpot else None,
            most_late=most_late,
            prompting=prompting,
        )

    def _prompting(self, run: PromptRun) -> Prompting:
        changes = sorted(
            [(start, 1) for start in run.starts_ms]
            + [(start + busy, -1) for start, busy in zip(run.starts_ms, run.busy_ms, strict=True)]
        )
        shares = []
        busy = 0
        for at_ms, change in changes:
            busy += change
            shares.append((at_ms, busy / run.servers))
        step = self._pool.step
        return Prompting(shares, step.per_new_token_ms * self._pool.chunk_tokens)


def _part(late: float, may: float) -> float:
    return 0.0 if late <= _ROUNDING else (late - _ROUNDING) / may if may > 0.0 else INFINITE


def fewest(keeps: Callable[[int], bool], guess: int, most: int) -> int:
    """The border of a predicate that once true stays true, from a guess on: steps are doubled until it is between two,
    then halved. 0 if it holds at 0; `most` + 1 if it does not hold at `most`."""
    at = min(max(guess, 0), most)
    stride = 1
    if keeps(at):
        holds, fails = at, -1
        while holds > 0:
            below = max(0, holds - stride)
            if not keeps(below):
                fails = below
                break
            holds, stride = below, stride * 2
    else:
        fails, holds = at, most + 1
        while fails < most:
            above = min(most, fails + stride)
            if keeps(above):
                holds = above
                break
            fails, stride = above, stride * 2
    while holds - fails > 1:
        middle = (holds + fails) // 2
        if keeps(middle):
            holds = middle
        else:
            fails = middle
    return holds
