"""How likely a prompt's tokens are, against `transformers`' own logits: every shape, both ways through the model, any
chunks, beside other requests."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from antiphon_engine.executor import SampleSpec, ScoreSpec, Scoring, SequenceStep
from antiphon_engine.interface import Sampling, TokenLogprob
from antiphon_engine.torch_engine.executor import TorchExecutor
from antiphon_engine.torch_engine.sampler import Sampler
from antiphon_engine.torch_engine.scores import LOWEST_LOGPROB, tokens_of

from tests.support.prompt_scores import assert_scores, expected_scores
from tests.support.torch_engine import CONFIGS, GreedySampler, info_for, tiny_model

BLOCK_TOKENS = 16
TOP = 4


def in_chunks(
    executor: TorchExecutor, prompt: list[int], blocks: Sequence[int], chunks: Sequence[int]
) -> list[TokenLogprob]:
    """All scores of a prompt, its chunks beside a decode and a plain prompt."""
    found: list[TokenLogprob] = []
    start = 0
    spec = SampleSpec(Sampling(temperature=0.0), 0, prompt, [], frozenset())
    for count in chunks:
        end = min(len(prompt), start + count)
        scoring = Scoring(0, prompt[start + 1 : end + 1], TOP)
        sample = spec if end == len(prompt) else None
        part = SequenceStep("r", prompt[start:end], start, blocks, sample, sequence=prompt, scoring=scoring)
        beside = SequenceStep("other", [5, 6, 7], 0, [0], spec)
        first, second, third = executor.execute([beside, part, beside])
        assert (second is None) == (sample is None)
        assert first == third
        found += scoring.found
        start = end
    assert start == len(prompt)
    return found


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "torch"])
@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_scores_equal_those_of_the_models_own_logits(name: str, kernels: bool) -> None:
    prompt = torch.randint(3, 200, (70,), generator=torch.Generator().manual_seed(5)).tolist()
    model = tiny_model(name)
    expected = expected_scores(model, prompt, TOP)
    executor = TorchExecutor(
        model,
        info_for(model, torch.float32, BLOCK_TOKENS),
        num_blocks=32,
        block_tokens=BLOCK_TOKENS,
        dtype=torch.float32,
        sampler=GreedySampler(),
        threads=1,
        kernels=kernels,
    )
    for chunks in ([len(prompt)], [1, 16, 20, len(prompt)]):
        assert_scores(in_chunks(executor, prompt, range(20, 30), chunks), expected)


def test_rows_of_both_kinds_are_told_apart() -> None:
    logits = torch.randn(40, 50, generator=torch.Generator().manual_seed(3))
    plain = SampleSpec(Sampling(temperature=0.0), 0, [1], [], frozenset())
    specs = [plain if row % 7 == 0 else ScoreSpec(row, row % 4) for row in range(40)]
    tokens = tokens_of(Sampler(50), logits, specs)
    for row, (spec, token) in enumerate(zip(specs, tokens, strict=True)):
        if isinstance(spec, SampleSpec):
            assert token.token_id == int(logits[row].argmax())
            continue
        assert token.token_id == spec.target
        score = token.logprob
        assert score is not None
        assert score.logprob == pytest.approx(float(logits[row].log_softmax(0)[spec.target]), abs=1e-5)
        assert score.rank == 1 + int((logits[row] > logits[row, spec.target]).sum())
        assert [token_id for token_id, _ in score.top] == logits[row].topk(spec.top).indices.tolist()


def test_equal_logits_rank_by_lowest_id_and_what_is_no_number_is_lowest() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0], [torch.nan] * 4, [0.0, -torch.inf, 0.0, 0.0]])
    first, second, third = (
        token.logprob for token in tokens_of(Sampler(4), logits, [ScoreSpec(2, 2), ScoreSpec(0, 0), ScoreSpec(1, 1)])
    )
    assert first is not None
    assert second is not None
    assert third is not None
    assert first.rank == 2
    assert [token_id for token_id, _ in first.top] == [1, 2]
    assert second.logprob == third.logprob == LOWEST_LOGPROB
    assert third.rank == 4
