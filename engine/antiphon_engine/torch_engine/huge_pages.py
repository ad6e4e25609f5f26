"""Memory for what is read in whole every step: large anonymous mappings, in huge pages where the system has them.

Huge pages spare the page walks that a stream through hundreds of megabytes would otherwise wait for.
"""

from __future__ import annotations

import mmap


def map_region(length_bytes: int) -> mmap.mmap:
    """A private, zeroed region whose pages appear when they are first written. Raises MemoryError."""
    try:
        region = mmap.mmap(-1, length_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(
            f"no memory for a region of {length_bytes / 1e9:.1f} GB: free some, or ask for less"
        ) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            region.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            pass  # a kernel built without huge pages: the same memory in small ones
    return region


class Arena:
    """Hands out pieces of large regions; all of them live as long as the arena."""

    _CHUNK_BYTES = 64 * 1024 * 1024
    _ALIGN_BYTES = 64

    def __init__(self) -> None:
        self._regions: list[mmap.mmap] = []
        self._used_bytes = 0

    def take(self, length_bytes: int) -> memoryview:
        """`length_bytes` zeroed bytes, aligned to a cache line. Raises MemoryError."""
        start = -(-self._used_bytes // self._ALIGN_BYTES) * self._ALIGN_BYTES
        if not self._regions or start + length_bytes > len(self._regions[-1]):
            self._regions.append(map_region(max(length_bytes, self._CHUNK_BYTES)))
            start = 0
        self._used_bytes = start + length_bytes
        return memoryview(self._regions[-1])[start : self._used_bytes]
