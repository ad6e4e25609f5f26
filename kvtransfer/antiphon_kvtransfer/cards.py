"""Transport cards: how one worker tells another how to read its KV pool.

A card is one message per worker with one rank card per rank (one rank for now): which part of the model's KV the rank
holds, the shape of its pool, and an endpoint for each transport it serves, best first. The one idea: *a reader checks
the card before it reads a byte*. Two pools whose blocks mean different things must never be mixed up, so format and
block size have to be equal, and the message of the error says what differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from antiphon_proto import worker_pb2

from antiphon_kvtransfer.transport import PeerKey, Region, Transport, TransportError


@dataclass(frozen=True, slots=True)
class LocalWorker:
    """What a worker says of itself and its pool."""

    worker_id: str
    incarnation: str
    kv_format: str
    block_bytes: int
    num_blocks: int
    region: Region
    layers: int
    kv_heads: int


@dataclass(frozen=True, slots=True)
class PeerPool:
    """What a reader needs of a checked card."""

    key: PeerKey
    num_blocks: int
    block_bytes: int
    endpoints: tuple[tuple[str, bytes], ...]
    """(transport, metadata), best first."""

    def metadata(self, transport: str) -> bytes | None:
        for name, metadata in self.endpoints:
            if name == transport:
                return metadata
        return None


class CardMismatch(TransportError):
    """The peer's card does not fit: it is another worker, or its blocks are not like ours."""


def build_card(local: LocalWorker, transports: Sequence[Transport]) -> worker_pb2.TransportCard:
    rank = worker_pb2.RankCard(
        rank=0,
        layer_begin=0,
        layer_end=local.layers,
        head_begin=0,
        head_end=local.kv_heads,
        num_blocks=local.num_blocks,
        block_bytes=local.block_bytes,
        endpoints=[worker_pb2.TransportEndpoint(transport=one.name, metadata=one.metadata()) for one in transports],
    )
    return worker_pb2.TransportCard(
        worker_id=local.worker_id,
        incarnation=local.incarnation,
        kv_format=local.kv_format,
        kv_block_bytes=local.block_bytes,
        ranks=[rank],
    )


def read_card(card: worker_pb2.TransportCard, local: LocalWorker, *, worker_id: str, incarnation: str) -> PeerPool:
    """Check the card of the peer that is meant against the local pool. Raises CardMismatch."""
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
    if len(card.ranks) != 1:
        raise CardMismatch(f"{where} has {len(card.ranks)} ranks, this worker 1: use equal parallelism in both pools")
    rank = card.ranks[0]
    shape = (rank.layer_begin, rank.layer_end, rank.head_begin, rank.head_end)
    expected = (0, local.layers, 0, local.kv_heads)
    if shape != expected:
        raise CardMismatch(f"{where} holds layers and heads {shape}, this worker {expected}: use the same model")
    if rank.block_bytes != local.block_bytes:
        raise CardMismatch(f"{where} has a block stride of {rank.block_bytes} bytes, this worker {local.block_bytes}")
    return PeerPool(
        key=PeerKey(f"{worker_id}/{incarnation}/{rank.rank}"),
        num_blocks=rank.num_blocks,
        block_bytes=rank.block_bytes,
        endpoints=tuple((endpoint.transport, endpoint.metadata) for endpoint in rank.endpoints),
    )
