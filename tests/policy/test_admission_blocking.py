"""At risk is also who would be late behind one long request that starts before it."""

from __future__ import annotations

from antiphon_policy.admission import Entry, Verdict, WaitingLine


def test_a_short_one_goes_before_a_long_one_whose_start_would_make_it_late() -> None:
    """Both fit in time one after the other by their tokens alone, and the long one has the longer prefix."""
    line: WaitingLine[str] = WaitingLine()
    line.add(Entry("short", 0.0, 100, matched_tokens=0, service_ms=100.0, due_ms=900.0))
    line.add(Entry("long", 0.0, 500, matched_tokens=5000, service_ms=850.0, due_ms=9000.0))
    assert [one.key for one in line.pass_over(0.0, lambda _: Verdict.START, tokens_per_ms=10.0)] == ["short", "long"]


def test_without_a_long_one_the_prefix_decides() -> None:
    line: WaitingLine[str] = WaitingLine()
    line.add(Entry("short", 0.0, 100, matched_tokens=0, service_ms=100.0, due_ms=900.0))
    line.add(Entry("hot", 0.0, 500, matched_tokens=5000, service_ms=85.0, due_ms=9000.0))
    assert [one.key for one in line.pass_over(0.0, lambda _: Verdict.START, tokens_per_ms=10.0)] == ["hot", "short"]
