"""The compiled kernels: built once, never half, never needed."""

from __future__ import annotations

import logging
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from antiphon_engine.executor import SampleSpec, SequenceStep
from antiphon_engine.interface import Sampling
from antiphon_engine.torch_engine.executor import TorchExecutor
from antiphon_engine.torch_engine.kernels import build as kernel_build
from antiphon_engine.torch_engine.kernels.build import BuildFailed, build, kernel_library, load
from antiphon_engine.torch_engine.kernels.native import NativeDecoder, with_types
from antiphon_engine.torch_engine.kv_cache import KvCache
from antiphon_engine.torch_engine.memory_estimate import kv_shape
from antiphon_engine.torch_engine.step_batch import build_batch

from tests.support.torch_engine import GreedySampler, drive, info_for, prompts_for, requests_for, tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where libraries are kept, as in a cache folder: each is compiled by the first test that needs it."""
    return tmp_path_factory.mktemp("kernels")


def test_built_once_and_found_again(folder: Path) -> None:
    first = build(folder)
    written = first.stat().st_mtime_ns
    assert build(folder) == first
    assert first.stat().st_mtime_ns == written
    assert {path.suffix for path in folder.iterdir()} == {".so"}, "scratch files stay behind"
    assert load(first).antiphon_panel() in (8, 16, 32)


def test_a_changed_source_is_another_library(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = build(folder)
    _replace_source(tmp_path, monkeypatch)
    second = build(folder)
    assert second != first
    assert load(second).antiphon_panel() == 4


def _replace_source(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By one of a line, for tests of what is done with a source, whatever it says."""
    changed = folder / "changed.cpp"
    changed.write_text('extern "C" int antiphon_panel() { return 4; }\n')
    monkeypatch.setattr(kernel_build, "SOURCE", changed)


@pytest.mark.exhaustive
def test_processes_that_build_at_once_all_get_a_whole_library(tmp_path: Path) -> None:
    code = (
        "import pathlib, sys\n"
        "from antiphon_engine.torch_engine.kernels.build import build, load\n"
        "print(load(build(pathlib.Path(sys.argv[1]))).antiphon_panel())"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
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


def test_where_the_cache_folder_takes_no_files_the_process_compiles_for_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _replace_source(tmp_path, monkeypatch)
    in_the_way = tmp_path / "cache"
    in_the_way.write_text("as unwritable as the file system of an image, for every user")
    left_before = set(Path(tempfile.gettempdir()).glob("antiphon-kernels-*"))
    library = kernel_library(in_the_way / "kernels")
    assert library is not None
    assert library.antiphon_panel() == 4
    assert set(Path(tempfile.gettempdir()).glob("antiphon-kernels-*")) <= left_before


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


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names x86 instruction sets")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("march", ["x86-64", "x86-64-v3"])
def test_narrower_vectors_give_the_same_logits(march: str, dtype: torch.dtype, folder: Path) -> None:
    """The source is right for every register width, not only for this CPU's: SSE and AVX2 builds beside it."""
    prompt = prompts_for(3)[2]
    logits = []
    for flags in ((), (f"-march={march}",)):
        model = tiny_model("qwen3", dtype)
        cache = KvCache(kv_shape(model.config, 16), 6, dtype)
        decoder = NativeDecoder(with_types(load(build(folder, extra_flags=flags))), model, cache, threads=2)
        for tokens, start in ((prompt[:-1], 0), (prompt[-1:], len(prompt) - 1)):
            spec = SampleSpec(Sampling(), 0, prompt, (), frozenset())
            step = [SequenceStep("r", tokens, start, range(6), spec)]
            batch = build_batch(step, block_tokens=16, num_blocks=6, vocab_size=200, max_context_tokens=512)
            logits.append(decoder.logits(batch))
    assert with_types(load(build(folder, extra_flags=(f"-march={march}",)))).panel in (8, 16)
    tolerance = 1e-3 if dtype == torch.float32 else 5e-2
    for wide, narrow in zip(logits[:2], logits[2:], strict=True):
        assert torch.allclose(wide, narrow, rtol=tolerance, atol=tolerance * float(wide.abs().max()))
