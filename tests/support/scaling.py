"""Small loads and settings for tests of the scaling simulator."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from antiphon_policy.latency import StepModel
from antiphon_simulate.autoscale.calls import Load, make_load
from antiphon_simulate.autoscale.goal import Goal
from antiphon_simulate.autoscale.records import Seen, Setting, Site, Sizes, Wish
from antiphon_simulate.records import Timing, TraceRequest

TIMING = Timing(
    step=StepModel(
        base_ms=5.0, per_new_token_ms=0.1, per_token_context_ms=0.0, per_sequence_ms=0.5, per_kv_token_ms=0.0001
    ),
    chunk_tokens=1024,
    mixed_chunk_tokens=256,
    block_bytes=10_000_000,
    link_gigabytes_per_s=10.0,
    name="small",
)
GOAL = Goal(ttft_ms=500.0, tpot_ms=20.0)
SITE = Site(start_ms=20_000.0, start_spread=0.2, drain_ms=5_000.0, switch_ms=2_000.0, most=Sizes(6, 6))
SETTING = Setting(TIMING, GOAL, SITE)


def setting(**site: object) -> Setting:
    """With other properties of the site."""
    fields = {name: getattr(SITE, name) for name in Site.__dataclass_fields__} | site
    return Setting(TIMING, GOAL, Site(**fields))  # type: ignore[arg-type]


def request(index: int, at_s: float, prompt_tokens: int = 500, output_tokens: int = 50) -> TraceRequest:
    """Nobody else has the same blocks."""
    blocks = tuple(range(index << 16, (index << 16) + -(-prompt_tokens // 512)))
    return TraceRequest(index, 1000.0 * at_s, prompt_tokens, output_tokens, blocks)


def load(times_s: Sequence[float], prompt_tokens: int = 500, output_tokens: int = 50) -> Load:
    requests = [request(index, at_s, prompt_tokens, output_tokens) for index, at_s in enumerate(times_s)]
    return make_load("small", requests, TIMING, GOAL)


class Told:
    """A scaler that does what a function of what it sees says; it keeps what it saw."""

    name = "told"
    interval_ms = 1000.0

    def __init__(self, wish: Callable[[Seen], Wish]) -> None:
        self._wish = wish
        self.seen: list[Seen] = []

    def decide(self, seen: Seen) -> Wish:
        self.seen.append(seen)
        return self._wish(seen)


def at_times(changes: Sequence[tuple[float, Sizes]]) -> Told:
    """From each time (s) on, those sizes."""

    def wish(seen: Seen) -> Wish:
        return Wish([sizes for at_s, sizes in changes if 1000.0 * at_s <= seen.now_ms][-1])

    return Told(wish)
