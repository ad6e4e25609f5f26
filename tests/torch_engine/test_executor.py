"""TorchExecutor gives the same tokens as `generate`, for every supported shape, in one mixed batch."""

from __future__ import annotations

import pytest
import torch
from antiphon_engine.executor import SampleSpec, SequenceStep
from antiphon_engine.interface import Sampling
from antiphon_engine.torch_engine.executor import TorchExecutor
from antiphon_engine.torch_engine.step_batch import InvalidStep

from tests.support.torch_engine import (
    CONFIGS,
    GreedySampler,
    drive,
    info_for,
    prompts_for,
    reference_tokens,
    requests_for,
    tiny_model,
)

BLOCK_TOKENS = 16


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
        threads=1,
        kernels=kernels,
    )


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "torch"])
@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_greedy_tokens_equal_generate(name: str, kernels: bool) -> None:
    """64 tokens of four prompts at once, prefilled whole, in chunks and token by token, over scattered blocks."""
    prompts = prompts_for(4)
    model = tiny_model(name)
    expected = [reference_tokens(model, prompt, 64) for prompt in prompts]
    requests = requests_for(prompts, BLOCK_TOKENS, 64, chunks=[1 << 30, 10, 32, 1])
    assert drive(make_executor(name, kernels=kernels), requests) == expected
