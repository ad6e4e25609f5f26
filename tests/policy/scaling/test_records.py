"""A decision is a record: it is written down, read again elsewhere, and made again to the same result."""

from __future__ import annotations

import msgspec
from antiphon_policy.scaling import ArrivalCounts, ScalingDecision, ScalingInputs, decide

from tests.policy.scaling.loop import PROMISE, pair, poisson


def test_a_decision_is_written_read_and_made_again() -> None:
    inputs = ScalingInputs(
        300_000.0,
        PROMISE,
        pair(1, 3, ceiling=9, starting_ms=(20_000.0,)),
        tuple(poisson(lambda _: 2.0, 300.0)),
        arrivals=ArrivalCounts(300_000.0, 10_000.0, (20.0,) * 30),
        budget_devices=10,
    )
    first = decide(inputs)
    read = msgspec.json.decode(msgspec.json.encode(first), type=ScalingDecision)
    assert read == first
    assert read.inputs is not None
    assert decide(read.inputs) == first
    # And the one after it, which hangs on what it remembers.
    later = msgspec.structs.replace(read.inputs, now_ms=310_000.0, memory=read.memory)
    assert decide(later) == decide(msgspec.structs.replace(inputs, now_ms=310_000.0, memory=first.memory))
