"""Sampling noise as a function: the same (seed, choice, position, vocabulary id) gives the same number everywhere.

Philox4x32-10, the counter-based generator of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as
1, 2, 3" (SC 2011), with the 64-bit seed as its key. There is no state to keep, to move with a request, or to share
between ranks: a rank that holds a part of the vocabulary computes the noise of just its ids. Only integers are used,
so every machine agrees.

An id's noise has 48 bits in two parts. The *coarse* 16 bits decide almost everything and cost an eighth of a Philox
call each (counter = (id // 8, position, choice, 0); half-word id % 8); the *fine* 32 bits (counter = (id // 4,
position, choice, 1); word id % 4) are asked for only where the coarse ones leave a choice open.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IdArray = NDArray[np.int64]

_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_HIGH_SHIFT = np.uint64(32)

COARSE_STEPS = 1 << 16
_COARSE_STREAM = 0
_FINE_STREAM = 1
_COARSE_IDS = 8
_FINE_IDS = 4


def philox4x32(counters: NDArray[np.uint64], key: tuple[int, int]) -> NDArray[np.uint64]:
    """[4, n] counter words -> [4, n] output words, each of 32 bits held in 64, in the memory of `counters`."""
    word0, word1, word2, word3 = counters
    product0, product1 = np.empty_like(word0), np.empty_like(word0)
    key0, key1 = key
    for _ in range(_ROUNDS):
        np.multiply(word0, _MULTIPLIERS[0], out=product0)
        np.multiply(word2, _MULTIPLIERS[1], out=product1)
        np.right_shift(product1, _HIGH_SHIFT, out=word0)
        np.bitwise_xor(word0, word1, out=word0)
        np.bitwise_xor(word0, np.uint64(key0), out=word0)
        np.right_shift(product0, _HIGH_SHIFT, out=word2)
        np.bitwise_xor(word2, word3, out=word2)
        np.bitwise_xor(word2, np.uint64(key1), out=word2)
        np.bitwise_and(product1, _LOW, out=word1)
        np.bitwise_and(product0, _LOW, out=word3)
        key0 = (key0 + _KEY_STEPS[0]) & 0xFFFFFFFF
        key1 = (key1 + _KEY_STEPS[1]) & 0xFFFFFFFF
    return counters


@dataclass(frozen=True, slots=True)
class Noise:
    """The noise of one sampling decision, over the vocabulary."""

    seed: int
    choice: int
    position: int

    def coarse_of_all(self, vocab_size: int) -> NDArray[np.uint16]:
        """The upper 16 bits for the ids 0 .. vocab_size - 1."""
        groups = np.arange(-(-vocab_size // _COARSE_IDS), dtype=np.uint64)
        return _half_words(self._philox(groups, _COARSE_STREAM)).reshape(-1)[:vocab_size]

    def coarse_of(self, ids: IdArray) -> NDArray[np.uint16]:
        """The upper 16 bits for some ids."""
        words = self._philox((ids // _COARSE_IDS).astype(np.uint64), _COARSE_STREAM)
        return _half_words(words)[np.arange(len(ids)), ids % _COARSE_IDS]

    def uniform_of(self, ids: IdArray) -> FloatArray:
        """All 48 bits, as numbers in (0, 1)."""
        count = len(ids)
        groups = np.concatenate((ids // _COARSE_IDS, ids // _FINE_IDS)).astype(np.uint64)
        streams = np.repeat(np.array((_COARSE_STREAM, _FINE_STREAM), dtype=np.uint64), count)
        words = self._philox(groups, streams)
        coarse = _half_words(words[:, :count])[np.arange(count), ids % _COARSE_IDS]
        fine = words[ids % _FINE_IDS, np.arange(count, 2 * count)]
        return (coarse.astype(np.float64) * 2.0**32 + fine.astype(np.float64) + 0.5) * 2.0**-48

    def _philox(self, groups: NDArray[np.uint64], stream: int | NDArray[np.uint64]) -> NDArray[np.uint64]:
        counters = np.empty((4, len(groups)), dtype=np.uint64)
        counters[0] = groups
        counters[1] = self.position & 0xFFFFFFFF
        counters[2] = self.choice & 0xFFFFFFFF
        counters[3] = stream
        return philox4x32(counters, (self.seed & 0xFFFFFFFF, (self.seed >> 32) & 0xFFFFFFFF))


def _half_words(words: NDArray[np.uint64]) -> NDArray[np.uint16]:
    """[4, n] words -> [n, 8] half-words, the lower half of a word first."""
    return np.ascontiguousarray(words.T.astype("<u4")).view("<u2").astype(np.uint16, copy=False)
