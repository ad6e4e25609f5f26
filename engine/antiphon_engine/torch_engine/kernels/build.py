"""Compiles `decoder.cpp` for this very CPU, once, into the cache folder, and loads it.

The library's name is a hash of everything that determines it (source, compiler, flags, CPU), so a stale one is never
loaded and a shared cache folder may serve different machines. It is written under another name and renamed, so that
processes which compile at the same time cannot see each other's half-written files: the last one wins, with the same
content. Without a compiler, or when the build fails, there is one log line and no library: the torch path runs.

The interface is plain C and called through ctypes: no torch headers, a build of seconds, and the interpreter lock is
free while a step computes.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

# The library uses the OpenMP runtime that torch has loaded (same soname), so both share one team of threads.
import torch

from antiphon_engine.torch_engine.demo import default_cache_dir

logger = logging.getLogger("antiphon.engine.kernels")

SOURCE = Path(__file__).with_name("decoder.cpp")
_FLAGS = ("-O3", "-std=c++20", "-march=native", "-fopenmp", "-fPIC", "-shared", "-fno-math-errno")
_BUILD_TIMEOUT_S = 180.0


class BuildFailed(Exception):
    """The kernels could not be compiled or loaded here."""


class FolderNotWritable(BuildFailed):
    """The folder that should keep the library takes no files: it is part of an image, or another user's."""


@functools.cache
def kernel_library(folder: Path | None = None) -> ctypes.CDLL | None:
    """The compiled kernels, kept in `folder` (default: the cache folder's `kernels`), or None, said in one log line.

    Where that folder takes no files, the library is compiled for this process alone and its file is removed at once.
    """
    kept = folder or default_cache_dir() / "kernels"
    try:
        try:
            return load(build(kept))
        except FolderNotWritable as error:
            logger.info("kernels are compiled for this process only: %s", error)
            with tempfile.TemporaryDirectory(prefix="antiphon-kernels-") as scratch:
                return load(build(Path(scratch)))
    except BuildFailed as error:
        logger.warning("no compiled kernels, slower torch operations are used instead: %s", error)
        return None


def build(folder: Path, compiler: str | None = None, extra_flags: Sequence[str] = ()) -> Path:
    """The library's path in `folder`, compiled first if it is not there. Raises BuildFailed."""
    compiler = compiler or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise BuildFailed("no C++ compiler on the PATH: install g++")
    flags = (*_FLAGS, *extra_flags)
    target = folder / f"decoder-{_fingerprint(compiler, flags)}.so"
    if target.exists():
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=folder, prefix="build-") as scratch:
            output = Path(scratch) / target.name
            _run([compiler, *flags, str(SOURCE), "-o", str(output)])
            os.replace(output, target)
    except OSError as error:
        raise FolderNotWritable(f"the kernels cannot be written to {folder}: {error}") from error
    logger.info("kernels compiled path=%s", target)
    return target


def load(path: Path) -> ctypes.CDLL:
    """Raises BuildFailed."""
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildFailed(f"{path} cannot be loaded: {error}") from error


def _fingerprint(compiler: str, flags: Sequence[str]) -> str:
    digest = hashlib.sha256(SOURCE.read_bytes())
    for part in (_run([compiler, "--version"]), " ".join(flags), _cpu_features(), torch.__version__):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:16]


def _cpu_features() -> str:
    """What -march=native looks at, near enough."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    wanted = ("flags", "Features", "model name", "CPU part")
    first = {line.split(":")[0].strip(): line for line in reversed(lines) if line.startswith(wanted)}
    return platform.machine() + "".join(first[name] for name in sorted(first))


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_BUILD_TIMEOUT_S, check=True)
    except subprocess.CalledProcessError as error:
        detail = (error.stderr or "").strip().splitlines()
        raise BuildFailed(f"{command[0]} failed: {detail[0] if detail else error}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildFailed(f"{command[0]} did not run: {error}") from error
    return done.stdout
