"""What a reader accepts of a peer's card: any shape of the same model, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from antiphon_engine.parallel import ModelDims, ParallelShape, kv_part
from antiphon_kvtransfer.cards import MAX_RANKS, CardMismatch, LocalWorker, read_card
from antiphon_proto import worker_pb2

LOCAL = LocalWorker("reader", "i1", "float32/64/gqa", block_bytes=4 * 2 * 100, layers=4, kv_heads=2)
DIMS = ModelDims(layers=4, query_heads=8, kv_heads=2)


def _card(shape: ParallelShape) -> worker_pb2.TransportCard:
    card = worker_pb2.TransportCard(
        worker_id="holder", incarnation="i7", kv_format=LOCAL.kv_format, kv_block_bytes=LOCAL.block_bytes
    )
    for rank in range(shape.ranks):
        part = kv_part(shape, DIMS, rank)
        card.ranks.add(
            rank=rank,
            layer_begin=part.layer_begin,
            layer_end=part.layer_end,
            head_begin=part.head_begin,
            head_end=part.head_end,
            num_blocks=50,
            block_bytes=part.layers * part.heads * 100,
            endpoints=[worker_pb2.TransportEndpoint(transport="tcp", metadata=b"here")],
        )
    return card


@pytest.mark.parametrize("tensor", [1, 2, 4])
@pytest.mark.parametrize("pipeline", [1, 2, 3])
def test_any_shape_of_the_same_model_is_taken(tensor: int, pipeline: int) -> None:
    shape = ParallelShape(tensor, pipeline)
    pool = read_card(_card(shape), LOCAL, worker_id="holder", incarnation="i7")
    assert (pool.worker_id, pool.incarnation) == ("holder", "i7")
    assert [rank.part for rank in pool.ranks] == [kv_part(shape, DIMS, rank) for rank in range(shape.ranks)]
    assert {(rank.num_blocks, rank.endpoints) for rank in pool.ranks} == {(50, (("tcp", b"here"),))}


def _change(of_rank: int, /, **fields: int) -> Callable[[worker_pb2.TransportCard], None]:
    def change(card: worker_pb2.TransportCard) -> None:
        for name, value in fields.items():
            setattr(card.ranks[of_rank], name, value)

    return change


def _without_a_rank(card: worker_pb2.TransportCard) -> None:
    del card.ranks[2]


def _too_many(card: worker_pb2.TransportCard) -> None:
    for _ in range(MAX_RANKS):
        card.ranks.append(card.ranks[0])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_without_a_rank, "the 3 ranks of worker holder hold 6 of the model's 4 layers x 2 KV heads"),
        (_change(3, rank=1), "names a rank twice"),
        (_change(3, num_blocks=51), "pools of different sizes.*51"),
        (_change(3, layer_end=5, block_bytes=300), r"rank 3 of worker holder holds layers \[2, 5\) of 4"),
        (_change(3, head_begin=2, head_end=3), r"rank 3 of worker holder holds KV heads \[2, 3\) of 2"),
        (_change(3, head_end=1, block_bytes=0), r"KV heads \[1, 1\) of 2"),
        (_change(0, block_bytes=400), "block stride of 400 bytes; 2 layers of 1 heads are 200 bytes here"),
        (
            _change(3, layer_begin=1, block_bytes=300),
            "ranks 1 and 3 of worker holder hold different parts",
        ),
        (_too_many, f"{MAX_RANKS + 4} ranks; at most {MAX_RANKS}"),
    ],
    ids=[
        "a rank is missing",
        "a rank twice",
        "pools of different sizes",
        "layers of another model",
        "heads of another model",
        "an empty part",
        "another stride",
        "overlapping parts",
        "too many ranks",
    ],
)
def test_a_card_that_does_not_fit_is_refused_with_a_reason(
    change: Callable[[worker_pb2.TransportCard], None], says: str
) -> None:
    card = _card(ParallelShape(tensor=2, pipeline=2))
    change(card)
    with pytest.raises(CardMismatch, match=says):
        read_card(card, LOCAL, worker_id="holder", incarnation="i7")


def test_pools_without_a_block_are_refused() -> None:
    card = _card(ParallelShape())
    card.ranks[0].num_blocks = 0
    with pytest.raises(CardMismatch, match="a pool of 0 blocks"):
        read_card(card, LOCAL, worker_id="holder", incarnation="i7")


def test_a_block_that_cannot_be_cut_into_layers_of_heads_is_no_block() -> None:
    with pytest.raises(ValueError, match="801 bytes cannot be cut into 4 layers of 2 heads"):
        LocalWorker("reader", "i1", "float32/64/gqa", 801, 4, 2)
