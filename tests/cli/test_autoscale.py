"""`antiphon serve --autoscale` as real processes: under load a pool grows, its new worker comes back in its role when
it is killed, and one signal ends all. (Changes of roles, starts and ends one by one: `test_autoscale_crew`.)"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from antiphon.__main__ import run
from antiphon_telemetry.exit import ExitCode

from tests.cli.test_serve import assert_gone
from tests.support.serve import ServeProcess, serve_process

HOUSE = ("--engine", "timed", "--port", "0", "--threads", "1", "--kv-blocks", "2048", "--drain-timeout-s", "0.5")
SLOW = ("--timed-base-ms", "5", "--timed-per-new-token-ms", "0.3")
"""A prompt of 1,000 tokens takes one worker 300 ms."""


class Load:
    """Prompts that nobody has seen, so many a second, until it is left; what was not answered as it should."""

    def __init__(self, base_url: str, per_second: float) -> None:
        self._client = httpx.Client(base_url=base_url, trust_env=False, timeout=60)
        self._model = self._client.get("/v1/models").json()["data"][0]["id"]
        self._every_s = 1.0 / per_second
        self._stop = threading.Event()
        self._asking: list[threading.Thread] = []
        self._pacing = threading.Thread(target=self._pace)
        self.answered = 0
        self.failures: list[str] = []

    def __enter__(self) -> Load:
        self._pacing.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._pacing.join()
        for thread in self._asking:
            thread.join()
        self._client.close()

    def _pace(self) -> None:
        while not self._stop.wait(self._every_s):
            thread = threading.Thread(target=self._ask, args=(len(self._asking),))
            self._asking.append(thread)
            thread.start()

    def _ask(self, number: int) -> None:
        body = {
            "model": self._model,
            "prompt": [number % 200, number // 200, *range(200)] * 5,
            "max_tokens": 4,
            "ignore_eos": True,
        }
        try:
            answer = self._client.post("/v1/completions", json=body)
        except httpx.HTTPError as error:
            self.failures.append(repr(error))
            return
        if answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 4:
            self.answered += 1
        else:
            self.failures.append(answer.text)


def status(house: ServeProcess, name: str) -> dict[str, Any]:
    ready = json.loads(Path(house.children()[name].environ()["ANTIPHON_READY_FILE"]).read_bytes())
    return httpx.get(f"http://{ready['status_address']}/status", trust_env=False).json()


def role_of(house: ServeProcess, name: str) -> str | None:
    """None while it starts."""
    try:
        return str(status(house, name)["role"])
    except (KeyError, OSError, httpx.HTTPError):
        return None


def eventually(condition: Callable[[], bool], deadline_s: float = 60.0) -> None:
    ends_at = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < ends_at
        time.sleep(0.1)


def test_under_load_a_pool_grows_and_its_worker_comes_back_in_its_role_when_it_is_killed(tmp_path: Path) -> None:
    """Whether a worker of the other pool changes its role, or one ends and another starts, is the law's to say."""
    record = tmp_path / "decisions.jsonl"
    promise = ("--sla-ttft-ms", "600", "--sla-window-s", "20", "--record-decisions", str(record))
    with serve_process(*HOUSE, *SLOW, *promise, "--autoscale", "--decode", "2") as house:
        with Load(house.base_url, per_second=8.0) as load:
            grown = r"autoscale: (?:(decode-\d) becomes a prefill worker|(prefill-\d) is started)"
            name = next(filter(None, house.wait_for(grown).groups()))
            eventually(lambda: role_of(house, name) == "prefill")

            # The role that it had when it was killed is what it comes back with; nobody takes its place meanwhile.
            so_far = len(house.lines)
            house.children()[name].kill()
            house.wait_for(f"{name} is back", after=so_far)
            eventually(lambda: role_of(house, name) == "prefill")
            eventually(lambda: len(house.children()) == 5)
            assert not [line for line in house.lines[so_far:] if "is started" in line]
        assert not load.failures
        assert load.answered > 0

        children = list(house.children().values())
        house.interrupt()
        assert house.wait() == ExitCode.OK, house.text
        assert_gone(children)
    assert run(["simulate", "replay", str(record)], {}) == ExitCode.OK


def test_a_house_without_a_promise_is_refused() -> None:
    assert run(["serve", "--autoscale"], {}) == ExitCode.BAD_INPUT
