"""Transport cards: how one worker tells another how to read its KV pools.

A card is one message per worker with one rank card per rank: which part of the model's KV the rank holds, the shape of
its pool, and an endpoint for each transport it serves, best first. The one idea: *a reader checks the card before it
reads a byte*. Two pools whose blocks mean different things must never be mixed up, so format and size of a whole block
have to be equal, and the peer's ranks together have to hold every layer of every head, however they are cut. The
message of the error says what differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from antiphon_proto import worker_pb2

from antiphon_kvtransfer.plane import KvPart, PeerPool, PeerRank, RankPlane
from antiphon_kvtransfer.ranges import in_common
from antiphon_kvtransfer.transport import TransportError

MAX_RANKS = 256
"""Of one worker."""


@dataclass(frozen=True, slots=True)
class LocalWorker:
    """What a worker says of itself and of whole blocks. What its ranks hold, they say themselves."""

    worker_id: str
    incarnation: str
    kv_format: str
    block_bytes: int
    """Of a whole block: all layers of all heads."""
    layers: int
    kv_heads: int

    def __post_init__(self) -> None:
        if self.block_bytes % (self.layers * self.kv_heads):
            raise ValueError(
                f"a block of {self.block_bytes} bytes cannot be cut into {self.layers} layers of {self.kv_heads} heads"
            )

    @property
    def layer_bytes(self) -> int:
        """Of one layer of one head of a block."""
        return self.block_bytes // (self.layers * self.kv_heads)


class CardMismatch(TransportError):
    """The peer's card does not fit: it is another worker, or its blocks are not like ours."""


def build_card(local: LocalWorker, ranks: Sequence[RankPlane]) -> worker_pb2.TransportCard:
    return worker_pb2.TransportCard(
        worker_id=local.worker_id,
        incarnation=local.incarnation,
        kv_format=local.kv_format,
        kv_block_bytes=local.block_bytes,
        ranks=[_rank_card(rank) for rank in ranks],
    )


def _rank_card(rank: RankPlane) -> worker_pb2.RankCard:
    return worker_pb2.RankCard(
        rank=rank.rank,
        layer_begin=rank.part.layer_begin,
        layer_end=rank.part.layer_end,
        head_begin=rank.part.head_begin,
        head_end=rank.part.head_end,
        num_blocks=rank.num_blocks,
        block_bytes=rank.block_bytes,
        endpoints=[
            worker_pb2.TransportEndpoint(transport=transport, metadata=metadata)
            for transport, metadata in rank.endpoints
        ],
    )


def read_card(card: worker_pb2.TransportCard, local: LocalWorker, *, worker_id: str, incarnation: str) -> PeerPool:
    """Check the card of the peer that is meant against the local worker. Raises CardMismatch."""
    where = f"worker {worker_id}"
    if card.worker_id != worker_id:
        raise CardMismatch(f"{where}: another worker, {card.worker_id}, answers at its address")
    if card.incarnation != incarnation:
        raise CardMismatch(f"{where} was restarted: it is incarnation {card.incarnation}, not {incarnation}")
    if card.kv_format != local.kv_format:
        raise CardMismatch(
            f"{where} has KV format {card.kv_format}, this worker {local.kv_format}: run both with the same model, "
            "dtype and block size"
        )
    if card.kv_block_bytes != local.block_bytes:
        raise CardMismatch(
            f"{where} has KV blocks of {card.kv_block_bytes} bytes, this worker of {local.block_bytes}: run both with "
            "the same model, dtype and block size"
        )
    if len(card.ranks) > MAX_RANKS:
        raise CardMismatch(f"{where} has {len(card.ranks)} ranks; at most {MAX_RANKS} are taken")
    ranks = tuple(_read_rank(card_of_rank, local, where) for card_of_rank in card.ranks)
    _check_together(ranks, local, where)
    return PeerPool(worker_id, incarnation, ranks)


def _read_rank(card: worker_pb2.RankCard, local: LocalWorker, where: str) -> PeerRank:
    whose = f"rank {card.rank} of {where}"
    part = KvPart(card.layer_begin, card.layer_end, card.head_begin, card.head_end)
    if not (0 <= part.layer_begin < part.layer_end <= local.layers):
        raise CardMismatch(f"{whose} holds layers {_span(part.layer_begin, part.layer_end)} of {local.layers}")
    if not (0 <= part.head_begin < part.head_end <= local.kv_heads):
        raise CardMismatch(f"{whose} holds KV heads {_span(part.head_begin, part.head_end)} of {local.kv_heads}")
    expected = part.layers * part.heads * local.layer_bytes
    if card.block_bytes != expected:
        raise CardMismatch(
            f"{whose} has a block stride of {card.block_bytes} bytes; {part.layers} layers of {part.heads} heads are "
            f"{expected} bytes here: run both with the same model, dtype and block size"
        )
    if card.num_blocks < 1:
        raise CardMismatch(f"{whose} has a pool of {card.num_blocks} blocks")
    endpoints = tuple((endpoint.transport, endpoint.metadata) for endpoint in card.endpoints)
    return PeerRank(card.rank, part, card.num_blocks, card.block_bytes, endpoints)


def _check_together(ranks: Sequence[PeerRank], local: LocalWorker, where: str) -> None:
    """Numbers are unique, pools alike, and the parts tile the model; ranks with the same part are copies."""
    if len({rank.rank for rank in ranks}) != len(ranks):
        raise CardMismatch(f"{where} names a rank twice")
    if len({rank.num_blocks for rank in ranks}) > 1:
        counts = ", ".join(str(rank.num_blocks) for rank in ranks)
        raise CardMismatch(f"{where} has pools of different sizes ({counts} blocks): its ranks do not belong together")
    first_with = {rank.part: rank for rank in reversed(ranks)}
    parts = sorted(first_with.values(), key=lambda one: one.rank)
    for number, one in enumerate(parts):
        for other in parts[:number]:
            if in_common(one.part, other.part) is not None:
                raise CardMismatch(
                    f"ranks {other.rank} and {one.rank} of {where} hold different parts that overlap: a layer of a "
                    "head is held by one rank, or by copies with equal parts"
                )
    held = sum(rank.part.layers * rank.part.heads for rank in parts)
    missing = local.layers * local.kv_heads - held
    if missing > 0:
        raise CardMismatch(
            f"the {len(ranks)} ranks of {where} hold {held} of the model's {local.layers} layers x {local.kv_heads} KV "
            "heads: the others could not be read from it"
        )


def _span(begin: int, end: int) -> str:
    return f"[{begin}, {end})"
