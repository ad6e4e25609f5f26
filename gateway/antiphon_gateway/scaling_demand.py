"""What this gateway's requests are, by Model: what came, how long it was, how fast it was served.

Nothing is measured here. When a request's handler ends, its choices know when their tokens came and how many
(`flight`), and one sample of each is kept (`scaling_window`); those that run are looked at when somebody asks. So a
request costs a few microseconds, and a token nothing.

A choice is what a worker does for one answer: a request for three answers counts as three. One that ends without a
token (refused, timed out, its client gone) is demand all the same, with the length that is expected of it; one that was
wrong in itself (4xx, but 429) is not.

Owned by the gateway. Plain calls on the event loop. Times of choices are monotonic; samples have Unix milliseconds.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping

from antiphon_policy.scaling.records import RequestSample

from antiphon_gateway.errors import ApiError
from antiphon_gateway.flight import Choice, Flight, StartAgain
from antiphon_gateway.scaling_window import DemandWindow

_TOO_MANY_REQUESTS = 429


class Demand:
    """See the module."""

    def __init__(self, *, clock: Callable[[], float] = time.time, draw: Callable[[], float] = random.random) -> None:
        """`clock`: Unix seconds. `draw`: in [0, 1)."""
        self._clock = clock
        self._draw = draw
        self._windows: dict[str, DemandWindow] = {}

    @property
    def now_ms(self) -> float:
        return self._clock() * 1e3

    def window(self, model: str) -> DemandWindow:
        """Of the model with that key; begins with the first call."""
        window = self._windows.get(model)
        if window is None:
            window = self._windows[model] = DemandWindow(self.now_ms, self._draw)
        return window

    def models(self) -> Iterable[str]:
        """Those that have a window."""
        return list(self._windows)

    def forget(self, model: str) -> None:
        self._windows.pop(model, None)

    # -- what happens

    def arrived(self, flight: Flight) -> None:
        """It was understood, and is about to be queued: for the first time."""
        self.window(flight.target.group.model).arrived(flight.trail.arrived_unix * 1e3, len(flight.choices))

    def ended(self, flight: Flight) -> None:
        """Its handler is done with it, and no worker has anything of it any more."""
        failure = flight.failure
        if failure is not None and _is_no_demand(failure):
            return
        window = self.window(flight.target.group.model)
        at_ms = flight.trail.arrived_unix * 1e3
        for choice in flight.choices:
            if not choice.output:
                window.ended(expected(choice, window, at_ms), served=False)
                continue
            prompt_tokens, output_tokens = len(choice.prompt.token_ids), len(choice.output)
            cached_tokens = choice.cached_tokens
            sample = RequestSample(
                at_ms,
                max(0, prompt_tokens - cached_tokens),
                prompt_tokens,
                output_tokens,
                1.0,
                *_latencies_ms(choice),
            )
            window.ended(sample, served=bool(choice.finish))
            if cached_tokens:
                window.hit(at_ms, _holder(choice), cached_tokens)

    # -- what runs

    def running(self, flights: Iterable[Flight]) -> Mapping[str, list[RequestSample]]:
        """Choices that have not ended, by model, with the length that is expected of them."""
        found: dict[str, list[RequestSample]] = defaultdict(list)
        for flight in flights:
            model = flight.target.group.model
            window, at_ms = self.window(model), flight.trail.arrived_unix * 1e3
            found[model] += [expected(choice, window, at_ms) for choice in flight.choices]
        return found


def expected(choice: Choice, window: DemandWindow, at_ms: float) -> RequestSample:
    """What one that has no end (yet) counts as."""
    prompt_tokens, output_tokens = len(choice.prompt.token_ids), len(choice.output)
    if output_tokens:
        uncached_tokens = prompt_tokens - choice.cached_tokens
    elif choice.attempt is not None:
        uncached_tokens = choice.attempt.entry.uncached_tokens
    else:
        uncached_tokens = round(prompt_tokens * window.uncached_share)
    limit = max(1, choice.sampling.max_tokens)
    if not choice.ended:
        output_tokens = max(output_tokens, min(limit, round(window.expected_output_tokens)))
    elif not output_tokens:
        output_tokens = min(limit, round(window.expected_output_tokens))
    ttft_ms, _ = _latencies_ms(choice)
    return RequestSample(at_ms, max(0, uncached_tokens), prompt_tokens, output_tokens, 1.0, ttft_ms)


def _is_no_demand(failure: ApiError) -> bool:
    # One that starts again is told of when that ends.
    return isinstance(failure, StartAgain) or (400 <= failure.status < 500 and failure.status != _TOO_MANY_REQUESTS)


def _holder(choice: Choice) -> str:
    """Who held what did not have to be computed: the peer that it was pulled from, or whoever computed the rest."""
    for record in choice.flight.trail.choices.get(choice.index, ()):
        outcome, decision = record.outcome, record.decision
        if outcome.first_token_at:
            if decision.prefix_peers:
                return decision.prefix_peers[0][0]
            return outcome.prefill_worker_id or decision.decode
    return ""


def _latencies_ms(choice: Choice) -> tuple[float | None, float | None]:
    """(time to first token, mean time of those after it), as far as they are known."""
    first_at, tokens = choice.first_token_at, len(choice.output)
    if not first_at:
        return None, None
    # To a microsecond: shorter to write, and cheaper so than by `round`.
    ttft_ms = int((first_at - choice.flight.began_at) * 1e6) / 1e3
    return ttft_ms, int((choice.last_token_at - first_at) / (tokens - 1) * 1e6) / 1e3 if tokens > 1 else None
