"""`hf://org/name[/file.gguf][@revision]` instead of a folder or file, against a stand-in of the hub."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
from antiphon.__main__ import run
from antiphon.fetch_errors import FetchError
from antiphon.model_reference import Reference, fetched, for_worker, located, parse_reference
from antiphon.prepare import prepare
from antiphon_telemetry.exit import ExitCode
from antiphon_worker.engines import create_engine
from antiphon_worker.options import WorkerOptions

from tests.support.gguf_models import Type, write_gguf_of
from tests.support.hub import COMMIT, Hub, running_hub
from tests.support.models import write_tiny_model
from tests.support.serve import serve_process

NOWHERE = "http://127.0.0.1:9"
LATER = "89abcdef" * 5
TINY = Reference("org/tiny", "")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with running_hub() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf-home"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield server


def folder_in(cache: Path, commit: str = COMMIT) -> Path:
    return cache / "models" / f"org--tiny--{commit}"


@pytest.mark.parametrize(
    ("model", "reference"),
    [
        ("demo", None),
        ("/models/hf", None),
        ("hf://org/tiny", TINY),
        ("hf://org/tiny@main", Reference("org/tiny", "main")),
        ("hf://org/tiny@refs/pr/1", Reference("org/tiny", "refs/pr/1")),
        ("/models/tiny.gguf", None),
        ("hf://org/tiny/tiny-Q8_0.gguf", Reference("org/tiny", "", "tiny-Q8_0.gguf")),
        ("hf://org/tiny/q/tiny.gguf@v1", Reference("org/tiny", "v1", "q/tiny.gguf")),
        ("hf://org/tiny.gguf", Reference("org/tiny.gguf", "")),
    ],
)
def test_what_is_a_reference(model: str, reference: Reference | None) -> None:
    assert parse_reference(model) == reference


@pytest.mark.parametrize(
    "model",
    ["hf://tiny", "hf://org/tiny/more", "hf://org/tiny@", "hf://org/ti ny", "hf://", "hf://org/tiny/.gguf/a"],
)
def test_what_names_no_model_is_refused(model: str) -> None:
    with pytest.raises(FetchError, match=r"say hf://org/name or hf://org/name@revision") as caught:
        parse_reference(model)
    assert caught.value.exit_code == ExitCode.BAD_INPUT


def test_workers_serve_what_was_prepared_without_a_network(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert prepare("hf://org/tiny", "torch", str(tmp_path)) == ExitCode.OK
    count = len(hub.downloads)
    monkeypatch.setenv("HF_ENDPOINT", NOWHERE)
    options = for_worker(WorkerOptions(model="hf://org/tiny", cache_dir=str(tmp_path)), print)
    assert (options.model, options.name) == (str(folder_in(tmp_path)), "org/tiny")
    named = for_worker(WorkerOptions(model="hf://org/tiny", cache_dir=str(tmp_path), name="mine"), print)
    assert named.name == "mine"
    assert len(hub.downloads) == count


def test_a_worker_on_its_own_fetches(hub: Hub, tmp_path: Path) -> None:
    assert located(TINY, tmp_path, print) == folder_in(tmp_path)
    assert (folder_in(tmp_path) / "model.safetensors").is_file()


def test_a_branch_that_moved_is_followed_by_prepare_alone(hub: Hub, tmp_path: Path) -> None:
    assert fetched(TINY, tmp_path, print) == folder_in(tmp_path)
    hub.commit = LATER
    assert located(TINY, tmp_path, print) == folder_in(tmp_path)
    assert fetched(TINY, tmp_path, print) == folder_in(tmp_path, LATER)
    assert located(TINY, tmp_path, print) == folder_in(tmp_path, LATER)


def test_a_hub_out_of_reach_is_told_and_what_is_here_is_served(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched(TINY, tmp_path, print)
    monkeypatch.setenv("HF_ENDPOINT", NOWHERE)
    said: list[str] = []
    assert fetched(TINY, tmp_path, said.append) == folder_in(tmp_path)
    assert "cannot be reached" in said[0]
    assert f"going on with what is here: {folder_in(tmp_path)}" in said[0]
    with pytest.raises(FetchError, match="cannot be reached"):
        fetched(Reference("org/tiny", "other"), tmp_path, print)


@pytest.mark.parametrize(
    ("model", "sentence", "code"),
    [
        ("hf://org/missing", "no such model org/missing", ExitCode.BAD_INPUT),
        ("hf://org/gated", "accept its terms on", ExitCode.BAD_INPUT),
        ("hf://org/private", "name a token in the environment variable HF_TOKEN", ExitCode.BAD_INPUT),
        ("hf://org/tiny@v9", "name a branch, tag or commit of it in the revision after the @", ExitCode.BAD_INPUT),
        ("hf://org/pickled", "has no safetensors files", ExitCode.BAD_INPUT),
        ("hf://org/broken", "answers 500", ExitCode.UNAVAILABLE),
        ("hf://org/missing/a.gguf", "no such model org/missing", ExitCode.BAD_INPUT),
        ("hf://org/gated/a.gguf", "accept its terms on", ExitCode.BAD_INPUT),
        ("hf://org/tiny/a.gguf", "has no file a.gguf: correct the name after hf://", ExitCode.BAD_INPUT),
        ("hf://org/tiny/a.gguf@v9", "name a branch, tag or commit", ExitCode.BAD_INPUT),
    ],
)
def test_a_refusal_is_a_sentence_for_the_command_line(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str, sentence: str, code: ExitCode
) -> None:
    assert prepare(model, "torch", str(tmp_path)) == code
    said = capsys.readouterr().err
    assert sentence in said
    assert "spec." not in said


def test_no_network_and_nothing_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", NOWHERE)
    assert prepare("hf://org/tiny", "torch", str(tmp_path)) == ExitCode.UNAVAILABLE
    assert "check the network, HTTPS_PROXY" in capsys.readouterr().err


def test_a_worker_says_why_it_cannot_start(
    hub: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["worker", "hf://org/gated", "--cache-dir", str(tmp_path)], {}) == ExitCode.BAD_INPUT
    assert "org/gated is gated" in caplog.text + capsys.readouterr().err


def test_what_was_fetched_is_loaded_and_has_the_repositorys_name(hub: Hub, tmp_path: Path) -> None:
    tiny = write_tiny_model(tmp_path / "tiny")
    hub.files = {path.name: path.read_bytes() for path in tiny.iterdir()}
    given = WorkerOptions(model="hf://org/tiny", dtype="float32", kv_blocks=16, cache_dir=str(tmp_path / "cache"))
    options = for_worker(given, print)
    engine = create_engine(dataclasses.replace(options, cache_dir=""))  # where compiled kernels are
    assert engine.info.model == "org/tiny"
    assert engine.info.architecture == "LlamaForCausalLM"


def test_serve_ends_with_the_hubs_refusal_before_any_worker_starts(hub: Hub, tmp_path: Path) -> None:
    arguments = ("hf://org/gated", "--port", "0", "--cache-dir", str(tmp_path))
    with serve_process(*arguments) as house:
        assert house.wait() == ExitCode.BAD_INPUT
    assert "the model cannot be prepared: org/gated is gated" in house.text
    assert "starting" not in house.text


# ------------------------------------------------------------------ one file of a repository


FILES_OF = {"tiny-Q8_0.gguf": b"eight", "q/tiny-F16.gguf": b"sixteen", "big-00001-of-00002.gguf": b"half"}


def test_one_file_is_fetched_and_noted_beside_the_repository(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.files |= FILES_OF
    reference = Reference("org/tiny", "main", "q/tiny-F16.gguf")
    path = fetched(reference, tmp_path, print)
    assert path == tmp_path / "models" / f"org--tiny--q--tiny-F16.gguf--{COMMIT}" / "q" / "tiny-F16.gguf"
    assert path.read_bytes() == b"sixteen"
    assert hub.downloads == ["q/tiny-F16.gguf"]
    fetched(TINY, tmp_path, print)
    assert folder_in(tmp_path).is_dir()
    monkeypatch.setenv("HF_ENDPOINT", NOWHERE)
    assert located(reference, tmp_path, print) == path
    options = for_worker(WorkerOptions(model="hf://org/tiny/q/tiny-F16.gguf@main", cache_dir=str(tmp_path)), print)
    assert (options.model, options.name) == (str(path), "org/tiny/q/tiny-F16.gguf")


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ("hf://org/tiny", "with them, or one of its GGUF files, it has big-00001-of-00002.gguf, q/tiny-F16.gguf,"),
        ("hf://org/tiny/tiny-Q4.gguf", "no file tiny-Q4.gguf: correct the name after hf://; it has big-00001-of-00002"),
        ("hf://org/tiny/big-00001-of-00002.gguf", "is one of 2 parts of a model, which are not served"),
    ],
)
def test_a_repository_of_gguf_files_says_which_it_has(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str, sentence: str
) -> None:
    hub.files = FILES_OF
    assert prepare(model, "torch", str(tmp_path)) == ExitCode.BAD_INPUT
    assert sentence in capsys.readouterr().err
    assert not hub.downloads


def test_a_file_that_was_fetched_is_checked_and_loaded(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_gguf_of(write_tiny_model(tmp_path / "tiny"), tmp_path / "tiny.gguf", Type.Q8_0)
    hub.files = {"tiny.gguf": file.read_bytes(), "broken.gguf": b"GGUF"}
    cache = str(tmp_path / "cache")
    assert prepare("hf://org/tiny/broken.gguf", "torch", cache) == ExitCode.BAD_INPUT
    assert "is damaged (it is cut off)" in capsys.readouterr().err
    assert prepare("hf://org/tiny/tiny.gguf", "torch", cache) == ExitCode.OK
    given = WorkerOptions(model="hf://org/tiny/tiny.gguf", dtype="float32", kv_blocks=16, cache_dir=cache)
    engine = create_engine(dataclasses.replace(for_worker(given, print), cache_dir=""))
    assert engine.info.model == "org/tiny/tiny.gguf"
    assert engine.info.architecture == "LlamaForCausalLM"
