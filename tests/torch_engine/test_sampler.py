"""Sampling: right in distribution, a function of the row and its request alone, each parameter as its formula says."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from antiphon_engine.executor import NO_TOKEN, KnownMask, SampledToken, SampleSpec
from antiphon_engine.interface import Sampling
from antiphon_engine.limits import AllowedIds
from antiphon_engine.torch_engine.noise import Noise, philox4x32
from antiphon_engine.torch_engine.sampler import Sampler
from hypothesis import given, settings
from hypothesis import strategies as st

_VOCAB = 40


def _spec(
    sampling: Sampling,
    position: int = 0,
    *,
    prompt: Sequence[int] = (1,),
    output: Sequence[int] = (),
    forbidden: frozenset[int] = frozenset(),
) -> SampleSpec:
    return SampleSpec(sampling, position, prompt, output, forbidden)


def _row(seed: int, vocab: int = _VOCAB, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * scale


def _draw(row: torch.Tensor, sampling: Sampling, count: int, **rest: object) -> Counter[int]:
    """Tokens of `count` output positions."""
    specs = [_spec(sampling, position, **rest) for position in range(count)]  # type: ignore[arg-type]
    drawn = Sampler(len(row)).sample(row.expand(count, -1), specs)
    return Counter(token.token_id for token in drawn)


def _assert_distributed(drawn: Counter[int], probabilities: torch.Tensor) -> None:
    """Chi-square at about the 1e-4 level (Wilson-Hilferty), classes of less than five expected draws put together."""
    count = drawn.total()
    expected = probabilities.double().numpy() * count
    observed = np.array([drawn.get(token_id, 0) for token_id in range(len(expected))], dtype=float)
    assert observed[expected == 0].sum() == 0
    big = expected >= 5
    classes = [*zip(observed[big], expected[big], strict=True)]
    if expected[~big].sum() >= 5:
        classes.append((observed[~big].sum(), expected[~big].sum()))
    statistic = sum((seen - wanted) ** 2 / wanted for seen, wanted in classes)
    freedom = len(classes) - 1
    limit = freedom * (1 - 2 / (9 * freedom) + 3.72 * math.sqrt(2 / (9 * freedom))) ** 3
    assert statistic < limit, (statistic, limit)


# ------------------------------------------------------------------ noise


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ([0, 0, 0, 0], (0, 0), [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, (0xFFFFFFFF, 0xFFFFFFFF), [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            (0xA4093822, 0x299F31D0),
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_known_answers(counter: list[int], key: tuple[int, int], words: list[int]) -> None:
    """The known answers published with the generator (Random123, philox4x32 with 10 rounds)."""
    counters = np.array(counter, dtype=np.uint64).reshape(4, 1)
    assert philox4x32(counters, key)[:, 0].tolist() == words


def test_noise_of_some_ids_is_that_of_all() -> None:
    noise = Noise(seed=2**63 + 12345, choice=2, position=77)
    ids = np.array([0, 7, 8, 9, 1001, 49_151, 3])
    assert np.array_equal(noise.coarse_of(ids), noise.coarse_of_all(49_152)[ids])
    assert np.array_equal(np.floor(noise.uniform_of(ids) * 65536).astype(int), noise.coarse_of(ids))


def test_noise_is_uniform_and_differs_by_every_input() -> None:
    ids = np.arange(20_000)
    base = Noise(seed=1, choice=0, position=0).uniform_of(ids)
    histogram = np.histogram(base, bins=50, range=(0.0, 1.0))[0]
    assert ((histogram - 400) ** 2 / 400).sum() < 95  # 49 degrees of freedom, level 1e-4
    for other in (Noise(2, 0, 0), Noise(1 + 2**32, 0, 0), Noise(1, 1, 0), Noise(1, 0, 1)):
        assert abs(np.corrcoef(base, other.uniform_of(ids))[0, 1]) < 0.03
    assert abs(np.corrcoef(base[:-1], base[1:])[0, 1]) < 0.03


# ------------------------------------------------------------------ distribution


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_draws_follow_the_softmax(seed: int) -> None:
    row = _row(seed)
    _assert_distributed(_draw(row, Sampling(seed=seed), 4000), torch.softmax(row, -1))


def test_draws_over_seeds_follow_the_softmax() -> None:
    """What matters when a gateway draws a seed for each request."""
    row = _row(4)
    specs = [_spec(Sampling(seed=seed)) for seed in range(4000)]
    drawn = Counter(token.token_id for token in Sampler(_VOCAB).sample(row.expand(4000, -1), specs))
    _assert_distributed(drawn, torch.softmax(row, -1))


def test_draws_over_choices_follow_the_softmax() -> None:
    row = _row(5)
    specs = [_spec(Sampling(seed=9, choice=choice)) for choice in range(4000)]
    drawn = Counter(token.token_id for token in Sampler(_VOCAB).sample(row.expand(4000, -1), specs))
    _assert_distributed(drawn, torch.softmax(row, -1))


def test_a_flat_large_vocabulary_is_drawn_evenly() -> None:
    """Where the coarse noise ties most: equal logits, many ids."""
    vocab = 20_000
    drawn = _draw(torch.zeros(vocab), Sampling(seed=11), 2000)
    parts = Counter[int]()
    for token_id, times in drawn.items():
        parts[token_id * 20 // vocab] += times
    _assert_distributed(parts, torch.full((20,), 1 / 20))
    assert len(drawn) > 1850


@pytest.mark.parametrize("temperature", [0.3, 1.7])
def test_temperature(temperature: float) -> None:
    row = _row(6)
    _assert_distributed(
        _draw(row, Sampling(seed=1, temperature=temperature), 3000), torch.softmax(row / temperature, -1)
    )


def _exact_choice(row: np.ndarray, spec: SampleSpec, keep: np.ndarray) -> int:
    """Gumbel-max written out: all 48 bits for all ids, in fp64."""
    noise = Noise(spec.sampling.seed, spec.sampling.choice, spec.position).uniform_of(np.arange(len(row)))
    scaled = (row / np.float32(spec.sampling.temperature)).astype(np.float64)
    scores = np.where(keep, scaled - np.log(-np.log1p(-noise)), -np.inf)
    return int(scores.argmax())


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**64 - 1),
    position=st.integers(0, 100_000),
    choice=st.integers(0, 200),
    temperature=st.floats(0.01, 100.0),
    scale=st.sampled_from([0.0, 0.5, 5.0, 50.0]),
    vocab=st.sampled_from([1, 7, 1000, 5001]),
)
def test_the_short_cut_chooses_what_the_whole_formula_chooses(
    seed: int, position: int, choice: int, temperature: float, scale: float, vocab: int
) -> None:
    row = _row(seed % 1000, vocab, scale)
    spec = _spec(Sampling(seed=seed, choice=choice, temperature=temperature), position)
    [token] = Sampler(vocab).sample(row[None], [spec])
    assert token.token_id == _exact_choice(row.numpy(), spec, np.ones(vocab, dtype=bool))


# ------------------------------------------------------------------ filters


def _kept(row: np.ndarray, sampling: Sampling) -> set[int]:
    """The filters' definitions, one id at a time."""
    scaled = (row / np.float32(sampling.temperature)).astype(np.float64)
    order = sorted(range(len(row)), key=lambda token_id: (-scaled[token_id], token_id))
    if sampling.top_k > 0:
        order = order[: sampling.top_k]
    weights = [math.exp(scaled[token_id] - scaled[order[0]]) for token_id in order]
    kept: list[int] = []
    summed = 0.0
    for token_id, weight in zip(order, weights, strict=True):
        if kept and sampling.top_p < 1.0 and summed / sum(weights) >= sampling.top_p:
            break
        kept.append(token_id)
        summed += weight
    return {token_id for token_id in kept if math.exp(scaled[token_id] - scaled[order[0]]) >= sampling.min_p}


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    top_k=st.sampled_from([0, 1, 2, 5, 39, 40, 1000]),
    top_p=st.sampled_from([1e-9, 0.11, 0.5, 0.93, 1.0]),
    min_p=st.sampled_from([0.0, 0.013, 0.27, 1.0]),
    temperature=st.sampled_from([0.4, 1.0, 2.5]),
    ties=st.booleans(),
)
def test_filters_keep_what_their_definitions_keep(
    seed: int, top_k: int, top_p: float, min_p: float, temperature: float, ties: bool
) -> None:
    row = _row(seed)
    if ties:
        row = row.round()
    sampling = Sampling(seed=seed, top_k=top_k, top_p=top_p, min_p=min_p, temperature=temperature)
    kept = _kept(row.numpy(), sampling)
    keep = np.isin(np.arange(_VOCAB), list(kept))
    for position in range(3):
        spec = _spec(sampling, position)
        [token] = Sampler(_VOCAB).sample(row[None], [spec])
        assert token.token_id in kept
        assert token.token_id == _exact_choice(row.numpy(), spec, keep)


