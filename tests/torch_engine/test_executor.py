"""TorchExecutor gives the same tokens as `generate`, for every supported shape, in one mixed batch."""

from __future__ import annotations

import copy
import dataclasses
import functools

import pytest
import torch
from antiphon_engine.executor import SampleSpec, SequenceStep
from antiphon_engine.interface import Sampling
from antiphon_engine.torch_engine.attention import unsupported_reason
from antiphon_engine.torch_engine.executor import TorchExecutor
from antiphon_engine.torch_engine.memory_estimate import blocks_for_memory, estimate_bytes, kv_shape, weights_bytes
from antiphon_engine.torch_engine.step_batch import InvalidStep
from transformers import GPT2Config

from tests.support.torch_engine import (
    CONFIGS,
    MIXTURES,
    GreedySampler,
    Running,
    drive,
    info_for,
    pool_content,
    prompts_for,
    reference_tokens,
    requests_for,
    tiny_model,
)

BLOCK_TOKENS = 16
WHOLE = 1 << 30
PATHS = pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "torch"])


def make_executor(
    name: str,
    dtype: torch.dtype = torch.float32,
    num_blocks: int = 64,
    sampler: GreedySampler | None = None,
    kernels: bool = True,
) -> TorchExecutor:
    model = tiny_model(name, dtype)
    return TorchExecutor(
        model,
        info_for(model, dtype, BLOCK_TOKENS),
        num_blocks=num_blocks,
        block_tokens=BLOCK_TOKENS,
        dtype=dtype,
        sampler=sampler or GreedySampler(),
        threads=2 if kernels else 1,
        kernels=kernels,
    )


@functools.cache
def generated(name: str, prompts: int, max_tokens: int) -> list[list[int]]:
    model = tiny_model(name)
    return [reference_tokens(model, prompt, max_tokens) for prompt in prompts_for(prompts)]


def sampling_step(tokens: list[int], start: int, blocks: list[int]) -> SequenceStep:
    return SequenceStep("r", tokens, start, blocks, SampleSpec(Sampling(temperature=0.0), 0, tokens, [], frozenset()))


@PATHS
@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_greedy_tokens_equal_generate(name: str, kernels: bool) -> None:
    """64 tokens of four prompts at once, prefilled whole, in chunks and token by token, over scattered blocks."""
    prompts = prompts_for(4)
    expected = generated(name, 4, 64)
    requests = requests_for(prompts, BLOCK_TOKENS, 64, chunks=[WHOLE, 10, 32, 1])
    assert drive(make_executor(name, kernels=kernels), requests) == expected


@PATHS
@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_logits_in_bf16_are_near_the_exact_ones(name: str, kernels: bool) -> None:
    """bf16 keeps 8 bits: after prefill and a decode step, logits are near fp32's on equal weights."""
    prompt = prompts_for(3)[2]
    exact = tiny_model(name, torch.bfloat16).float()
    with torch.inference_mode():
        expected = exact(torch.tensor([prompt])).logits[0, -1]
    sampler = GreedySampler()
    executor = make_executor(name, torch.bfloat16, sampler=sampler, kernels=kernels)
    blocks = list(range(10))
    executor.execute([SequenceStep("r", prompt[:-1], 0, blocks, None)])
    executor.execute([sampling_step(prompt[-1:], len(prompt) - 1, blocks)])
    error = (sampler.logits[0] - expected).norm() / expected.norm()
    assert sampler.logits.dtype == torch.float32
    keeps_activations_exact = kernels and name not in MIXTURES
    assert error < (0.03 if keeps_activations_exact else 0.15)


def test_a_decode_does_not_depend_on_its_batch() -> None:
    """With kernels a decoding row's logits are the same bits whatever else the step computes."""
    prompts = prompts_for(8)
    alone, together = [], []
    for companions in (False, True):
        sampler = GreedySampler()
        executor = make_executor("llama", sampler=sampler, num_blocks=128)
        requests = requests_for(prompts, BLOCK_TOKENS, 3, chunks=[WHOLE])
        for request in requests:
            drive(executor, [dataclasses.replace(request, max_tokens=1)])
        for request in requests:
            request.done, request.output = len(request.prompt), [9]
        if companions:
            executor.execute([request.next_step("r") for request in requests])
            together = list(sampler.logits)
        else:
            for request in requests:
                executor.execute([request.next_step("r")])
                alone.append(sampler.logits[0])
    assert all(torch.equal(one, other) for one, other in zip(alone, together, strict=True))


