"""Which bytes go where when ranks of different shapes read from each other. Pure.

A rank's pool is laid out [block][own kv_head][own layer][k|v][token][dim], so within a block the layers that two ranks
have in common are one contiguous stretch for each head. The one idea: *list the stretches of one block, then join what
lies next to each other on both sides*. Where both ranks hold the same layers, neighbouring heads join; where they hold
the same part, neighbouring blocks join, and a read between equal shapes has as few ranges as it had with one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from antiphon_kvtransfer.plane import KvPart, PeerRank
from antiphon_kvtransfer.transport import ReadRange


@dataclass(frozen=True, slots=True)
class Source:
    """One rank of a peer, and what a local rank reads from it."""

    peer: PeerRank
    part: KvPart


def in_common(one: KvPart, other: KvPart) -> KvPart | None:
    """What both parts hold; None: nothing."""
    both = KvPart(
        max(one.layer_begin, other.layer_begin),
        min(one.layer_end, other.layer_end),
        max(one.head_begin, other.head_begin),
        min(one.head_end, other.head_end),
    )
    return both if both.layers > 0 and both.heads > 0 else None


def sources_of(part: KvPart, own_rank: int, peers: Sequence[PeerRank]) -> list[Source]:
    """From which of the peer's ranks this rank reads what. Together they give its whole part, each byte once.

    Ranks of the peer with the same part are copies of each other (a head held by several ranks): readers spread over
    them by their own rank.
    """
    copies: dict[KvPart, list[PeerRank]] = {}
    for peer in sorted(peers, key=lambda one: one.rank):
        copies.setdefault(peer.part, []).append(peer)
    sources = []
    for held, holders in copies.items():
        wanted = in_common(part, held)
        if wanted is not None:
            sources.append(Source(holders[own_rank % len(holders)], wanted))
    return sources


def ranges_between(
    local: KvPart, remote: KvPart, remote_blocks: Sequence[int], local_blocks: Sequence[int], layer_bytes: int
) -> list[ReadRange]:
    """Ranges that read what both parts hold of each remote block into the local block beside it.

    `layer_bytes`: of one layer of one head of one block, the same on both sides. Nothing in common: no range.
    """
    stretches = _stretches(local, remote, layer_bytes)
    local_stride = local.layers * local.heads * layer_bytes
    remote_stride = remote.layers * remote.heads * layer_bytes
    ranges: list[ReadRange] = []
    begin_remote = begin_local = length = 0
    for remote_block, local_block in zip(remote_blocks, local_blocks, strict=True):
        for stretch in stretches:
            at_remote = remote_block * remote_stride + stretch.remote_offset_bytes
            at_local = local_block * local_stride + stretch.local_offset_bytes
            if length and at_remote == begin_remote + length and at_local == begin_local + length:
                length += stretch.length_bytes
                continue
            if length:
                ranges.append(ReadRange(begin_remote, begin_local, length))
            begin_remote, begin_local, length = at_remote, at_local, stretch.length_bytes
    if length:
        ranges.append(ReadRange(begin_remote, begin_local, length))
    return ranges


def _stretches(local: KvPart, remote: KvPart, layer_bytes: int) -> list[ReadRange]:
    """Of one block: a stretch a head, counted from the start of the block; one for all heads where they are whole."""
    both = in_common(local, remote)
    if both is None:
        return []
    # [head][layer] on both sides: a stretch is all layers in common of one head, or of all heads where they are whole.
    whole = local.layers == remote.layers == both.layers
    heads_at_once = both.heads if whole else 1
    return [
        ReadRange(
            ((head - remote.head_begin) * remote.layers + both.layer_begin - remote.layer_begin) * layer_bytes,
            ((head - local.head_begin) * local.layers + both.layer_begin - local.layer_begin) * layer_bytes,
            both.layers * heads_at_once * layer_bytes,
        )
        for head in range(both.head_begin, both.head_end, heads_at_once)
    ]
