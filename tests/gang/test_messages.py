"""What the driver packs, a rank unpacks to the same; and no token is sent twice."""

from __future__ import annotations

import dataclasses

import msgspec
import numpy as np
import pytest
from antiphon_engine.executor import KnownMask, SampleSpec, ScoreSpec, Scoring, SequenceStep
from antiphon_engine.gang import messages
from antiphon_engine.gang.histories import KeptHistories, SentHistories
from antiphon_engine.interface import Sampling
from antiphon_engine.limits import AllowedIds
from antiphon_engine.torch_engine.step_batch import build_batch

PENALISED = Sampling(
    temperature=0.7,
    top_p=0.9,
    top_k=7,
    min_p=0.01,
    presence_penalty=0.5,
    repetition_penalty=1.1,
    logit_bias={3: -1.5},
    logprobs=2,
    seed=2**64 - 1,
    choice=1,
)
PLAIN = Sampling(seed=5)


def step(request_id: str, sampling: Sampling, prompt: list[int], output: list[int]) -> SequenceStep:
    spec = SampleSpec(sampling, len(output), prompt, output, frozenset({2}))
    tokens = [*prompt, *output]
    return SequenceStep(request_id, tokens[-1:], len(tokens) - 1, [1, 2, 3], spec)


def test_a_step_arrives_as_it_was_packed() -> None:
    parts = [
        SequenceStep("chunk", [5, 6, 7], 0, [4], None),
        step("decoding", PLAIN, [9, 8, 7, 6, 5], [4]),
        SequenceStep("last chunk", [1, 2], 4, [3, 9], SampleSpec(PLAIN, 0, [0, 0, 0, 0, 1, 2], [], frozenset())),
    ]
    batch = build_batch(parts, block_tokens=4, num_blocks=10, vocab_size=50, max_context_tokens=100)
    how = SentHistories().pack(parts)
    packed = messages.TO_RANK.decode(messages.pack_step(17, batch, how))
    assert isinstance(packed, messages.Step)
    assert packed.number == 17
    arrived = messages.unpack_batch(packed)
    for field in ("tokens", "positions", "row_start", "start", "tables", "sample_rows"):
        np.testing.assert_array_equal(getattr(arrived, field), getattr(batch, field))
        assert getattr(arrived, field).dtype == np.int32
    specs = KeptHistories().unpack(messages.HOW_TO_SAMPLE.decode(packed.how))
    assert [spec.position for spec in specs] == [1, 0]
    assert [spec.sampling for spec in specs] == [PLAIN, PLAIN]


def test_sampling_arrives_whole() -> None:
    sent, kept = SentHistories(), KeptHistories()
    (spec,) = kept.unpack(sent.pack([step("r", PENALISED, [1, 2, 3], [4, 5])]))
    assert spec == SampleSpec(PENALISED, 2, [1, 2, 3], [4, 5], frozenset({2}))


@pytest.mark.parametrize("allowed", [[2], [0, 31, 159], list(range(3, 150))], ids=["one id", "few", "most"])
def test_the_mask_of_a_grammar_arrives_and_few_ids_are_sent_as_such(allowed: list[int]) -> None:
    flags = np.zeros(160, dtype=np.uint8)
    flags[allowed] = 1
    bits = np.packbits(flags, bitorder="little").tobytes()
    part = step("r", PLAIN, [1, 2, 3], [4])
    assert part.sample is not None
    part = msgspec.structs.replace(part, sample=dataclasses.replace(part.sample, allowed=KnownMask(bits)))
    how = SentHistories().pack([part])
    mask = how.specs[0].mask
    assert mask is not None
    assert len(mask.bits + mask.ids) <= len(bits)
    (spec,) = KeptHistories().unpack(messages.HOW_TO_SAMPLE.decode(messages.ENCODER.encode(how)))
    assert spec.allowed == KnownMask(bits)


