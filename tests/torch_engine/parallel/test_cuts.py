"""What each rank reads of the weight files: together everything, each no more than its own."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from antiphon_engine.parallel import ParallelShape, ShapeRefused
from antiphon_engine.torch_engine.errors import DamagedCheckpoint, UnsupportedModel
from antiphon_engine.torch_engine.memory_estimate import RUNTIME_BYTES, kv_shape, weights_bytes
from antiphon_engine.torch_engine.parallel.cuts import Cut, rank_cuts
from antiphon_engine.torch_engine.parallel.groups import join_groups
from antiphon_engine.torch_engine.parallel.rank_model import load_rank_model
from antiphon_engine.torch_engine.parallel.runner import model_dims, rank_estimate_bytes
from antiphon_engine.torch_engine.parallel.skeleton import build_skeleton
from antiphon_engine.torch_engine.parallel.slices import SliceReader
from safetensors.torch import load_file, save_file
from transformers import PreTrainedConfig, PreTrainedModel

from tests.torch_engine.parallel.tiny_models import CONFIGS, VOCAB

SHAPES = [
    ParallelShape(tensor=4),
    ParallelShape(pipeline=3),
    ParallelShape(tensor=2, pipeline=2),
    ParallelShape(tensor=4, expert=4),
]


def _cuts(name: str, shape: ParallelShape, rank: int, folder: Path) -> list[Cut]:
    with SliceReader(folder) as files:
        return rank_cuts(build_skeleton(CONFIGS[name], shape, rank), files.names)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (name, shape)
        for name in ("llama-tied", "llama-biased", "qwen2", "qwen3_moe", "mixtral")
        for shape in SHAPES
        if shape.expert == 1 or model_dims(CONFIGS[name]).experts
    ],
    ids=str,
)
def test_ranks_read_every_element_of_the_files(name: str, shape: ParallelShape, folders: dict[str, Path]) -> None:
    """Once, but for what has to be on several ranks: norms and routers, KV heads with fewer than ranks, a tied head."""
    content = load_file(folders[name] / "model.safetensors")
    read = {tensor: torch.zeros(values.shape, dtype=torch.int32) for tensor, values in content.items()}
    for rank in range(shape.ranks):
        for cut in _cuts(name, shape, rank, folders[name]):
            for piece in cut.pieces:
                assert piece.source_shape == tuple(content[piece.source].shape)
                rows = read[piece.source][piece.rows.start : piece.rows.stop]
                rows[
                    ... if piece.columns is None else (slice(None), slice(piece.columns.start, piece.columns.stop))
                ] += 1
    kv_copies = max(1, shape.tensor // model_dims(CONFIGS[name]).kv_heads)
    for tensor, times in read.items():
        if tensor.endswith(("layernorm.weight", "norm.weight")) or ".gate.weight" in tensor:
            wanted = shape.tensor
        elif ".k_proj." in tensor or ".v_proj." in tensor:
            wanted = kv_copies
        elif tensor == "model.embed_tokens.weight" and shape.pipeline > 1 and name == "llama-tied":
            wanted = 2  # the first stage's embedding and the last stage's head
        else:
            wanted = 1
        assert torch.equal(times, torch.full_like(times, wanted)), tensor


def test_a_stage_reads_no_other_stages_tensors(folders: dict[str, Path]) -> None:
    shape = ParallelShape(pipeline=3)
    read = [
        {piece.source for cut in _cuts("qwen3_moe", shape, rank, folders["qwen3_moe"]) for piece in cut.pieces}
        for rank in range(3)
    ]
    for stage, sources in enumerate(read):
        layers = {source.split(".")[2] for source in sources if source.startswith("model.layers.")}
        assert layers == {str(stage)}
    outside = [{source for source in sources if not source.startswith("model.layers.")} for sources in read]
    assert outside == [{"model.embed_tokens.weight"}, set(), {"model.norm.weight", "lm_head.weight"}]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_estimate_counts_what_is_loaded(shape: ParallelShape, folders: dict[str, Path]) -> None:
    """Weights as the cuts say, and the rank's share of the pool."""
    config = CONFIGS["qwen3_moe"]
    for rank in range(shape.ranks):
        weights = 2 * sum(cut.count for cut in _cuts("qwen3_moe", shape, rank, folders["qwen3_moe"]))
        skeleton = build_skeleton(config, shape, rank)
        pool = kv_shape(config, 16).block_bytes(torch.bfloat16) * skeleton.part.layers * skeleton.part.heads // (3 * 2)
        assert rank_estimate_bytes(config, torch.bfloat16, shape, rank, 100, 16) == weights + 100 * pool + RUNTIME_BYTES


