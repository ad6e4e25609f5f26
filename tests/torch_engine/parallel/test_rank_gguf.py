"""Ranks read their slices of a GGUF file, and give the tokens that the folder gives which it was written from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from antiphon_engine.parallel import ParallelShape
from antiphon_engine.torch_engine.gguf_model import slices
from antiphon_engine.torch_engine.gguf_model.slices import GgufSlices
from antiphon_engine.torch_engine.parallel.cuts import Cut, rank_cuts
from antiphon_engine.torch_engine.parallel.skeleton import build_skeleton
from antiphon_engine.torch_engine.parallel.slices import SliceReader, Slices, open_slices

from tests.support.gguf_models import Type, write_gguf_of
from tests.support.rank_set import RankSet
from tests.support.torch_engine import drive
from tests.torch_engine.parallel.tiny_models import CONFIGS, expected, mixed_requests

TENSOR_2 = ParallelShape(tensor=2)
BOTH = ParallelShape(tensor=2, pipeline=2)
EXPERTS = ParallelShape(tensor=2, expert=2)


def _filled(cut: Cut, files: Slices) -> torch.Tensor:
    values = torch.zeros(cut.shape)
    for piece in cut.pieces:
        files.read(piece.source, piece.source_shape, piece.rows, piece.columns, values[piece.into])
    return values


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("llama-tied", ParallelShape(tensor=4)),
        ("llama-biased", TENSOR_2),
        ("mistral-window", ParallelShape(pipeline=3)),
        ("mixtral", EXPERTS),
        ("mixtral", ParallelShape(tensor=4)),
        ("qwen2", BOTH),
        ("qwen3", TENSOR_2),
    ],
    ids=str,
)
def test_a_rank_has_the_slices_of_the_folder(
    name: str, shape: ParallelShape, folders: dict[str, Path], tmp_path: Path
) -> None:
    file = write_gguf_of(folders[name], tmp_path / "model.gguf")
    for rank in range(shape.ranks):
        with SliceReader(folders[name]) as folder, open_slices(file) as gguf:
            skeleton = build_skeleton(CONFIGS[name], shape, rank)
            cuts = rank_cuts(skeleton, folder.names)
            assert cuts == rank_cuts(skeleton, gguf.names)
            for cut in cuts:
                assert torch.equal(_filled(cut, gguf), _filled(cut, folder)), cut.parameter


def test_a_rank_reads_no_more_of_the_file_than_its_rows(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of matrices that are cut by rows half, of blocks as of numbers; rows that are cut by columns are read whole."""
    file = write_gguf_of(folders["qwen2"], tmp_path / "model.gguf", Type.F16)
    read: dict[str, int] = {}
    whole = GgufSlices._read

    def counted(self: GgufSlices, entry, begin, count):  # type: ignore[no-untyped-def]
        read[entry.name] = read.get(entry.name, 0) + count
        return whole(self, entry, begin, count)

    monkeypatch.setattr(GgufSlices, "_read", counted)
    with GgufSlices(file) as files:
        for cut in rank_cuts(build_skeleton(CONFIGS["qwen2"], TENSOR_2, 1), files.names):
            _filled(cut, files)
        sizes = {name: entry.end - entry.begin for name, entry in files._file.tensors.items()}
    for name in ("blk.0.attn_q.weight", "blk.0.attn_v.weight", "blk.2.ffn_up.weight"):
        assert read[name] * 2 == sizes[name], name
    assert read["blk.0.ffn_down.weight"] == sizes["blk.0.ffn_down.weight"]
    assert read["token_embd.weight"] <= sizes["token_embd.weight"] * 0.51
    assert sum(read.values()) < sum(sizes.values()) * 0.7


@pytest.mark.parametrize(("name", "shape"), [("llama-tied", TENSOR_2), ("mixtral", EXPERTS)], ids=str)
def test_greedy_tokens_equal_one_ranks(
    name: str, shape: ParallelShape, ranks: RankSet, folders: dict[str, Path], tmp_path: Path
) -> None:
    executor = ranks.load(write_gguf_of(folders[name], tmp_path / "model.gguf"), shape)
    requests = mixed_requests()
    drive(executor, requests)
    executor.close()
    assert expected(folders[name]).assert_same(requests) >= 40


def test_rows_and_columns_may_be_any(folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that begin and end inside heads, whose halves lie in another order, in pieces of one head."""
    monkeypatch.setattr(slices, "_PIECE_ELEMENTS", 1)
    file = write_gguf_of(folders["llama-tied"], tmp_path / "model.gguf")
    name, shape, rows, columns = "model.layers.1.self_attn.q_proj.weight", (256, 96), range(5, 141), range(3, 50)
    with SliceReader(folders["llama-tied"]) as folder, open_slices(file) as gguf:
        found, meant = torch.empty(len(rows), len(columns)), torch.empty(len(rows), len(columns))
        gguf.read(name, shape, rows, columns, found)
        folder.read(name, shape, rows, columns, meant)
    assert torch.equal(found, meant)
