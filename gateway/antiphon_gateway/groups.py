"""Which workers may serve one request together, and which of such groups a new request goes to. Pure.

A *group* is one revision of one model with one card. Everything about a request stays within its group: decode and
prefill worker, fallbacks, prefix peers, links. A Model that is being rolled out has two groups for a while, and new
requests are shared out between them by the weights that the operator gives, which are their ready capacities.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Group(NamedTuple):
    """See the module."""

    model: str
    """The model's key: what its workers call it."""
    revision: str
    card_digest: str


@dataclass(frozen=True, slots=True)
class Candidate:
    """A group that can serve a request, with how many workers that can decode it (at least one)."""

    group: Group
    workers: int


def choose(
    candidates: Sequence[Candidate], weights: Mapping[str, int] | None, newest_card: str, draw: float
) -> Group | None:
    """The group for a new request; None if there is none. `draw` in [0, 1) is the only randomness.

    `weights`: of revisions; None where nobody gives any. A revision without weight is chosen only where none of those
    with weight has a worker, and then as often as it has workers. Workers of one revision that have different cards
    were started by hand: `newest_card` counts.

    Worked example: revisions a (weight 750) and b (250) have workers; draws below 0.75 give a, the others b.
    """
    if len(candidates) < 2:
        return candidates[0].group if candidates else None
    if weights is None:
        candidates = [one for one in candidates if one.group.card_digest == newest_card] or candidates
        weights = {}
    shares: dict[str, int] = {}
    for one in candidates:
        weight = weights.get(one.group.revision, 0)
        if weight > 0:
            shares[one.group.revision] = weight
    if not shares:
        for one in candidates:
            shares[one.group.revision] = shares.get(one.group.revision, 0) + one.workers
    revision = _pick(sorted(shares.items()), draw)
    own = [one for one in candidates if one.group.revision == revision]
    best = max(own, key=lambda one: (one.group.card_digest == newest_card, one.workers, one.group))
    return best.group


def _pick(shares: Sequence[tuple[str, int]], draw: float) -> str:
    at = draw * sum(share for _, share in shares)
    for name, share in shares:
        at -= share
        if at < 0:
            return name
    return shares[-1][0]
