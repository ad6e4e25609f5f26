"""What a worker's steps are computed by, as a name: workers of one model and one name should be equally fast.

Gateways compare names, and price a worker that has measured little by its equals (`antiphon_policy.equals`). So the
name says what decides over speed (processor, threads, share of a container, engine, number format, parallel shape), and
nothing that differs between equal machines. The model is not part of it: its card's digest is told beside it.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path

from antiphon_worker.options import WorkerOptions

CPU_INFO = Path("/proc/cpuinfo")
CPU_SHARE = Path("/sys/fs/cgroup/cpu.max")


def hardware_name(options: WorkerOptions, *, cpu_info: Path = CPU_INFO, cpu_share: Path = CPU_SHARE) -> str:
    """Such as `torch bfloat16 tp1 pp1 ep1, AMD EPYC 9B14 x8`. Timed workers all are `timed`: one that is told to wait
    longer is a slow machine among equals."""
    if options.engine == "timed":
        return "timed"
    shape = f"tp{options.tensor_parallel} pp{options.pipeline_parallel} ep{options.expert_parallel}"
    return f"{options.engine} {options.dtype} {shape}, {_processor(cpu_info)} x{_threads(options.threads, cpu_share)}"


def _processor(cpu_info: Path) -> str:
    try:
        for line in cpu_info.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name" and value.strip():
                return " ".join(value.split())
    except OSError:
        pass  # not Linux: the general name will do
    return platform.processor() or platform.machine() or "unknown processor"


def _threads(asked_for: int, cpu_share: Path) -> str:
    """Threads that compute, and the cores' worth of time that the container may use where that is less."""
    if asked_for > 0:
        threads = asked_for
    else:
        threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    cores = _share_of_container(cpu_share)
    return f"{threads}" if cores is None or cores >= threads else f"{threads} on {cores:g} cores"


def _share_of_container(cpu_share: Path) -> float | None:
    """None: no limit, or none that can be read."""
    try:
        quota, period = cpu_share.read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None