def test_a_nucleus_wider_than_the_first_look() -> None:
    """A flat row, so that top-p needs thousands of ids."""
    vocab = 6000
    sampling = Sampling(seed=3, top_p=0.7)
    row = _row(1, vocab, 0.01)
    kept = _kept(row.numpy(), sampling)
    assert 4000 < len(kept) < 4400
    drawn = _draw(row, sampling, 200)
    assert set(drawn) <= kept
    assert len(drawn) > 150


@pytest.mark.parametrize("sampling", [Sampling(top_k=1), Sampling(top_p=1e-9), Sampling(min_p=1.0)], ids=str)
def test_filters_at_their_end_are_greedy_with_the_lowest_id(sampling: Sampling) -> None:
    row = torch.zeros(_VOCAB)
    row[[7, 9]] = 3.0
    if sampling.min_p:
        assert set(_draw(row, sampling, 50)) == {7, 9}, "equal probabilities all reach min_p"
    else:
        assert set(_draw(row, sampling, 50)) == {7}


# ------------------------------------------------------------------ penalties, bias, forbidden ids


def _greedy(**values: object) -> Sampling:
    return Sampling(temperature=0.0, **values)  # type: ignore[arg-type]


def _best(row: list[float], spec: SampleSpec) -> int:
    [token] = Sampler(len(row)).sample(torch.tensor([row]), [spec])
    return token.token_id


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits() -> None:
    assert _best([3.0, 2.0, 0.0], _spec(_greedy(repetition_penalty=1.4), prompt=[0])) == 0  # 2.14
    assert _best([3.0, 2.0, 0.0], _spec(_greedy(repetition_penalty=1.6), prompt=[0])) == 1  # 1.875
    assert _best([3.0, 2.0, 0.0], _spec(_greedy(repetition_penalty=1.6), prompt=[2], output=[0])) == 1
    assert _best([-1.0, -1.5, -9.0], _spec(_greedy(repetition_penalty=1.4), prompt=[0])) == 0  # -1.4
    assert _best([-1.0, -1.5, -9.0], _spec(_greedy(repetition_penalty=1.6), prompt=[0])) == 1  # -1.6


