"""A grammar's masks on their way to the sampling rank.

The driver has the grammars: it waits for the step's masks and sends them with the step. So ranks need no llguidance
and keep no state of a grammar; a step with structured answers starts once their masks are there, of which most has
been computed since the step before was committed.
"""

from __future__ import annotations

import numpy as np

from antiphon_engine.executor import KnownMask, TokenMask
from antiphon_engine.gang.messages import PackedMask

_ID_BYTES = 4


def packed_mask(mask: TokenMask) -> PackedMask | None:
    """Waits for it. None: there is none, and whatever is sampled is dropped."""
    bits = mask.bits()
    if bits is None:
        return None
    flags = np.unpackbits(np.frombuffer(bits, dtype=np.uint8), bitorder="little")
    if np.count_nonzero(flags) * _ID_BYTES < len(bits):
        return PackedMask(b"", np.flatnonzero(flags).astype(np.int32).tobytes(), len(bits))
    return PackedMask(bits, b"", len(bits))


def unpacked_mask(packed: PackedMask) -> KnownMask:
    if packed.bits:
        return KnownMask(packed.bits)
    flags = np.zeros(packed.size_bytes * 8, dtype=np.uint8)
    flags[np.frombuffer(packed.ids, dtype=np.int32)] = 1
    return KnownMask(np.packbits(flags, bitorder="little").tobytes())