def test_rows_that_score_a_prompt_arrive_between_those_that_sample() -> None:
    scoring = [Scoring(0, [7, 8], 2), None, Scoring(1, [9], 0)]
    parts = [msgspec.structs.replace(step("r", PLAIN, [1, 2, 3], []), scoring=one) for one in scoring]
    parts[0] = msgspec.structs.replace(parts[0], sample=None)
    sample = parts[1].sample
    assert sample is not None
    limited = dataclasses.replace(sample, allowed_ids=AllowedIds([3, 9]))
    parts[1] = msgspec.structs.replace(parts[1], sample=limited)
    how = messages.HOW_TO_SAMPLE.decode(messages.ENCODER.encode(SentHistories().pack(parts)))
    first, second, third, fourth, fifth = KeptHistories().unpack(how)
    assert [first, second, fourth] == [ScoreSpec(7, 2), ScoreSpec(8, 2), ScoreSpec(9, 0)]
    assert isinstance(third, SampleSpec)
    assert third.allowed_ids is not None
    assert third.allowed_ids.ids.tolist() == [3, 9]
    assert isinstance(fifth, SampleSpec)
    assert fifth.allowed_ids is None


def test_what_sampling_gains_is_sent_too() -> None:
    """All of it but what the driver minds itself: when a request ends, its grammar, of which it sends masks, and what
    it sends in other forms (allowed ids packed, words as what is forbidden now, rows to score)."""
    minded_by_the_driver = {"max_tokens", "min_tokens", "stop_token_ids", "ignore_eos", "grammar"}
    minded_by_the_driver |= {"allowed_token_ids", "bad_words", "prompt_logprobs"}
    names = {field.name for field in dataclasses.fields(Sampling)}
    assert set(messages.PackedSampling.__struct_fields__) == names - minded_by_the_driver


def test_histories_are_sent_once_and_only_where_penalties_look_at_them() -> None:
    sent, kept = SentHistories(), KeptHistories()
    prompt, output = list(range(1000)), [1]
    for token in (2, 3, 4):
        parts = [step("plain", PLAIN, prompt, output), step("penalised", PENALISED, prompt, output)]
        how = sent.pack(parts)
        assert how.specs[0].history is None
        history = how.specs[1].history
        assert history is not None
        assert (history.prompt is not None, len(history.output) // 4) == (token == 2, 1)
        _, spec = kept.unpack(how)
        assert (list(spec.prompt), list(spec.output)) == (prompt, output)
        output.append(token)


def test_another_request_of_the_same_name_is_another() -> None:
    sent, kept = SentHistories(), KeptHistories()
    kept.unpack(sent.pack([step("r", PENALISED, [1, 2], [3])]))
    (spec,) = kept.unpack(sent.pack([step("r", PENALISED, [7, 8], [])]))
    assert (list(spec.prompt), list(spec.output)) == ([7, 8], [])


def test_a_preempted_request_goes_on_where_it_was() -> None:
    """Its prompt is computed again, its output stays: what the rank has is still true."""
    sent, kept = SentHistories(), KeptHistories()
    prompt, output = [1, 2, 3], [4]
    kept.unpack(sent.pack([step("r", PENALISED, prompt, output)]))
    kept.unpack(sent.pack([step("other", PENALISED, [9], [])]))
    output += [5]
    (spec,) = kept.unpack(sent.pack([step("r", PENALISED, prompt, output)]))
    assert list(spec.output) == [4, 5]


def test_what_is_kept_is_bounded_and_forgotten_histories_are_sent_anew() -> None:
    sent, kept = SentHistories(kept=2), KeptHistories()
    prompts = [[number] for number in range(4)]
    for _ in range(2):
        for number, prompt in enumerate(prompts):
            (spec,) = kept.unpack(sent.pack([step(f"r{number}", PENALISED, prompt, [])]))
            assert list(spec.prompt) == prompt
            assert len(kept._kept) <= 3