def test_frequency_penalty_counts_and_presence_penalty_does_not() -> None:
    row = [3.0, 2.0, 0.0]
    assert _best(row, _spec(_greedy(frequency_penalty=0.4), output=[0, 0])) == 0  # 2.2
    assert _best(row, _spec(_greedy(frequency_penalty=0.4), output=[0, 0, 0])) == 1  # 1.8
    assert _best(row, _spec(_greedy(presence_penalty=0.9), output=[0] * 9)) == 0  # 2.1
    assert _best(row, _spec(_greedy(presence_penalty=1.1), output=[0])) == 1  # 1.9
    assert _best(row, _spec(_greedy(frequency_penalty=5.0, presence_penalty=5.0), prompt=[0, 0])) == 0, "prompt is free"
    assert _best(row, _spec(_greedy(presence_penalty=-2.5), output=[2])) == 0
    assert _best(row, _spec(_greedy(presence_penalty=-3.5), output=[2])) == 2


def test_logit_bias_and_forbidden_ids() -> None:
    row = [3.0, 2.0, 0.0]
    assert _best(row, _spec(_greedy(logit_bias={2: 3.5}))) == 2
    assert _best(row, _spec(_greedy(logit_bias={0: -100.0}))) == 1
    assert _best(row, _spec(_greedy(logit_bias={99: 100.0}))) == 0, "an id that the model does not have"
    assert _best(row, _spec(_greedy(), forbidden=frozenset({0, 1}))) == 2
    assert _best(row, _spec(_greedy(logit_bias={0: 100.0}), forbidden=frozenset({0}))) == 1
    sampled = _draw(torch.tensor(row), Sampling(seed=1), 300, forbidden=frozenset({0}))
    assert set(sampled) == {1, 2}


