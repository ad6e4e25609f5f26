"""Any number of ranks gives the tokens that one rank gives."""

from __future__ import annotations

import ctypes
import dataclasses
from pathlib import Path

import pytest
import torch
from antiphon_engine.executor import Executor, SampledToken, SampleSpec, Scoring, SequenceStep
from antiphon_engine.interface import Sampling, TokenLogprob
from antiphon_engine.parallel import ModelDims, ParallelShape, kv_part
from antiphon_engine.torch_engine.kv_cache import KvShape
from transformers import AutoModelForCausalLM

from tests.support.models import demo_model
from tests.support.prompt_scores import assert_scores, expected_scores
from tests.support.rank_set import RankProcess, RankSet
from tests.support.reference import assert_same, prompts, references_of, report, sampling_of
from tests.support.torch_engine import drive, pool_content, prompts_for, requests_for
from tests.torch_engine.parallel.tiny_models import BLOCK_TOKENS, VOCAB, expected, mixed_requests, one_rank

TENSOR_2, TENSOR_4 = ParallelShape(tensor=2), ParallelShape(tensor=4)
PIPELINE_2 = ParallelShape(pipeline=2)
BOTH = ParallelShape(tensor=2, pipeline=2)
EXPERT_2, EXPERT_4 = ParallelShape(tensor=2, expert=2), ParallelShape(tensor=4, expert=4)
EXPERTS_IN_STAGES = ParallelShape(tensor=2, pipeline=2, expert=2)

CASES = [
    ("llama-tied", TENSOR_2),
    ("llama-tied", TENSOR_4),
    ("llama-tied", BOTH),
    ("llama-biased", TENSOR_4),
    ("qwen2", TENSOR_2),
    ("qwen2", TENSOR_4),
    ("qwen2-window", PIPELINE_2),
    ("qwen3", TENSOR_2),
    ("qwen3", TENSOR_4),
    ("qwen3-two-kv-heads", TENSOR_4),
    ("qwen3-two-kv-heads", PIPELINE_2),
    ("mistral-window", TENSOR_2),
    ("mistral-window", TENSOR_4),
    ("mistral-window", ParallelShape(pipeline=3)),
    ("mixtral", TENSOR_4),
    ("mixtral", EXPERT_2),
    ("mixtral", EXPERT_4),
    ("qwen3_moe", BOTH),
    ("qwen3_moe", EXPERT_2),
    ("qwen3_moe", EXPERT_4),
    ("qwen3_moe", EXPERTS_IN_STAGES),
]


@pytest.mark.parametrize(("name", "shape"), CASES, ids=lambda value: str(value).replace(" ", "-"))
def test_greedy_tokens_equal_one_ranks(
    name: str, shape: ParallelShape, ranks: RankSet, folders: dict[str, Path]
) -> None:
    """Prompts whole, in chunks and token by token, mixed with decodes, over scattered blocks."""
    executor = ranks.load(folders[name], shape)
    requests = mixed_requests()
    drive(executor, requests)
    executor.close()
    one = expected(folders[name])
    print(f"{name} {shape}: {one.assert_same(requests)} tokens equal, smallest gap {one.smallest_gap:.5f}")


def test_a_seed_gives_the_same_tokens_on_any_number_of_ranks(ranks: RankSet, folders: dict[str, Path]) -> None:
    def sampled(executor: Executor) -> list[list[int]]:
        requests = [
            dataclasses.replace(request, sampling=Sampling(temperature=1.0, top_p=0.95, seed=41 + index))
            for index, request in enumerate(mixed_requests())
        ]
        return drive(executor, requests)

    alone = sampled(one_rank(folders["qwen2"])[0])
    for shape in (TENSOR_4, PIPELINE_2):
        executor = ranks.load(folders["qwen2"], shape)
        assert sampled(executor) == alone
        executor.close()
    assert alone != expected(folders["qwen2"]).outputs


def test_torch_operations_attend_as_the_kernels_do(ranks: RankSet, folders: dict[str, Path]) -> None:
    executor = ranks.load(folders["qwen3"], BOTH, kernels=False)
    requests = mixed_requests()
    drive(executor, requests)
    executor.close()
    expected(folders["qwen3"]).assert_same(requests)


def test_log_probabilities_in_bf16_are_near_one_ranks(ranks: RankSet, folders: dict[str, Path]) -> None:
    """bf16 keeps 8 bits, and sums of two ranks are rounded once more than those of one."""
    prompt = prompts_for(3)[2]
    spec = SampleSpec(Sampling(temperature=0.0, logprobs=VOCAB), 0, prompt, [], frozenset())
    step = [SequenceStep("r", prompt, 0, list(range(8)), spec)]

    def probabilities(token: SampledToken | None) -> torch.Tensor:
        assert token is not None
        assert token.logprob is not None
        return torch.tensor([logprob for _, logprob in sorted(token.logprob.top)]).exp()

    exact = probabilities(one_rank(folders["llama-tied"])[0].execute(step)[0])
    executor = ranks.load(folders["llama-tied"], BOTH, dtype="bfloat16")
    spread = probabilities(executor.execute(step)[0])
    executor.close()
    assert (spread - exact).abs().sum() < 0.3  # of at most 2


