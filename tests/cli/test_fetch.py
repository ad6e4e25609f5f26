"""`antiphon fetch` against a stand-in of the hub: what arrives, what never half arrives, and what it says."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from antiphon.fetch import fetch
from antiphon.fetch_errors import FetchError
from antiphon_operator.render.weights import read_source_result
from antiphon_telemetry.exit import ExitCode
from huggingface_hub import close_session

from tests.support.hub import COMMIT, FILES, Hub, running_hub

WANTED = {"config.json", "model.safetensors", "tokenizer.json"}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with running_hub() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf-home"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield server


def folder_in(to: Path) -> Path:
    return to / f"org--tiny--{COMMIT}"


def start(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "antiphon", "fetch", *arguments]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ.copy())


def visible(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if not path.name.startswith(".")}


def test_safetensors_and_json_arrive_and_never_pickles_code_or_a_second_copy(hub: Hub, tmp_path: Path) -> None:
    told = json.loads(fetch("hf://org/tiny", "main", tmp_path / "models"))
    folder = folder_in(tmp_path / "models")
    assert told == {
        "revision": COMMIT,
        "size_bytes": sum(len(FILES[name]) for name in WANTED),
        "path": str(folder),
    }
    assert {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()} == {
        name: FILES[name] for name in WANTED
    }
    assert visible(tmp_path / "models") == {folder.name}


def test_resolving_says_the_same_and_downloads_nothing(hub: Hub, tmp_path: Path) -> None:
    told = fetch("hf://org/tiny", "", tmp_path / "models", resolve_only=True)
    assert not (tmp_path / "models").exists()
    assert told == fetch("hf://org/tiny", "", tmp_path / "models")


def test_the_operator_reads_what_a_resolving_job_says(hub: Hub) -> None:
    weights = read_source_result(fetch("hf://org/tiny", "", Path("/models"), resolve_only=True))
    assert (weights.revision, weights.path) == (COMMIT, f"/models/{folder_in(Path()).name}")
    assert weights.size_bytes == sum(len(FILES[name]) for name in WANTED)


def test_a_file_of_a_repository_has_a_folder_of_its_own_in_which_the_operator_finds_it(
    hub: Hub, tmp_path: Path
) -> None:
    hub.files["q/tiny.gguf"] = b"weights"
    told = fetch("hf://org/tiny/q/tiny.gguf", "", Path("/models"), resolve_only=True)
    weights = read_source_result(told)
    assert (weights.revision, weights.size_bytes) == (COMMIT, len(b"weights"))
    assert weights.folder == f"org--tiny--q--tiny.gguf--{COMMIT}"
    assert weights.path == f"/models/{weights.folder}/q/tiny.gguf"
    fetch("hf://org/tiny/q/tiny.gguf", "", tmp_path)
    fetch("hf://org/tiny/q/tiny.gguf", COMMIT, tmp_path)
    assert (tmp_path / weights.folder / "q" / "tiny.gguf").read_bytes() == b"weights"
    assert hub.downloads == ["q/tiny.gguf"]


def test_what_is_there_is_not_fetched_again_and_needs_no_network(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = fetch("hf://org/tiny", "main", tmp_path)
    count = len(hub.downloads)
    assert fetch("hf://org/tiny", "main", tmp_path) == first
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert fetch("hf://org/tiny", COMMIT, tmp_path) == first
    assert len(hub.downloads) == count


def test_a_token_is_used(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FetchError, match=r"spec\.source\.secretRef") as caught:
        fetch("hf://org/private", "main", tmp_path)
    assert caught.value.exit_code == ExitCode.BAD_INPUT
    monkeypatch.setenv("HF_TOKEN", "good")
    assert json.loads(fetch("hf://org/private", "main", tmp_path))["revision"] == COMMIT


@pytest.mark.parametrize(
    ("uri", "revision", "sentence", "code"),
    [
        ("hf://org/missing", "main", r"no such model org/missing .*: correct spec\.source\.uri", ExitCode.BAD_INPUT),
        ("hf://org/gated", "main", r"is gated: accept its terms .* spec\.source\.secretRef", ExitCode.BAD_INPUT),
        ("hf://org/wrong-token", "main", r"refuses the token .* spec\.source\.secretRef", ExitCode.BAD_INPUT),
        ("hf://org/tiny", "v9", r"no such revision 'v9' .* spec\.source\.revision", ExitCode.BAD_INPUT),
        ("hf://org/pickled", "main", r"no safetensors files", ExitCode.BAD_INPUT),
        ("hf://org/broken", "main", r"answers 500", ExitCode.UNAVAILABLE),
        ("pvc://claim", "", r"is not `hf://org/name`", ExitCode.BAD_INPUT),
    ],
)
def test_each_refusal_names_the_field_to_look_at(
    hub: Hub, tmp_path: Path, uri: str, revision: str, sentence: str, code: ExitCode
) -> None:
    with pytest.raises(FetchError, match=sentence) as caught:
        fetch(uri, revision, tmp_path)
    assert caught.value.exit_code == code
    assert visible(tmp_path) <= {"hf-home"}


def test_no_network_is_told_from_a_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(FetchError, match=r"cannot be reached .* spec\.proxy") as caught:
        fetch("hf://org/tiny", "main", tmp_path)
    assert caught.value.exit_code == ExitCode.UNAVAILABLE


def test_too_little_space_is_told_before_anything_is_downloaded(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("antiphon.fetch.shutil.disk_usage", lambda path: usage)
    with pytest.raises(FetchError, match=r"are free: make the claim larger"):
        fetch("hf://org/tiny", "main", tmp_path)
    assert not hub.downloads
    assert not folder_in(tmp_path).exists()


def test_a_killed_download_leaves_no_folder_and_the_next_one_keeps_its_whole_files(hub: Hub, tmp_path: Path) -> None:
    hub.hold_half.set()
    with start("hf://org/tiny", "--revision", "main", "--to", str(tmp_path)) as process:
        assert hub.half_sent.wait(60)
        assert process.stderr is not None
        arrived = 0
        while arrived < len(WANTED) - 1:
            arrived += " is here" in process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == ExitCode.FAILURE
    assert not folder_in(tmp_path).exists()
    hub.hold_half.clear()
    count = len(hub.downloads)
    fetch("hf://org/tiny", "main", tmp_path)
    assert (folder_in(tmp_path) / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert hub.downloads[count:] == ["model.safetensors"]


def test_two_at_once_end_well_and_download_once(hub: Hub, tmp_path: Path) -> None:
    log = tmp_path / "termination"
    arguments = ("hf://org/tiny", "--to", str(tmp_path / "models"), "--termination-log")
    with start(*arguments, f"{log}-1") as one, start(*arguments, f"{log}-2") as two:
        assert (one.wait(60), two.wait(60)) == (ExitCode.OK, ExitCode.OK)
    told = Path(f"{log}-1").read_text()
    assert told == Path(f"{log}-2").read_text()
    assert json.loads(told)["path"] == str(folder_in(tmp_path / "models"))
    assert sorted(hub.downloads) == sorted(WANTED)
    assert visible(tmp_path / "models") == {folder_in(tmp_path).name}


def test_the_error_and_its_code_reach_the_termination_log(hub: Hub, tmp_path: Path) -> None:
    log = tmp_path / "termination"
    arguments = ("hf://org/gated", "--to", str(tmp_path), "--termination-log", str(log))
    with start(*arguments) as process:
        assert process.wait(60) == ExitCode.BAD_INPUT
    assert "org/gated is gated" in log.read_text()


def test_the_models_certificates_count_beside_the_usual_ones(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, usual = tmp_path / "own.crt", tmp_path / "usual.crt"
    own.write_text("own")
    usual.write_text("usual")
    monkeypatch.setattr("antiphon.fetch._USUAL_CERTIFICATES", (tmp_path / "nowhere", usual))
    monkeypatch.setenv("SSL_CERT_FILE", str(own))
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(own))
    close_session()  # of the client, which has read them already
    with pytest.raises(FetchError, match=r"spec\.caBundle"):  # for these are no certificates
        fetch("hf://org/tiny", "main", tmp_path, resolve_only=True)
    assert Path(os.environ["SSL_CERT_FILE"]).read_text().split() == ["usual", "own"]
