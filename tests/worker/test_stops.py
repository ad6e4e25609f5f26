"""Stop strings over streamed text."""

from __future__ import annotations

import itertools

from antiphon_worker.stops import StopStrings
from hypothesis import given
from hypothesis import strategies as st

LETTERS = st.text(alphabet="abc", max_size=30)
STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=4)


def feed(pieces: list[str], stops: list[str], *, include: bool = False) -> tuple[str, str | None]:
    """(all that was sent, the stop string that matched)."""
    watcher = StopStrings(stops, include_stop_text=include)
    sent = ""
    for piece in pieces:
        step = watcher.push(piece)
        sent += step.text
        if step.matched is not None:
            return sent, step.matched
    return sent + watcher.flush(), None


def split(text: str, cuts: list[int]) -> list[str]:
    places = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    return [text[begin:end] for begin, end in itertools.pairwise(places)]


def first_match(text: str, stops: list[str]) -> tuple[int, int] | None:
    """(begin, end) of the match that is complete first; of several, the longest."""
    found = [(text.find(stop) + len(stop), -len(stop)) for stop in stops if stop in text]
    if not found:
        return None
    end, minus_length = min(found)
    return end + minus_length, end


@given(LETTERS, st.lists(st.integers(0, 30)), STOPS, st.booleans())
def test_the_result_does_not_depend_on_how_the_text_is_split(text, cuts, stops, include):
    whole = feed([text], stops, include=include)
    assert feed(split(text, cuts), stops, include=include) == whole
    assert feed(list(text), stops, include=include) == whole


@given(LETTERS, st.lists(st.integers(0, 30)), STOPS)
def test_a_stop_string_never_leaks_and_nothing_else_is_lost(text, cuts, stops):
    """ai-dynamo/dynamo#12562, #14317."""
    sent, matched = feed(split(text, cuts), stops)
    place = first_match(text, stops)
    if place is None:
        assert (sent, matched) == (text, None)
    else:
        assert sent == text[: place[0]]
        assert matched == text[place[0] : place[1]]
        assert not any(stop in sent for stop in stops)


@given(LETTERS, STOPS)
def test_only_what_may_still_match_is_held_back(text, stops):
    watcher = StopStrings(stops)
    sent = ""
    for end in range(1, len(text) + 1):
        step = watcher.push(text[end - 1])
        sent += step.text
        if step.matched is not None:
            return
        held = text[len(sent) : end]
        assert held == "" or any(stop.startswith(held) for stop in stops)


def test_the_stop_text_is_sent_when_asked_for():
    assert feed(["ab", "c", "x"], ["bc"], include=True) == ("abc", "bc")


def test_no_match_ends_where_none_may():
    """Text of the first `min_tokens` tokens cannot end the answer, but a match may begin there."""
    watcher = StopStrings(["ab"])
    assert watcher.push("ab", may_stop=False).text == "ab"
    assert watcher.push("xa", may_stop=False).text == "x"
    step = watcher.push("b")
    assert (step.text, step.matched) == ("", "ab")


def test_without_stop_strings_nothing_is_held_back():
    assert StopStrings([]).push("text").text == "text"
    assert StopStrings([""]).push("text").text == "text"
