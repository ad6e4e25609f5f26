"""The local memory of a transport: the pool's region, and a small scratch region behind it.

Measuring a link means to read some MiB for real, and such reads must not land in live blocks. So every transport owns
scratch memory and registers it beside the pool. The one idea: *both share one space of local offsets*. Offsets below
`region.length_bytes` name the pool, the `scratch_bytes` offsets after it name scratch memory; no range may lie in
both. Peers can read the pool only.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable, Sequence

from antiphon_kvtransfer.transport import ReadRange, Region, TransportError

SCRATCH_BYTES = 4 << 20
"""Enough for a transfer to reach its full rate, too little to matter."""


class LocalMemory:
    def __init__(self, region: Region, scratch_bytes: int = SCRATCH_BYTES) -> None:
        self.region = region
        self.scratch_bytes = scratch_bytes
        # Anonymous pages: page-aligned, and none is touched before the first measurement.
        scratch = mmap.mmap(-1, scratch_bytes)
        self.scratch_address = ctypes.addressof(ctypes.c_ubyte.from_buffer(scratch))
        self._scratch = memoryview(scratch)
        self._pool = memoryview((ctypes.c_ubyte * region.length_bytes).from_address(region.address)).cast("B")

    def address(self, local_offset_bytes: int, length_bytes: int) -> int:
        """Where a range of local offsets lies. Raises TransportError when it is in neither region."""
        pool = self.region.length_bytes
        end = local_offset_bytes + length_bytes
        if local_offset_bytes >= 0 and length_bytes > 0:
            if end <= pool:
                return self.region.address + local_offset_bytes
            if local_offset_bytes >= pool and end <= pool + self.scratch_bytes:
                return self.scratch_address + local_offset_bytes - pool
        raise TransportError(
            f"local range [{local_offset_bytes}, {end}) is neither inside the pool of {pool} bytes nor inside the "
            f"{self.scratch_bytes} scratch bytes behind it"
        )

    def view(self, local_offset_bytes: int, length_bytes: int) -> memoryview:
        """The memory of a range of local offsets, writable, no copy."""
        self.address(local_offset_bytes, length_bytes)
        pool = self.region.length_bytes
        if local_offset_bytes < pool:
            return self._pool[local_offset_bytes : local_offset_bytes + length_bytes]
        return self._scratch[local_offset_bytes - pool : local_offset_bytes - pool + length_bytes]

    def pool_view(self, offset_bytes: int, length_bytes: int) -> memoryview:
        """A range that a peer wants to read: inside the pool, or TransportError."""
        end = offset_bytes + length_bytes
        if offset_bytes < 0 or length_bytes <= 0 or end > self.region.length_bytes:
            raise TransportError(
                f"range [{offset_bytes}, {end}) is not inside the pool of {self.region.length_bytes} bytes"
            )
        return self._pool[offset_bytes:end]


def check_ranges(memory: LocalMemory, ranges: Sequence[ReadRange], remote_bytes: int) -> None:
    """Raise TransportError unless all ranges are inside both sides' memory and there is at least one."""
    if not ranges:
        raise TransportError("a read needs at least one range")
    for part in ranges:
        memory.address(part.local_offset_bytes, part.length_bytes)
        end = part.remote_offset_bytes + part.length_bytes
        if part.remote_offset_bytes < 0 or end > remote_bytes:
            raise TransportError(
                f"remote range [{part.remote_offset_bytes}, {end}) is not in the peer's pool of {remote_bytes} bytes"
            )


def total_bytes(ranges: Iterable[ReadRange]) -> int:
    return sum(part.length_bytes for part in ranges)
