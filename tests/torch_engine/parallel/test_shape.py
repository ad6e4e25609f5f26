"""Shapes of a replica: what is refused and how, where ranks stand, and that their parts make the whole."""

from __future__ import annotations

import pytest
from antiphon_engine.parallel import (
    ModelDims,
    ParallelShape,
    ShapeRefused,
    check_shape,
    kv_part,
    stage_layers,
    tensor_sizes,
)

DENSE = ModelDims(layers=5, query_heads=8, kv_heads=4)
MIXTURE = ModelDims(layers=5, query_heads=8, kv_heads=4, experts=6)


@pytest.mark.parametrize(
    ("shape", "dims", "sentence"),
    [
        (
            ParallelShape(tensor=3),
            DENSE,
            "tensor parallel size 3 does not divide the model's 8 query heads: choose one of 1, 2, 4, 8",
        ),
        (
            ParallelShape(tensor=4),
            ModelDims(layers=5, query_heads=12, kv_heads=6),
            "tensor parallel size 4 fits the model's 6 KV heads neither way (it has to divide their number or be a "
            "multiple of it): choose one of 1, 2, 3, 6, 12",
        ),
        (ParallelShape(pipeline=6), DENSE, "pipeline parallel size 6 is more than the model's 5 layers"),
        (
            ParallelShape(tensor=2, expert=2),
            DENSE,
            "expert parallel size 2: the model has no experts; leave it at 1",
        ),
        (
            ParallelShape(tensor=4, expert=2),
            MIXTURE,
            "expert parallel size 2 with tensor parallel size 4: experts are spread over all ranks of a stage or over "
            "none; set expert to 4 or to 1",
        ),
        (
            ParallelShape(tensor=4, expert=4),
            MIXTURE,
            "expert parallel size 4 does not divide the model's 6 experts",
        ),
    ],
)
def test_a_shape_that_does_not_fit_is_refused_in_a_sentence(
    shape: ParallelShape, dims: ModelDims, sentence: str
) -> None:
    with pytest.raises(ShapeRefused) as refused:
        check_shape(shape, dims)
    assert str(refused.value) == sentence


def test_a_size_below_one_is_refused() -> None:
    with pytest.raises(ShapeRefused, match="pipeline parallel size 0: it has to be 1 or more"):
        ParallelShape(pipeline=0)


@pytest.mark.parametrize(
    ("dims", "sizes"),
    [
        (DENSE, [1, 2, 4, 8]),
        (ModelDims(30, query_heads=9, kv_heads=3), [1, 3, 9]),
        (ModelDims(30, query_heads=12, kv_heads=2), [1, 2, 4, 6, 12]),
        (ModelDims(30, query_heads=7, kv_heads=1), [1, 7]),
    ],
)
def test_tensor_sizes_are_those_that_are_not_refused(dims: ModelDims, sizes: list[int]) -> None:
    assert tensor_sizes(dims) == sizes
    for size in range(1, dims.query_heads + 1):
        if size in sizes:
            check_shape(ParallelShape(tensor=size), dims)
        else:
            with pytest.raises(ShapeRefused):
                check_shape(ParallelShape(tensor=size), dims)


def test_ranks_are_numbered_stage_by_stage() -> None:
    shape = ParallelShape(tensor=2, pipeline=3)
    assert shape.ranks == 6
    assert [(shape.place(rank).stage, shape.place(rank).tensor_rank) for rank in range(6)] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
        (2, 0),
        (2, 1),
    ]
    assert shape.sampling_rank == 4
    for rank in (-1, 6):
        with pytest.raises(ValueError, match="of 6"):
            shape.place(rank)


def test_a_shape_says_what_it_is() -> None:
    assert str(ParallelShape()) == "one rank"
    assert str(ParallelShape(tensor=4, expert=4)) == "tensor 4 x expert 4"
    assert str(ParallelShape(tensor=2, pipeline=2)) == "tensor 2 x pipeline 2"


def test_the_first_stages_have_a_layer_more() -> None:
    shape = ParallelShape(pipeline=3)
    assert [stage_layers(shape, 5, stage) for stage in range(3)] == [range(2), range(2, 4), range(4, 5)]


@pytest.mark.parametrize("tensor", [1, 2, 4, 8])
@pytest.mark.parametrize("pipeline", [1, 2, 3, 5])
def test_parts_cover_all_layers_of_all_heads(tensor: int, pipeline: int) -> None:
    """Each layer of each head lies on exactly one rank, or, with fewer heads than ranks, on equally many."""
    shape = ParallelShape(tensor, pipeline)
    held: dict[tuple[int, int], list[int]] = {}
    for rank in range(shape.ranks):
        part = kv_part(shape, DENSE, rank)
        for layer in range(part.layer_begin, part.layer_end):
            for head in range(part.head_begin, part.head_end):
                held.setdefault((layer, head), []).append(rank)
    copies = max(1, tensor // DENSE.kv_heads)
    assert len(held) == DENSE.layers * DENSE.kv_heads
    assert all(len(ranks) == copies and ranks[-1] - ranks[0] == copies - 1 for ranks in held.values())


@pytest.mark.parametrize("tensor", [2, 4, 8])
def test_a_rank_has_the_kv_heads_that_its_query_heads_read(tensor: int) -> None:
    shape = ParallelShape(tensor)
    each = DENSE.query_heads // tensor
    for rank in range(tensor):
        part = kv_part(shape, DENSE, rank)
        read = {query * DENSE.kv_heads // DENSE.query_heads for query in range(rank * each, (rank + 1) * each)}
        assert read == set(range(part.head_begin, part.head_end))
