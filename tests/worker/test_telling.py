"""Which steps of a request are told by themselves, and which together."""

from __future__ import annotations

from dataclasses import dataclass, field

from antiphon_decode.telling import Teller
from antiphon_proto import worker_pb2 as wire


@dataclass
class Heard:
    steps: list[wire.RequestStep] = field(default_factory=list)

    def accepted(self) -> None: ...

    def refused(self, reason: int, message: str) -> None:
        raise AssertionError(message)

    def step(self, step: wire.RequestStep) -> None:
        self.steps.append(step)


def told(every_ms: int, *steps: tuple[float, wire.RequestStep]) -> list[wire.RequestStep]:
    """What is heard of these steps, each at its second."""
    now = 0.0
    heard = Heard()
    teller = Teller(heard, every_ms, lambda: now)
    for now, step in steps:  # noqa: B007  # the clock
        teller.tell(step)
    return heard.steps


def token(number: int, *, finish: wire.Finish.ValueType = wire.Finish.FINISH_NONE, why: str = "") -> wire.RequestStep:
    return wire.RequestStep(token_ids=[number], text=f" {number}", finish=finish, error=why)


def test_each_by_itself_where_nothing_else_is_said() -> None:
    steps = [token(number) for number in range(4)]
    assert told(0, *((0.0, step) for step in steps)) == steps


def test_the_first_at_once_and_then_what_came_in_the_time() -> None:
    usage = wire.RequestStep(token_ids=[0], text=" 0", usage=wire.Usage(prompt_tokens=7))
    heard = told(250, (0.0, usage), *((number / 10, token(number)) for number in range(1, 6)))
    assert heard == [usage, wire.RequestStep(token_ids=[1, 2, 3], text=" 1 2 3")]


def test_the_end_takes_along_what_was_not_told() -> None:
    last = token(3, finish=wire.Finish.FINISH_STOP)
    last.stop_reason = "3"
    last.usage.completion_tokens = 3
    heard = told(250, (0.0, token(1)), (0.1, token(2)), (0.1, last))
    assert heard[1:] == [
        wire.RequestStep(
            token_ids=[2, 3],
            text=" 2 3",
            finish=wire.Finish.FINISH_STOP,
            stop_reason="3",
            usage=wire.Usage(completion_tokens=3),
        )
    ]


def test_one_that_is_given_back_has_all_its_tokens_with_it() -> None:
    moved = wire.RequestStep(finish=wire.Finish.FINISH_MOVED, error="it drains")
    heard = told(250, (0.0, token(1)), (0.1, token(2)), (0.2, moved))
    assert heard[1:] == [wire.RequestStep(token_ids=[2], text=" 2", finish=wire.Finish.FINISH_MOVED, error="it drains")]