@pytest.mark.parametrize(("name", "shape"), [("qwen2", TENSOR_4), ("llama-tied", BOTH)])
def test_a_prompts_log_probabilities_equal_transformers(
    name: str, shape: ParallelShape, ranks: RankSet, folders: dict[str, Path]
) -> None:
    prompt = torch.randint(3, VOCAB, (50,), generator=torch.Generator().manual_seed(5)).tolist()
    expected_ones = expected_scores(AutoModelForCausalLM.from_pretrained(folders[name]).eval(), prompt, 3)
    executor = ranks.load(folders[name], shape)
    found: list[TokenLogprob] = []
    spec = SampleSpec(Sampling(temperature=0.0), 0, prompt, [], frozenset())
    for start, end in ((0, 1), (1, 33), (33, 50)):
        scoring = Scoring(0, prompt[start + 1 : end + 1], 3)
        beside = SequenceStep("other", [5, 6, 7], 0, [0], spec)
        part = SequenceStep("r", prompt[start:end], start, range(4, 8), spec if end == 50 else None, scoring=scoring)
        executor.execute([beside, part, beside])
        found += scoring.found
    executor.close()
    assert_scores(found, expected_ones)


@pytest.mark.parametrize(("name", "shape"), [("qwen2", TENSOR_4), ("llama-tied", BOTH)])
def test_each_rank_holds_its_part_of_every_block(
    name: str, shape: ParallelShape, ranks: RankSet, folders: dict[str, Path]
) -> None:
    """What a rank's pool holds is the layers and heads of `kv_part` of what one rank holds: peers read it as that."""
    alone, _ = one_rank(folders[name])
    drive(alone, mixed_requests(4))
    whole = pool_content(alone)
    executor = ranks.load(folders[name], shape)
    drive(executor, mixed_requests(4))
    dims = ModelDims(layers=whole.shape[2], query_heads=8, kv_heads=whole.shape[1])
    for rank in range(shape.ranks):
        ranks.call(rank, _pool)
        part = kv_part(shape, dims, rank)
        own = whole[:, part.head_begin : part.head_end, part.layer_begin : part.layer_end]
        torch.testing.assert_close(ranks.answer(rank), own, rtol=1e-3, atol=1e-3)
    executor.close()


def _pool(process: RankProcess) -> torch.Tensor:
    runner = process.runner
    assert runner is not None
    kv, part = runner.kv, runner.part
    shape = KvShape(part.layers, part.heads, 32, BLOCK_TOKENS)
    assert kv.block_bytes == shape.block_bytes(torch.float32)
    content = torch.frombuffer(bytearray(ctypes.string_at(kv.address, kv.length_bytes)), dtype=torch.float32)
    return content.view(kv.num_blocks, shape.kv_heads, shape.layers, 2, shape.block_tokens, shape.head_dim)


def test_stages_take_the_next_step_before_the_last_one_has_ended(ranks: RankSet, folders: dict[str, Path]) -> None:
    """Two batches with no request in common go through the stages one behind the other."""
    executor = ranks.load(folders["llama-tied"], ParallelShape(pipeline=3))
    halves = mixed_requests()[:2], mixed_requests()[2:]
    in_flight: list[tuple[int, list[SequenceStep]]] = []

    def finish_oldest() -> None:
        half, step = in_flight.pop(0)
        unfinished = [request for request in halves[half] if not request.finished]
        for request, part, token in zip(unfinished, step, executor.finish(step), strict=True):
            request.done += len(part.tokens)
            request.output += [] if token is None else [token.token_id]

    while True:
        waiting = [half for half in (0, 1) if half not in [busy for busy, _ in in_flight]]
        for half in waiting:
            step = [request.next_step("r") for request in halves[half] if not request.finished]
            if step:
                executor.start(step)
                in_flight.append((half, step))
        if not in_flight:
            break
        finish_oldest()
    executor.close()
    expected(folders["llama-tied"]).assert_same([request for half in halves for request in half])


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_demo_model_on_three_ranks_gives_transformers_tokens(ranks: RankSet) -> None:
    """9 query heads and 3 KV heads over three ranks: greedy, and sampled with seeds. See tests/support/reference.py."""
    asked, n = (0, 1, 8), 8
    chosen, samplings = tuple(tuple(prompts()[index]) for index in asked), [sampling_of(index) for index in asked]
    # Before the ranks are there: they want every core.
    greedy, sampled = (references_of(demo_model(), chosen, n, kind) for kind in (None, samplings))
    executor = ranks.load(demo_model(), ParallelShape(tensor=3), block_tokens=32)
    for kind, references in (("greedy", greedy), ("sampled", sampled)):
        requests = requests_for([list(prompt) for prompt in chosen], 32, n, chunks=[1 << 30, 20, 64])
        if kind == "sampled":
            for request, sampling in zip(requests, samplings, strict=True):
                request.sampling = sampling
        drive(executor, requests)
        compared = sum(
            assert_same(request.output, reference) for request, reference in zip(requests, references, strict=True)
        )
        report(f"tensor 3, {kind}", references, compared)
    executor.close()
