"""What the demo model's tokens are, by `transformers`' own `generate`: the yardstick of every way through this house.

Twenty prompts, 64 tokens each, in fp32. Engines that batch and cut differently round differently, so a token counts
only where the reference's best two scores are more than `NEAR_TIE` apart; at the first difference nearer than that a
comparison ends (everything after it follows from another token), at one further apart it fails.

Sampled references are greedy ones over scores with the request's Gumbel noise added, which is what sampling is here.
References are computed once, prompts of equal length in one batch, so that no padding is needed; they are kept under a
digest of all that they follow from (weights, prompts, samplings, versions of the libraries): those of the versions that
this project is set up with in `tests/data/references`, which is what the cache folder of a run without them had, and
others in the cache folder. Without either they are computed again, which takes minutes.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import torch
import transformers
from antiphon_engine import Sampling
from antiphon_engine.torch_engine import default_cache_dir
from antiphon_engine.torch_engine.checkpoint import inspect_checkpoint
from antiphon_engine.torch_engine.noise import Noise
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from tests.support.models import demo_model

NEAR_TIE = 1e-3
OUTPUT_TOKENS = 64
_RECORDED = Path(__file__).parents[1] / "data" / "references"
_FORMAT = 1
"""Of the kept files and of the way references are computed."""

_TEXTS = (
    "The lighthouse keeper counted 37 steps to the lamp every evening, and 37 steps down every morning. One winter, "
    "however, the stairs had grown by one. He counted again, slowly, with a hand on the cold wall, and told nobody. "
    "In spring a letter came from the harbour office, asking why the oil lasted longer than it should. ",
    "def median(values):\n    ordered = sorted(values)\n    middle = len(ordered) // 2\n    if len(ordered) % 2:\n"
    "        return ordered[middle]\n    return sum(ordered[middle - 1 : middle + 1]) / 2\n\n\n# Tests of it\n",
    "Water boils at 100 °C at sea level and at about 93 °C in Denver, because the air presses less on it. A pressure "
    "cooker turns this around: at twice the pressure it boils at 121 °C, and beans are done in a third of the time. ",
    "Der Zug nach Bern fährt um 7:42 Uhr auf Gleis 3. El tren sale a las 7:42 del andén 3. 列车7点42分从3号站台出发。"
    "Le train part à 7 h 42, voie 3 — en retard 🚆. ",
)

_LENGTHS = (1, 33, 33, 33, 33, 33, 33, 33, 128, 128, 128, 128, 129, 129, 390, 390, 390, 500, 500, 500)
"""Below a block, exactly blocks, one more; up to four chunks of 128."""

_SHARED_PREFIXES = {15: (14, 300), 16: (14, 385), 18: (17, 448), 19: (17, 497), 13: (11, 128), 7: (6, 20)}
"""Prompt -> (the prompt it begins like, for how many tokens)."""


@dataclass(frozen=True, slots=True)
class Reference:
    prompt: tuple[int, ...]
    ids: tuple[int, ...]
    gaps: tuple[float, ...]
    """Best score less the second best, at each output position."""

    @property
    def smallest_gap(self) -> float:
        return min(self.gaps)


@functools.cache
def _prompts() -> tuple[tuple[int, ...], ...]:
    tokenizer = Tokenizer.from_file(str(demo_model() / "tokenizer.json"))
    found: list[tuple[int, ...]] = []
    for index, length in enumerate(_LENGTHS):
        start = index % len(_TEXTS)
        text = "".join(_TEXTS[start:] + _TEXTS[:start]) * 4
        ids = tokenizer.encode(f"{index}. {text}").ids
        if index in _SHARED_PREFIXES:
            other, shared = _SHARED_PREFIXES[index]
            ids = [*found[other][:shared], *ids]
        found.append(tuple(ids[:length]))
    return tuple(found)


def prompts() -> list[list[int]]:
    """Twenty different prompts of 1 to 500 tokens, several with long common beginnings."""
    return [list(prompt) for prompt in _prompts()]


def sampling_of(index: int, max_tokens: int = OUTPUT_TOKENS) -> Sampling:
    """How prompt `index` is sampled where it is sampled."""
    return Sampling(temperature=0.8, seed=2**40 + index, choice=index % 3, max_tokens=max_tokens, ignore_eos=True)


def reference_greedy(folder: Path, prompt_ids: Sequence[int], n: int) -> tuple[list[int], list[float]]:
    """(ids, gaps) of the greedy continuation by `n` tokens, not ended by EOS."""
    [reference] = references_of(folder, (tuple(prompt_ids),), n, None)
    return list(reference.ids), list(reference.gaps)


@functools.cache
def greedy_references(folder: Path, n: int = OUTPUT_TOKENS) -> tuple[Reference, ...]:
    """Of all `prompts()`."""
    return references_of(folder, _prompts(), n, None)


@functools.cache
def sampled_references(folder: Path, n: int = OUTPUT_TOKENS) -> tuple[Reference, ...]:
    """Of all `prompts()`, sampled as `sampling_of` says."""
    return references_of(folder, _prompts(), n, [sampling_of(index) for index in range(len(_prompts()))])


def assert_same(ids: Sequence[int], reference: Reference | tuple[Sequence[int], Sequence[float]]) -> int:
    """Fail unless `ids` are the reference's up to its first near tie. Returns how many tokens were compared."""
    expected, gaps = (reference.ids, reference.gaps) if isinstance(reference, Reference) else reference
    assert len(ids) <= len(expected)
    for position, (token_id, wanted) in enumerate(zip(ids, expected, strict=False)):
        if token_id != wanted:
            gap = gaps[position]
            assert gap <= NEAR_TIE, f"token {position} is {token_id}, expected {wanted} by {gap:.6f}"
            return position
    return len(ids)


