"""The timed executor: waits, deterministic tokens, KV content that tells right from wrong; and its tokenizer."""

from __future__ import annotations

import dataclasses

import pytest
from antiphon_engine import FinishReason, KvCorruption, SampleSpec, Sampling, SequenceStep, TimedExecutor, TimedSettings
from antiphon_engine.timed_tokenizer import EOS_TOKEN_ID, IM_END_TOKEN_ID, byte_tokenizer_json
from antiphon_policy.latency import StepModel
from tokenizers import Tokenizer

from tests.support.engine import Driver, generate, hashes_of, kv_content, read_block, timed_executor, write_block

PROMPT = list(range(100, 118))


def sample_spec(position: int = 0, **changes: object) -> SampleSpec:
    spec = SampleSpec(Sampling(seed=7), position, PROMPT, (), frozenset())
    return dataclasses.replace(spec, **changes)


def whole(sample: SampleSpec | None) -> SequenceStep:
    return SequenceStep("r", PROMPT, 0, range(5), sample, sequence=PROMPT)


def test_it_waits_for_what_remains_of_the_step() -> None:
    slept: list[float] = []
    ticks = iter([10.0, 10.004])
    model = StepModel(base_ms=1.0, per_new_token_ms=0.5, per_sequence_ms=2.0, per_kv_token_ms=0.0)
    settings = TimedSettings(step_ms=model.step_ms, num_blocks=8, block_tokens=4)
    TimedExecutor(settings, sleep=slept.append, clock=lambda: next(ticks)).execute([whole(None)])
    assert slept == [pytest.approx((1.0 + 18 * 0.5 + 2.0) / 1e3 - 0.004)]


def test_tokens_are_a_function_of_prompt_seed_choice_and_position() -> None:
    def token(spec: SampleSpec) -> int:
        sampled = timed_executor(8).execute([whole(spec)])[0]
        assert sampled is not None
        return sampled.token_id

    assert token(sample_spec()) == token(sample_spec(output=(1, 2, 3)))
    variants = [token(sample_spec(position=n)) for n in range(20)]
    variants += [token(sample_spec(sampling=Sampling(seed=n))) for n in range(20)]
    variants += [token(sample_spec(sampling=Sampling(seed=7, choice=n))) for n in range(20)]
    assert len(set(variants)) > 20
    assert all(32 <= value < 127 for value in variants)
    first = token(sample_spec())
    assert token(sample_spec(forbidden=frozenset({first}))) != first


def test_logprobs_come_when_asked_for() -> None:
    sampled = timed_executor(8).execute([whole(sample_spec(sampling=Sampling(logprobs=3)))])[0]
    assert sampled is not None
    assert sampled.logprob is not None
    assert sampled.logprob.token_id == sampled.token_id
    assert len(sampled.logprob.top) == 3
    values = [value for _, value in sampled.logprob.top]
    assert values == sorted(values, reverse=True)
    plain = timed_executor(8).execute([whole(sample_spec())])[0]
    assert plain is not None
    assert plain.logprob is None


def test_content_depends_on_the_whole_prefix_and_not_on_chunks() -> None:
    one, other = kv_content(PROMPT), kv_content([1, *PROMPT[1:]])
    assert all(a != b for a, b in zip(one, other, strict=True))
    executor = timed_executor(5)
    for start, end in ((0, 3), (3, 4), (4, 11), (11, 18)):
        executor.execute([SequenceStep("r", PROMPT[start:end], start, range(5), None, sequence=PROMPT)])
    assert [read_block(executor.kv, number) for number in range(5)] == one


@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize("offset", [0, 255])
def test_a_corrupted_block_is_named_when_a_sequence_starts_from_it(number: int, offset: int) -> None:
    executor = timed_executor(5)
    executor.execute([whole(None)])
    content = bytearray(read_block(executor.kv, number))
    content[offset] ^= 1
    write_block(executor.kv, number, bytes(content))
    tokens = [*PROMPT, 65]
    with pytest.raises(KvCorruption, match=f"^block {number} .* request d "):
        executor.execute([SequenceStep("d", [65], 18, range(5), None, sequence=tokens)])


def test_a_block_corrupted_between_two_steps_is_found_by_the_next() -> None:
    executor = timed_executor(6)
    tokens = [*PROMPT]
    executor.execute([SequenceStep("r", PROMPT, 0, range(5), None, sequence=tokens)])
    tokens.append(65)
    write_block(executor.kv, 4, bytes(256))
    with pytest.raises(KvCorruption, match="block 4"):
        executor.execute([SequenceStep("r", [65], 18, range(5), None, sequence=tokens)])


def test_blocks_published_for_the_wrong_tokens_fail_their_request() -> None:
    driver = Driver(timed_executor(16))
    driver.submit(generate("h", PROMPT, held=True))
    reservation = driver.scheduler.reserve("h", 18)
    assert reservation is not None
    for block, content in zip(reservation.blocks, kv_content([1, *PROMPT[1:]]), strict=True):
        write_block(driver.executor.kv, block, content)
    driver.scheduler.publish("h", 18)
    driver.scheduler.resume("h", [65])
    with pytest.raises(KvCorruption, match=f"block {reservation.blocks[0]} "):
        driver.step()


def test_a_request_id_that_comes_again_is_a_new_sequence() -> None:
    driver = Driver(timed_executor(16))
    for first in (0, 50):
        driver.submit(generate("r", list(range(first, first + 8)), max_tokens=1))
        driver.run()
        assert driver.finished.pop("r").finish is FinishReason.LENGTH
    assert len(driver.pool.leading(hashes_of(driver.executor, range(50, 58)))) == 2


def test_tokenizer_takes_any_text_and_ids_are_bytes() -> None:
    tokenizer = Tokenizer.from_str(byte_tokenizer_json().decode())
    for text in ("plain ASCII, with  spaces\n", "héllo 😀 日本語", "\x00\x7f\u200b"):
        ids = tokenizer.encode(text).ids
        assert ids == list(text.encode())
        assert tokenizer.decode(ids) == text
    assert tokenizer.encode("a<|im_end|><|eos|>").ids == [97, IM_END_TOKEN_ID, EOS_TOKEN_ID]
    assert tokenizer.decode([97, IM_END_TOKEN_ID], skip_special_tokens=True) == "a"


def test_chat_template_is_chatml() -> None:
    jinja2 = pytest.importorskip("jinja2")
    template = jinja2.Template(timed_executor(1).info.chat_template)
    messages = [{"role": "user", "content": "hi"}]
    assert template.render(messages=messages, add_generation_prompt=True) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
