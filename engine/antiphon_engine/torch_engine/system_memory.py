"""How much memory this process may still take, as far as the system tells: machine and control groups.

A model that does not fit must be refused before it is loaded: afterwards the kernel ends the process without a word.
Files that cannot be read (no cgroup, no /proc) set no limit.
"""

from __future__ import annotations

from pathlib import Path


def available_memory_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """The least of what the machine has available and what each enclosing control group still allows."""
    limits = [_machine(proc), _cgroup_v1(cgroup / "memory")]
    for group in _groups(proc, cgroup):
        limits.append(_cgroup_v2(group))
    known = [limit for limit in limits if limit is not None]
    return min(known) if known else None


def _machine(proc: Path) -> int | None:
    for line in _lines(proc / "meminfo"):
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return None


def _groups(proc: Path, cgroup: Path) -> list[Path]:
    """This process's version 2 group and those around it. Inside a container its root is the mount itself."""
    groups = [cgroup]
    for line in _lines(proc / "self" / "cgroup"):
        hierarchy, _, path = line.split(":", 2)
        if hierarchy == "0":
            group = cgroup
            for part in Path(path).parts[1:]:
                group = group / part
                groups.append(group)
    return groups


def _cgroup_v2(group: Path) -> int | None:
    return _remaining(group / "memory.max", group / "memory.current", group / "memory.stat", "inactive_file")


def _cgroup_v1(group: Path) -> int | None:
    return _remaining(
        group / "memory.limit_in_bytes", group / "memory.usage_in_bytes", group / "memory.stat", "total_inactive_file"
    )


def _remaining(limit_file: Path, usage_file: Path, stat_file: Path, reclaimable: str) -> int | None:
    """Limit less usage; file cache that the kernel drops under pressure does not count as used."""
    limit, usage = _number(limit_file), _number(usage_file)
    if limit is None or usage is None:
        return None
    for line in _lines(stat_file):
        name, _, value = line.partition(" ")
        if name == reclaimable:
            usage -= int(value)
    return max(0, limit - usage)


def _number(path: Path) -> int | None:
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].isdigit() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