def report(kind: str, references: Sequence[Reference], compared: int) -> None:
    """Print how much was compared, and how near the nearest tie was."""
    total = sum(len(reference.ids) for reference in references)
    smallest = min(reference.smallest_gap for reference in references)
    print(f"{kind}: {compared} of {total} tokens compared, smallest gap {smallest:.6f}")
    assert compared >= 0.9 * total, "near ties ended most comparisons"


def references_of(
    folder: Path, asked: Sequence[tuple[int, ...]], n: int, samplings: Sequence[Sampling] | None
) -> tuple[Reference, ...]:
    revision = inspect_checkpoint(folder).revision
    torch_version = torch.__version__.partition("+")[0]  # whatever it could compute on beside the CPU
    inputs = (revision, asked, n, samplings, torch_version, transformers.__version__, _FORMAT)
    name = f"{hashlib.sha256(repr(inputs).encode()).hexdigest()[:32]}.json"
    kept = default_cache_dir() / "references" / name
    for file in (_RECORDED / name, kept):
        if file.is_file():
            stored = msgspec.json.decode(file.read_bytes(), type=tuple[Reference, ...])
            assert tuple(reference.prompt for reference in stored) == tuple(asked)
            return stored
    references = _generated(folder, asked, n, samplings)
    kept.parent.mkdir(parents=True, exist_ok=True)
    written = kept.with_suffix(f".{os.getpid()}")
    written.write_bytes(msgspec.json.encode(references))
    written.rename(kept)
    return references


def _generated(
    folder: Path, asked: Sequence[tuple[int, ...]], n: int, samplings: Sequence[Sampling] | None
) -> tuple[Reference, ...]:
    by_length: dict[int, list[int]] = defaultdict(list)
    for index, prompt in enumerate(asked):
        by_length[len(prompt)].append(index)
    model = _model(folder)
    found: dict[int, Reference] = {}
    for length, indices in by_length.items():
        processors = LogitsProcessorList()
        if samplings is not None:
            processors.append(_AddNoise([samplings[index] for index in indices], length))
        batch = torch.tensor([asked[index] for index in indices])
        generated = model.generate(
            batch,
            attention_mask=torch.ones_like(batch),
            logits_processor=processors,
            generation_config=GenerationConfig(
                max_new_tokens=n, do_sample=False, pad_token_id=0, output_scores=True, return_dict_in_generate=True
            ),
        )
        best = torch.stack(generated.scores).topk(2, dim=-1).values
        gaps = (best[..., 0] - best[..., 1]).T.tolist()
        for row, index in enumerate(indices):
            ids = tuple(generated.sequences[row, length:].tolist())
            assert len(ids) == n
            found[index] = Reference(asked[index], ids, tuple(gaps[row]))
    return tuple(found[index] for index in range(len(asked)))


@functools.lru_cache(maxsize=1)
def _model(folder: Path) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.generation_config = GenerationConfig(pad_token_id=0)  # no EOS: it is not to end early
    return model


class _AddNoise(LogitsProcessor):
    """Scores -> scores / temperature + Gumbel noise, one sampling a row."""

    def __init__(self, samplings: Sequence[Sampling], prompt_tokens: int) -> None:
        self._samplings = samplings
        self._prompt_tokens = prompt_tokens

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.Tensor:
        position = input_ids.shape[1] - self._prompt_tokens
        ids = np.arange(scores.shape[1])
        noisy = scores.double()
        for row, sampling in enumerate(self._samplings):
            uniform = Noise(sampling.seed, sampling.choice, position).uniform_of(ids)
            noisy[row] = noisy[row] / sampling.temperature - torch.from_numpy(np.log(-np.log1p(-uniform)))
        return noisy