@PATHS
def test_prefix_in_the_pool_is_attended_to_and_not_computed_again(kernels: bool) -> None:
    """Blocks that another request (or a peer) filled serve as this request's prefix."""
    model = tiny_model("qwen3")
    prompt = prompts_for(3)[2]
    expected = reference_tokens(model, prompt, 8)
    executor = make_executor("qwen3", kernels=kernels)
    first = Running(prompt, list(range(8)), 1)
    drive(executor, [first])
    second = Running(prompt, [*first.blocks[:3], *range(20, 26)], 8, done=3 * BLOCK_TOKENS)
    assert drive(executor, [second]) == [expected]


@PATHS
def test_a_step_writes_only_its_own_slots(kernels: bool) -> None:
    executor = make_executor("llama", kernels=kernels)
    executor.execute([SequenceStep("r", [5, 6, 7], 15, [9, 4], None)])
    written = pool_content(executor).abs().sum(dim=(1, 2, 3, 5)) > 0
    assert written.nonzero().tolist() == [[4, 0], [4, 1], [9, 15]]


@PATHS
@pytest.mark.parametrize(
    "bad",
    [
        sampling_step([5], 0, [64]),
        sampling_step([5], 0, [-1]),
        sampling_step([200], 0, [1]),
        sampling_step([-1], 0, [1]),
        sampling_step([5] * 17, 0, [1]),
        sampling_step([], 0, [1]),
        sampling_step([5], 512, list(range(40))),
    ],
    ids=["block", "negative block", "token", "negative token", "too few blocks", "no tokens", "context"],
)
def test_a_step_that_has_no_place_is_refused_whole(bad: SequenceStep, kernels: bool) -> None:
    """The good sequence of the same step has not been computed either."""
    executor = make_executor("llama", kernels=kernels)
    with pytest.raises(InvalidStep):
        executor.execute([sampling_step([5, 6], 0, [0]), bad])
    assert not pool_content(executor).any()


@PATHS
def test_the_pool_does_not_move_and_outlives_close(kernels: bool) -> None:
    executor = make_executor("llama", kernels=kernels)
    before = executor.kv
    executor.execute([sampling_step([5, 6], 0, [3])])
    executor.close()
    executor.close()
    assert executor.kv == before
    assert before.block_bytes == executor.info.kv_block_bytes
    assert pool_content(executor)[3].any()
    with pytest.raises(RuntimeError):
        executor.execute([sampling_step([5], 2, [3])])


def test_an_empty_step_computes_nothing() -> None:
    assert make_executor("llama").execute([]) == []


def test_a_card_of_another_block_size_is_refused() -> None:
    model = tiny_model("llama")
    info = info_for(model, torch.float32, BLOCK_TOKENS * 2)
    with pytest.raises(ValueError, match="bytes a block"):
        TorchExecutor(
            model, info, num_blocks=4, block_tokens=BLOCK_TOKENS, dtype=torch.float32, sampler=GreedySampler()
        )


def test_what_cannot_run_is_said() -> None:
    assert all(unsupported_reason(config) is None for config in CONFIGS.values())
    assert "gpt2" in str(unsupported_reason(GPT2Config()))
    dynamic = copy.deepcopy(CONFIGS["llama"])
    dynamic.rope_parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    assert "dynamic" in str(unsupported_reason(dynamic))
    linear = copy.deepcopy(CONFIGS["qwen3"])
    linear.layer_types = ["linear_attention"] * linear.num_hidden_layers
    assert "linear_attention" in str(unsupported_reason(linear))


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_memory_is_known_before_loading(name: str) -> None:
    config = CONFIGS[name]
    dtype = torch.bfloat16
    assert weights_bytes(config, dtype) == sum(p.numel() for p in tiny_model(name).parameters()) * 2
    block_bytes = kv_shape(config, 64).block_bytes(dtype)
    assert estimate_bytes(config, dtype, 11, 64) - estimate_bytes(config, dtype, 1, 64) == 10 * block_bytes
    assert blocks_for_memory(config, dtype, 64, estimate_bytes(config, dtype, 7, 64)) == 7
    assert blocks_for_memory(config, dtype, 64, 1000) == 0
