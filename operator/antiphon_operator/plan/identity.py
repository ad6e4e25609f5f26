"""Ids of replicas, and jitter: what would be random elsewhere is a hash here, so that a plan can be made again.

A replica's id is its ordinal, run through a permutation of all texts of four letters and digits that the Model's uid,
the role and the revision choose. So two ordinals never give one id (a hash could), and an id tells nothing of its
ordinal. An ordinal is never given twice: the next one stands in the Pool's memory, which is applied before the
StatefulSet that uses it, and every StatefulSet carries its own, so that a lost write of either loses nothing.
"""

from __future__ import annotations

import hashlib
import math

ID_CHARACTERS = 4
_ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789"
_IDS: int = len(_ALPHABET) ** ID_CHARACTERS


def _number(*parts: object) -> int:
    return int.from_bytes(hashlib.sha256("\0".join(map(str, parts)).encode()).digest()[:8], "big")


def replica_id(model_uid: str, role: str, revision: str, ordinal: int) -> str:
    """Four characters of [a-z0-9], another one for each of the first 1,679,616 ordinals."""
    factor = _number("factor", model_uid, role, revision) % _IDS
    while math.gcd(factor, _IDS) != 1:
        factor += 1
    number = (ordinal * factor + _number("offset", model_uid, role, revision)) % _IDS
    characters = []
    for _ in range(ID_CHARACTERS):
        number, index = divmod(number, len(_ALPHABET))
        characters.append(_ALPHABET[index])
    return "".join(characters)


def jitter(*parts: object) -> float:
    """A number from 0 up to 1 that depends on `parts` alone."""
    return _number("jitter", *parts) / 2**64
