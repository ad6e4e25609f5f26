"""When a pool may become smaller, and when it is left alone. Growing waits for nothing.

A pool shrinks to the most that it was found to need throughout a start and a drain, as both were measured: what would
be undone before it had an effect is not begun. One that grew in the last `CALM_MS` keeps one replica, or one in twenty,
more than that, as long as the load is the one for which it grew: at a constant load what is needed comes and goes by
one, and so the size does not.

Someone who has just begun to look (a new operator) has to look for as long first. Where a pool was made smaller and, at
the same load, soon larger again, it is calm for twice as long the next time, and twice again after that.

What someone else set is a fact and no fault: such a size is left alone for `CALM_MS`, and counts from then on.
"""

from __future__ import annotations

import msgspec

from antiphon_policy.scaling.records import PoolMemory, PoolView, Wanted

CALM_MS = 600_000.0
"""At a constant load no size goes up and then down within this time."""

_MOST_RELAPSES = 3
_AT_THAT_LOAD = 1.2
"""A load up to so many times that of before is the same load."""

_MARGIN_SHARE = 0.05


def noticed(memory: PoolMemory, pool: PoolView, needed: int, now_ms: float) -> PoolMemory:
    """With what this look has shown."""
    edited = memory.edits is not None and memory.edits != pool.edits
    oldest_ms = now_ms - CALM_MS * 2**_MOST_RELAPSES
    peaks = [one for one in memory.wanted if one.size > needed and one.at_ms >= oldest_ms]
    return msgspec.structs.replace(
        memory,
        since_ms=now_ms if memory.since_ms is None else memory.since_ms,
        wanted=(*peaks, Wanted(now_ms, needed)),
        edits=pool.edits,
        edited_ms=now_ms if edited else memory.edited_ms,
    )


def is_left_alone(memory: PoolMemory, now_ms: float) -> bool:
    return memory.edited_ms is not None and now_ms - memory.edited_ms < CALM_MS


def least_size(memory: PoolMemory, pool: PoolView, rps: float, now_ms: float) -> int:
    """What it may shrink to now, at a load of `rps`; its size: it may not."""
    soon = _peak(memory, pool.start_ms + pool.drain_ms, now_ms)
    if soon is None:
        return pool.size
    calm_ms = CALM_MS * 2**memory.relapses
    is_young = memory.added_ms is not None and now_ms - memory.added_ms < calm_ms
    if is_young and rps * _AT_THAT_LOAD >= memory.added_rps:
        soon += max(1, round(_MARGIN_SHARE * pool.size))
    return min(pool.size, soon)


def spare_size(memory: PoolMemory, pool: PoolView, now_ms: float) -> int:
    """What it could do with if workers left it for the other pool, which takes seconds and not a start; its size: it
    has none to spare. One that was made larger lately keeps what it has."""
    if memory.added_ms is not None and now_ms - memory.added_ms < CALM_MS:
        return pool.size
    soon = _peak(memory, pool.start_ms + pool.drain_ms, now_ms)
    return pool.size if soon is None else min(pool.size, soon)


def resized(memory: PoolMemory, before: int, after: int, rps: float, now_ms: float) -> PoolMemory:
    """With what was decided."""
    if after > before:
        removed_ms = memory.removed_ms
        again = (
            removed_ms is not None
            and now_ms - removed_ms < CALM_MS * 2**memory.relapses
            and rps <= _AT_THAT_LOAD * memory.removed_rps
        )
        relapses = min(_MOST_RELAPSES, memory.relapses + 1) if again else 0
        return msgspec.structs.replace(memory, added_ms=now_ms, added_rps=rps, relapses=relapses)
    if after < before:
        return msgspec.structs.replace(memory, removed_ms=now_ms, removed_rps=rps)
    return memory


def _peak(memory: PoolMemory, within_ms: float, now_ms: float) -> int | None:
    """The most that was needed in that time; None: it was not looked at for so long."""
    if memory.since_ms is None or now_ms - memory.since_ms < within_ms:
        return None
    return max((one.size for one in memory.wanted if one.at_ms >= now_ms - within_ms), default=None)
