"""`antiphon serve` as a person meets it: it starts, answers, mends itself, ends whole, and says what is wrong."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from antiphon_telemetry.exit import ExitCode

from tests.support.serve import COMMAND, ServeProcess, environment, serve_process

TIMED = ("--engine", "timed", "--port", "0", "--threads", "1", "--kv-blocks", "256")
MODEL_OF_NOBODY = "no-such-folder"


@pytest.fixture(scope="module")
def house() -> Iterator[ServeProcess]:
    with serve_process(*TIMED) as process:
        assert process.base_url
        yield process


def complete(base_url: str) -> httpx.Response:
    with httpx.Client(base_url=base_url, trust_env=False, timeout=30) as client:
        model = client.get("/v1/models").json()["data"][0]["id"]
        return client.post("/v1/completions", json={"model": model, "prompt": "one two three", "max_tokens": 5})


def completes_again(base_url: str) -> bool:
    """Whether requests succeed again before a deadline; until then a gateway may refuse, or not be there."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            if complete(base_url).status_code == 200:
                return True
        except (httpx.TransportError, IndexError):
            pass
        time.sleep(0.1)
    return False


def assert_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=20)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []


def run_to_end(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments],
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_it_answers_and_says_how_to_ask(house: ServeProcess) -> None:
    answer = complete(house.base_url)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 5
    assert f"curl {house.base_url}/v1/chat/completions" in house.text
    assert set(house.children()) == {"valkey", "prefill-0", "decode-0", "gateway"}


def test_each_process_logs_its_configuration_once_and_no_secret(house: ServeProcess) -> None:
    for name in ("prefill-0", "decode-0", "gateway"):
        lines = [line for line in house.lines if line.startswith(name) and "configuration: " in line]
        assert len(lines) == 1
        assert "redis_url=(hidden)" in lines[0]


@pytest.mark.parametrize("name", ["decode-0", "prefill-0", "gateway", "valkey"])
def test_a_crashed_child_is_started_again(house: ServeProcess, name: str) -> None:
    so_far = len(house.lines)
    house.children()[name].kill()
    house.wait_for(rf"{name} was killed by SIGKILL; starting it again in 0\.\d s", after=so_far)
    house.wait_for(f"{name} is back", after=so_far)
    assert completes_again(house.base_url), house.text


@pytest.mark.parametrize("how", ["ctrl-c", "sigterm"])
def test_one_signal_ends_everything(how: str) -> None:
    with serve_process(*TIMED, "--prefill", "0") as process:
        assert process.base_url
        children = list(process.children().values())
        assert len(children) == 3
        (folder,) = {
            Path(child.environ()["ANTIPHON_READY_FILE"]).parent for child in children if "antiphon" in child.cmdline()
        }
        if how == "ctrl-c":
            process.interrupt()
        else:
            process.send(signal.SIGTERM)
        assert process.wait() == ExitCode.OK, process.text
        assert_gone(children)
        assert not folder.exists()
        assert "killed" not in process.text


def test_ctrl_c_during_the_start_ends_everything() -> None:
    with serve_process(*TIMED) as process:
        process.wait_for("starting prefill-0")
        children = psutil.Process(process.pid).children(recursive=True)
        process.interrupt()
        assert process.wait() == ExitCode.OK, process.text
        assert_gone(children)


def test_no_child_outlives_a_supervisor_that_is_killed() -> None:
    with serve_process(*TIMED) as process:
        assert process.base_url
        children = list(process.children().values())
        assert len(children) == 4
        folder = Path(process.children()["gateway"].environ()["ANTIPHON_READY_FILE"]).parent
        process.send(signal.SIGKILL)
        assert_gone(children)
    shutil.rmtree(folder)


def test_a_port_in_use_is_told_before_anything_is_started() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = run_to_end("serve", MODEL_OF_NOBODY, "--port", port)
    assert done.returncode == ExitCode.UNAVAILABLE
    assert f"port {port} is in use by another program" in done.stderr
    assert "starting" not in done.stderr


def test_a_redis_that_does_not_answer_is_told_without_its_password() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"redis://someone:open-sesame@127.0.0.1:{closed.getsockname()[1]}"
        done = run_to_end("serve", *TIMED, "--redis-url", url)
    assert done.returncode == ExitCode.UNAVAILABLE
    assert "no Redis answers at redis://someone:***@127.0.0.1" in done.stderr
    assert "open-sesame" not in done.stderr
    assert run_to_end("serve", *TIMED, "--redis-url", "nonsense").returncode == ExitCode.BAD_INPUT


def test_a_model_folder_that_is_not_there() -> None:
    done = run_to_end("serve", MODEL_OF_NOBODY, "--port", "0")
    assert done.returncode == ExitCode.BAD_INPUT
    assert "there is no model folder 'no-such-folder'" in done.stderr
    assert "starting it again" not in done.stderr


def test_a_model_folder_with_nothing_in_it_ends_with_the_workers_words(tmp_path: Path) -> None:
    done = run_to_end("serve", str(tmp_path), "--port", "0", "--prefill", "0", "--kv-blocks", "16")
    assert done.returncode == ExitCode.BAD_INPUT, done.stderr
    assert "worker-0 cannot be started, it ended with exit code 2: " in done.stderr
    assert "starting it again" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "variables", "complaint"),
    [
        (("serve", "--decode", "many"), {}, "--decode: 'many' is not a whole number"),
        (("serve",), {"ANTIPHON_PROT": "1"}, "did you mean ANTIPHON_PORT?"),
        (("gateway",), {"ANTIPHON_QUEUE_SIZE": "x"}, "ANTIPHON_QUEUE_SIZE: 'x' is not a whole number"),
        (("worker", "--role", "cook"), {}, "--role: 'cook' is not one of prefill, decode, both"),
        (("cook",), {}, "there is no command 'cook'"),
        (("worker", "--rol", "both"), {}, "unrecognized arguments: --rol"),
    ],
)
def test_wrong_options_are_told_in_a_sentence(
    arguments: tuple[str, ...], variables: dict[str, str], complaint: str
) -> None:
    done = run_to_end(*arguments, **variables)
    assert done.returncode == ExitCode.BAD_INPUT
    assert complaint in done.stderr
    assert "Traceback" not in done.stderr