def test_penalised_draws_follow_the_penalised_softmax() -> None:
    row = _row(8)
    output = [3, 3, 5]
    changed = row.clone()
    changed[3] -= 2 * 0.5 + 0.25
    changed[5] -= 0.5 + 0.25
    changed[10] += 1.5
    sampling = Sampling(seed=2, frequency_penalty=0.5, presence_penalty=0.25, logit_bias={10: 1.5})
    _assert_distributed(_draw(row, sampling, 3000, output=output), torch.softmax(changed, -1))


# ------------------------------------------------------------------ log-probabilities


def test_logprobs_are_of_the_raw_distribution() -> None:
    row = _row(9)
    raw = torch.log_softmax(row.double(), -1)
    sampling = Sampling(seed=1, temperature=3.0, top_k=4, logit_bias={20: 30.0}, logprobs=5)
    [token] = Sampler(_VOCAB).sample(row[None], [_spec(sampling)])
    assert token.token_id == 20
    assert token.logprob is not None
    assert token.logprob.token_id == 20
    assert token.logprob.logprob == pytest.approx(float(raw[20]), abs=1e-5)
    best = torch.topk(raw, 5)
    assert [token_id for token_id, _ in token.logprob.top] == best.indices.tolist()
    assert [value for _, value in token.logprob.top] == pytest.approx(best.values.tolist(), abs=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logprobs_zero_gives_only_the_chosen_token(temperature: float) -> None:
    row = _row(10)
    [token] = Sampler(_VOCAB).sample(row[None], [_spec(Sampling(temperature=temperature, logprobs=0))])
    assert token.logprob is not None
    assert token.logprob.top == ()
    [none] = Sampler(_VOCAB).sample(row[None], [_spec(Sampling(temperature=temperature))])
    assert none == SampledToken(token.token_id, None), "asking for log-probabilities changes no choice"


def test_equal_logprobs_come_by_lowest_id() -> None:
    [token] = Sampler(_VOCAB).sample(torch.zeros(1, _VOCAB), [_spec(_greedy(logprobs=4))])
    assert token.logprob is not None
    assert [token_id for token_id, _ in token.logprob.top] == [0, 1, 2, 3]


# ------------------------------------------------------------------ a row is alone


def _mixed_specs(count: int) -> list[SampleSpec]:
    kinds = [
        Sampling(temperature=0.0),
        Sampling(),
        Sampling(top_p=0.8),
        Sampling(top_k=7, min_p=0.02),
        Sampling(repetition_penalty=1.2, logprobs=3),
        Sampling(temperature=0.0, presence_penalty=0.4),
    ]
    return [
        _spec(dataclasses.replace(kinds[index % len(kinds)], seed=index, choice=index % 3), index * 5, output=[index])
        for index in range(count)
    ]


@settings(max_examples=30, deadline=None)
@given(order=st.permutations(range(12)), cut=st.integers(1, 11))
def test_neither_batch_nor_order_changes_a_token(order: list[int], cut: int) -> None:
    vocab = 300
    sampler = Sampler(vocab)
    logits = torch.stack([_row(index, vocab) for index in range(12)])
    specs = _mixed_specs(12)
    together = sampler.sample(logits, specs)
    for part in (order[:cut], order[cut:]):
        parted = sampler.sample(logits[part], [specs[index] for index in part])
        assert parted == [together[index] for index in part]


def test_the_same_request_gives_the_same_tokens_and_another_seed_gives_others() -> None:
    row = _row(12, 1000, 1.0)
    sequences = {
        seed: [Sampler(1000).sample(row[None], [_spec(Sampling(seed=seed), position)])[0] for position in range(20)]
        for seed in (1, 2, 2**40 + 1)
    }
    again = Sampler(1000).sample(row.expand(20, -1), [_spec(Sampling(seed=1), position) for position in range(20)])
    assert again == sequences[1]
    assert sequences[1] != sequences[2]
    assert sequences[1] != sequences[2**40 + 1]


def test_bf16_logits_are_taken_as_their_values() -> None:
    row = _row(13).bfloat16()
    spec = _spec(Sampling(seed=4, logprobs=2))
    assert Sampler(_VOCAB).sample(row[None], [spec]) == Sampler(_VOCAB).sample(row.float()[None], [spec])


# ------------------------------------------------------------------ rows with nothing to choose from


@pytest.mark.parametrize("sampling", [_greedy(), Sampling(), Sampling(top_p=0.5, top_k=3, min_p=0.1)], ids=str)
def test_everything_masked_gives_the_lowest_id_that_is_not_forbidden(sampling: Sampling) -> None:
    logits = torch.full((1, 5), -math.inf)
    sampler = Sampler(5)
    assert sampler.sample(logits, [_spec(sampling, forbidden=frozenset({0, 1}))])[0].token_id == 2
    assert sampler.sample(torch.zeros(1, 5), [_spec(sampling, forbidden=frozenset(range(5)))])[0].token_id == NO_TOKEN


@pytest.mark.parametrize("sampling", [_greedy(logprobs=2), Sampling(logprobs=2), _greedy()], ids=str)
def test_logits_that_are_not_numbers_are_never_chosen(sampling: Sampling, caplog: pytest.LogCaptureFixture) -> None:
    [token] = Sampler(3).sample(torch.tensor([[math.nan, 1.0, math.nan]]), [_spec(sampling)])
    assert token.token_id == 1
    assert "logits are not numbers" in caplog.text
    if token.logprob is not None:
        assert token.logprob.logprob == 0.0
        assert all(math.isfinite(value) for _, value in token.logprob.top)


@pytest.mark.parametrize("sampling", [_greedy(), Sampling(seed=3), Sampling(top_p=0.9)], ids=str)
def test_infinite_logits_win(sampling: Sampling) -> None:
    logits = torch.tensor([[0.0, math.inf, 5.0, -math.inf]])
    assert Sampler(4).sample(logits, [_spec(sampling)])[0].token_id == 1


def test_a_wrong_shape_is_an_error() -> None:
    with pytest.raises(ValueError, match="logits have shape"):
        Sampler(5).sample(torch.zeros(2, 5), [_spec(Sampling())])


# ------------------------------------------------------------------ allowed ids


@pytest.mark.parametrize("sampling", [_greedy(logprobs=3), Sampling(logprobs=3, seed=5, top_k=2)], ids=str)
def test_nothing_but_allowed_ids_is_chosen_and_log_probabilities_do_not_know(sampling: Sampling) -> None:
    row = _row(5)
    allowed = [int(token_id) for token_id in row.argsort()[:6]]
    spec = dataclasses.replace(_spec(sampling), allowed_ids=AllowedIds(allowed))
    [token] = Sampler(_VOCAB).sample(row[None], [spec])
    assert token.token_id in allowed
    assert token.logprob is not None
    assert token.logprob.logprob == pytest.approx(float(row.log_softmax(0)[token.token_id]), abs=1e-5)
    assert [token_id for token_id, _ in token.logprob.top] == row.topk(3).indices.tolist()


def test_allowed_ids_are_drawn_as_the_filtered_distribution_has_them() -> None:
    row, allowed = _row(6), [3, 8, 20, 31]
    probabilities = torch.zeros(_VOCAB)
    probabilities[allowed] = row[allowed].softmax(0)
    spec = [dataclasses.replace(_spec(Sampling(seed=3), n), allowed_ids=AllowedIds(allowed)) for n in range(1500)]
    drawn = Counter(token.token_id for token in Sampler(_VOCAB).sample(row.expand(1500, -1), spec))
    _assert_distributed(drawn, probabilities)


def test_allowed_ids_a_grammar_and_forbidden_ids_together_may_leave_nothing() -> None:
    mask = KnownMask(bytes([0b0000_1110, 0, 0, 0, 0]))
    spec = dataclasses.replace(_spec(Sampling(logprobs=1)), allowed=mask, allowed_ids=AllowedIds([2, 3, 9]))
    row = _row(7)
    [token] = Sampler(_VOCAB).sample(row[None], [dataclasses.replace(spec, forbidden=frozenset({2}))])
    assert token.token_id == 3
    [none] = Sampler(_VOCAB).sample(row[None], [dataclasses.replace(spec, forbidden=frozenset({2, 3}))])
    assert none == SampledToken(NO_TOKEN, None)
