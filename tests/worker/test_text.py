"""Text, stop strings and log-probabilities of one request together."""

from __future__ import annotations

from antiphon_engine.interface import FinishReason, TokenLogprob
from antiphon_engine.timed_tokenizer import byte_tokenizer_json
from antiphon_worker.detokenize import Detokenizer
from antiphon_worker.stops import StopStrings
from antiphon_worker.text import OutputText, TextDelta
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

TOKENIZER = Tokenizer.from_buffer(byte_tokenizer_json())


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def output_text(*stops: str, min_tokens: int = 0, include: bool = False, stop_ids: frozenset[int] = frozenset()):
    return OutputText(
        Detokenizer(TOKENIZER, frozenset(), skip_special_tokens=True),
        StopStrings(stops, include_stop_text=include),
        min_tokens=min_tokens,
        stop_token_ids=stop_ids,
        include_stop_text=include,
    )


def push_each(text: OutputText, ids: list[int], finish: FinishReason | None = None) -> list[TextDelta]:
    """One token a step, as an engine does; nothing after a finish."""
    deltas = []
    for index, token_id in enumerate(ids):
        last = finish if index == len(ids) - 1 else None
        deltas.append(text.push((token_id,), (TokenLogprob(token_id, -float(index)),), last))
        if deltas[-1].finish is not None:
            break
    return deltas


def logprob_ids(deltas: list[TextDelta]) -> list[int]:
    return [entry.token_id for delta in deltas for entry in delta.logprobs]


def test_logprobs_of_held_back_text_wait_for_it():
    """ai-dynamo/dynamo#12562, #14317: none of text that is never sent."""
    ids = ids_of("xSTyz")
    deltas = push_each(output_text("STOP"), ids)
    assert [delta.text for delta in deltas] == ["x", "", "", "STy", "z"]
    assert [len(delta.logprobs) for delta in deltas] == [1, 0, 0, 3, 1]


def test_a_stop_string_drops_the_logprobs_of_its_tokens_and_keeps_the_ids():
    ids = ids_of("xSTOPyy")
    deltas = push_each(output_text("STOP"), ids)
    assert "".join(delta.text for delta in deltas) == "x"
    assert logprob_ids(deltas) == ids[:1]
    assert [token_id for delta in deltas for token_id in delta.token_ids] == ids[:5]
    assert (deltas[-1].finish, deltas[-1].stop_reason) == (FinishReason.STOP, "STOP")


def test_what_is_held_back_comes_with_the_end():
    deltas = push_each(output_text("STOP"), ids_of("xSTO"), FinishReason.LENGTH)
    assert "".join(delta.text for delta in deltas) == "xSTO"
    assert len(logprob_ids(deltas)) == 4
    assert deltas[-1].finish is FinishReason.LENGTH


def test_the_stop_id_has_no_text_unless_asked_for():
    ids = ids_of("ab!")
    stop_ids = frozenset({ids[-1]})
    deltas = push_each(output_text(stop_ids=stop_ids), ids, FinishReason.STOP)
    assert "".join(delta.text for delta in deltas) == "ab"
    assert deltas[-1].stop_reason == str(ids[-1])
    shown = push_each(output_text(stop_ids=stop_ids, include=True), ids, FinishReason.STOP)
    assert "".join(delta.text for delta in shown) == "ab!"


def test_tokens_after_a_stop_string_in_one_step_do_not_count():
    ids = ids_of("aSTOPbb")
    delta = output_text("STOP").push(ids, (), None)
    assert delta.token_ids == tuple(ids[:5])
    assert (delta.text, delta.finish) == ("a", FinishReason.STOP)


def test_min_tokens_lets_early_matches_pass():
    ids = ids_of("ab..ab")
    deltas = push_each(output_text("ab", min_tokens=3), ids)
    assert "".join(delta.text for delta in deltas) == "ab.."
    assert deltas[-1].stop_reason == "ab"
    assert len(deltas) == 6


def test_the_logprobs_of_a_characters_tokens_come_with_the_character():
    deltas = push_each(output_text(), ids_of("a€"))
    assert [len(delta.logprobs) for delta in deltas] == [1, 0, 0, 3]


@given(st.text(alphabet="ab€", max_size=20), st.integers(0, 40), st.sampled_from(["", "ab", "ba€", "bb"]))
def test_a_replayed_attempt_goes_on_with_exactly_the_text_that_is_missing(text, cut, stop):
    ids = ids_of(text)
    whole = push_each(output_text(stop), ids, FinishReason.LENGTH)
    cut = min(cut, max(0, len(whole) - 1))
    text_before = "".join(delta.text for delta in whole[:cut])
    second = output_text(stop)
    second.replay(ids[:cut])
    after = push_each(second, ids[cut:], FinishReason.LENGTH)
    assert text_before + "".join(delta.text for delta in after) == "".join(delta.text for delta in whole)
    if ids:
        assert second.tokens == len(whole)
        assert (after[-1].finish, after[-1].stop_reason) == (whole[-1].finish, whole[-1].stop_reason)