def test_one_rank_is_estimated_to_need_all_weights_once() -> None:
    for name in ("llama-tied", "mixtral"):
        estimate = rank_estimate_bytes(CONFIGS[name], torch.float32, ParallelShape(), 0, 0, 16)
        assert estimate == weights_bytes(CONFIGS[name], torch.float32) + RUNTIME_BYTES


def test_a_shape_that_does_not_fit_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    groups = join_groups(ParallelShape(), 0, "", 0, 1.0)
    with pytest.raises(ShapeRefused, match="tensor parallel size 3 does not divide the model's 8 query heads"):
        load_rank_model(tmp_path, CONFIGS["qwen2"], torch.float32, ParallelShape(tensor=3), 0, groups)


def test_a_plan_with_unknown_ways_to_cut_is_refused() -> None:
    config = copy.deepcopy(CONFIGS["qwen2"])
    config.base_model_tp_plan = {"layers.*.self_attn.q_proj": "sequence_parallel"}
    skeleton = build_skeleton(config, ParallelShape(tensor=2), 0)
    with pytest.raises(UnsupportedModel, match=r"is cut over ranks in a way .* \(sequence_parallel\): serve it on one"):
        rank_cuts(skeleton)


def _alone(folder: Path, config: PreTrainedConfig) -> PreTrainedModel:
    groups = join_groups(ParallelShape(), 0, "", 0, 1.0)
    return load_rank_model(folder, config, torch.float32, ParallelShape(), 0, groups).model


def test_a_tied_head_shares_the_embedding_unless_the_files_have_another(
    tmp_path: Path, folders: dict[str, Path]
) -> None:
    config = CONFIGS["llama-tied"]
    content = load_file(folders["llama-tied"] / "model.safetensors")
    embedding = content["model.embed_tokens.weight"]
    assert "lm_head.weight" not in content
    for head, shared in ((None, True), (embedding.clone(), True), (embedding * 2, False)):
        with_head = content if head is None else {**content, "lm_head.weight": head}
        save_file(with_head, tmp_path / "model.safetensors")
        model = _alone(tmp_path, config)
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == shared
        assert torch.equal(model.lm_head.weight, embedding if head is None else head)
    renamed = {("lm_head.weight" if key == "model.embed_tokens.weight" else key): t for key, t in content.items()}
    save_file(renamed, tmp_path / "model.safetensors")
    assert torch.equal(_alone(tmp_path, config).model.embed_tokens.weight, embedding)


def test_tensors_that_are_not_as_the_config_says_are_named(tmp_path: Path, folders: dict[str, Path]) -> None:
    content = load_file(folders["llama-tied"] / "model.safetensors")
    config = CONFIGS["llama-tied"]
    name = "model.layers.1.mlp.up_proj.weight"
    for damaged, sentence in (
        ({key: value for key, value in content.items() if key != name}, f"lacks the tensor {name}: get"),
        ({**content, name: content[name][1:].clone()}, rf"has a wrong shape for the tensor {name} \(\(149, 96\), not"),
        ({**content, name: content[name].to(torch.int8)}, f"has {name} as I8, which cannot be read"),
    ):
        save_file(damaged, tmp_path / "model.safetensors")
        with pytest.raises(DamagedCheckpoint, match=sentence):
            _alone(tmp_path, config)


def test_rows_and_columns_are_read_in_pieces(tmp_path: Path) -> None:
    """A tensor of many pieces, converted on the way."""
    values = torch.arange(3000 * 1000, dtype=torch.float32).view(3000, 1000)
    save_file({"w": values, "v": values[0].clone()}, tmp_path / "model.safetensors")
    rows, columns = range(7, 2990), range(13, 600)
    into = torch.empty(len(rows), len(columns), dtype=torch.float64)
    with SliceReader(tmp_path) as files:
        files.read("w", (3000, 1000), rows, columns, into)
        assert torch.equal(into, values[7:2990, 13:600].double())
        vector = torch.empty(20)
        files.read("v", (1000,), range(980, 1000), None, vector)
    assert torch.equal(vector, values[0, 980:])


def test_the_vocabulary_of_the_tests_divides_over_no_ranks() -> None:
    assert all(VOCAB % ranks for ranks in (2, 3, 4))
