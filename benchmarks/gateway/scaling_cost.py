"""What it costs a gateway that whoever scales is told of its requests: a request's own share, and a round of news.

    python benchmarks/gateway/scaling_cost.py

A request that arrives and ends is recorded again and again, with what came before thinned as it is in service. A round
is the news of one Model as they are made and encoded every 2 s, with so many choices in the window and so many running.
CPU time; the least and the median of the rounds are told.
"""

from __future__ import annotations

import random
import statistics
import time
from types import SimpleNamespace
from typing import Any, cast

from antiphon_gateway.dispatch import Dispatcher
from antiphon_gateway.fleet import Fleet
from antiphon_gateway.flight import Flight
from antiphon_gateway.scaling_demand import Demand
from antiphon_gateway.scaling_news import NewsDesk
from antiphon_policy.scaling.news import encode_news
from antiphon_proto import worker_pb2 as pb

ROUNDS = 15
REQUESTS = 20_000
WINDOWS = ((0, 0), (100, 10), (1000, 100), (100_000, 1000))
"""(choices that ended in the window, those that run)."""


def flight(arrived_unix: float, *, tokens: int = 200) -> Flight:
    """All that is read of one with a single choice that was served."""
    one: Any = SimpleNamespace(
        failure=None,
        began_at=0.0,
        target=SimpleNamespace(group=SimpleNamespace(model="default/chat")),
        trail=SimpleNamespace(arrived_unix=arrived_unix, choices={}),
    )
    one.choices = [
        SimpleNamespace(
            flight=one,
            index=0,
            prompt=SimpleNamespace(token_ids=[0] * 1000),
            output=[0] * tokens,
            cached_tokens=128,
            first_token_at=0.2,
            last_token_at=4.2,
            attempt=None,
            ended=True,
            finish=pb.FINISH_STOP,
            sampling=pb.Sampling(max_tokens=500),
        )
    ]
    return cast(Flight, one)


def request_us() -> float:
    demand, now = Demand(), time.time()
    flights = [flight(now + number * 1e-3) for number in range(1000)]
    begin = time.process_time()
    for number in range(REQUESTS):
        one = flights[number % 1000]
        demand.arrived(one)
        demand.ended(one)
    return (time.process_time() - begin) / REQUESTS * 1e6


def news_ms(ended: int, running: int) -> tuple[float, int]:
    """(a round, its bytes)."""
    demand, now = Demand(), time.time()
    for number in range(ended):
        one = flight(now - 290.0 + 280.0 * number / max(1, ended), tokens=random.randrange(1, 400))
        demand.arrived(one)
        demand.ended(one)
    demand.window("default/chat")
    flights = [flight(now - random.random() * 5) for _ in range(running)]
    for one in flights:
        one.choices[0].finish = pb.FINISH_NONE
    catalogue = SimpleNamespace(draining=lambda model: frozenset())
    fleet: Any = SimpleNamespace(catalogue=_Nothing(catalogue), served_models=lambda: {"default/chat"})
    lobby: Any = _Nothing(SimpleNamespace(waiting_for=lambda model: (0, 0)))
    dispatcher: Any = SimpleNamespace(queues={}, loads=lambda: (), lobby=lobby)
    desk = NewsDesk("gateway", cast(Fleet, fleet), cast(Dispatcher, dispatcher), demand, lambda: flights)
    begin = time.process_time()
    (told,) = desk.news().values()
    raw = encode_news(told)
    return (time.process_time() - begin) * 1e3, len(raw)


class _Nothing:
    """Answers as the other does, and holds nothing to go through."""

    def __init__(self, other: SimpleNamespace) -> None:
        self._other = other

    def __iter__(self) -> Any:
        return iter(())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._other, name)


def main() -> None:
    requests = [request_us() for _ in range(ROUNDS)]
    print(f"a request: {min(requests):.2f} us ({statistics.median(requests):.2f})")
    print("ended  running  news ms (median)  bytes")
    for ended, running in WINDOWS:
        rounds = [news_ms(ended, running) for _ in range(3 if ended > 10_000 else ROUNDS)]
        times = [ms for ms, _ in rounds]
        print(f"{ended:6d}  {running:6d}  {min(times):7.2f} ({statistics.median(times):6.2f})  {rounds[0][1]:8d}")


if __name__ == "__main__":
    main()
