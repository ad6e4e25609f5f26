"""Loading takes a rank about its share of the weights, never the whole: measured as the peak of resident memory."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from antiphon_engine.parallel import ParallelShape
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from tests.support.models import write_tiny_model
from tests.support.rank_set import RankProcess, rank_set

MIB = 1024 * 1024
_SLACK_BYTES = 48 * MIB
"""The model's code, the kernels, the tokenizer, one piece of a file: the same for every shape."""


@pytest.fixture(scope="module")
def big_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A folder with 240 MiB of zeros in fp32, and their bytes."""
    folder = write_tiny_model(tmp_path_factory.mktemp("big") / "model")
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=8,
        max_position_embeddings=512,
        architectures=["LlamaForCausalLM"],
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    weights = {name: torch.zeros(tensor.shape) for name, tensor in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors")
    config.save_pretrained(folder)
    return folder, sum(tensor.nbytes for tensor in weights.values())


def _load_measured(process: RankProcess, *arguments: object) -> tuple[int, int]:
    """(bytes by which the process grew at most, bytes that it read)."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before, read_before = _status_bytes("VmRSS"), _read_bytes()
    process.load(*arguments)  # type: ignore[arg-type]
    return _status_bytes("VmHWM") - before, _read_bytes() - read_before


def _status_bytes(field: str) -> int:
    [value] = re.findall(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(value) * 1024


def _read_bytes() -> int:
    [value] = re.findall(r"^rchar: (\d+)", Path("/proc/self/io").read_text(), re.MULTILINE)
    return int(value)


@pytest.mark.parametrize(
    "shape", [ParallelShape(tensor=4), ParallelShape(pipeline=2), ParallelShape(tensor=2, pipeline=2)], ids=str
)
def test_each_ranks_peak_is_its_share_of_the_weights(shape: ParallelShape, big_model: tuple[Path, int]) -> None:
    """In processes that have loaded nothing before, whose allocator has nothing to give out again."""
    folder, whole = big_model
    share = whole // shape.ranks
    with rank_set(shape.ranks) as ranks:
        measured = ranks.load_with(_load_measured, folder, shape, num_blocks=1)
    print(f"{shape}: weights {whole // MIB} MiB, peaks {[peak // MIB for peak, _ in measured]} MiB")
    for peak, read in measured:
        assert 0.8 * share < peak < 1.1 * share + _SLACK_BYTES
        if shape.tensor == 1:
            assert read < 1.1 * share + _SLACK_BYTES  # nothing of the other stages
