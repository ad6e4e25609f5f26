"""The compiled kernels: built once, never half, never needed."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from antiphon_engine.torch_engine.executor import TorchExecutor
from antiphon_engine.torch_engine.kernels import build as kernel_build
from antiphon_engine.torch_engine.kernels.build import BuildFailed, build, kernel_library, load

from tests.support.torch_engine import GreedySampler, drive, info_for, prompts_for, requests_for, tiny_model


def test_built_once_and_found_again(tmp_path: Path) -> None:
    first = build(tmp_path)
    written = first.stat().st_mtime_ns
    assert build(tmp_path) == first
    assert first.stat().st_mtime_ns == written
    assert [path.name for path in tmp_path.iterdir()] == [first.name], "scratch files stay behind"
    assert load(first).antiphon_panel() in (8, 16, 32)


def test_a_changed_source_is_another_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = build(tmp_path)
    changed = tmp_path / "changed.cpp"
    changed.write_text(kernel_build.SOURCE.read_text() + "\n// changed\n")
    monkeypatch.setattr(kernel_build, "SOURCE", changed)
    assert build(tmp_path) != first


def test_processes_that_build_at_once_all_get_a_whole_library(tmp_path: Path) -> None:
    code = (
        "import pathlib, sys\n"
        "from antiphon_engine.torch_engine.kernels.build import build, load\n"
        "print(load(build(pathlib.Path(sys.argv[1]))).antiphon_panel())"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    answers = {process.communicate(timeout=100)[0].strip() for process in processes}
    assert len(answers) == 1
    assert answers <= {"8", "16", "32"}
    assert [path.suffix for path in tmp_path.iterdir()] == [".so"]


@pytest.mark.parametrize(
    ("script", "message"),
    [("#!/bin/sh\necho 'no such flag' >&2\nexit 1\n", "no such flag"), ("not a program", "did not run")],
)
def test_a_compiler_that_fails_is_named(tmp_path: Path, script: str, message: str) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text(script)
    compiler.chmod(0o700)
    with pytest.raises(BuildFailed, match=message):
        build(tmp_path / "out", str(compiler))


def test_a_damaged_library_is_not_fatal(tmp_path: Path) -> None:
    damaged = tmp_path / "decoder.so"
    damaged.write_bytes(b"\x7fELF")
    with pytest.raises(BuildFailed, match=r"decoder\.so"):
        load(damaged)


def test_without_a_compiler_the_torch_path_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning, and the same tokens."""
    monkeypatch.setattr(kernel_build.shutil, "which", lambda name: None)
    caplog.set_level(logging.WARNING, logger="antiphon.engine.kernels")
    outputs = []
    for cache_dir in (tmp_path, None):
        model = tiny_model("llama")
        executor = TorchExecutor(
            model,
            info_for(model, torch.float32, 16),
            num_blocks=32,
            block_tokens=16,
            dtype=torch.float32,
            sampler=GreedySampler(),
            kernels=cache_dir is not None,
            cache_dir=cache_dir,
        )
        outputs.append(drive(executor, requests_for(prompts_for(2), 16, 8, [1 << 30])))
    assert kernel_library(tmp_path / "kernels") is None
    assert outputs[0] == outputs[1]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "no C++ compiler" in caplog.text
