"""Public load tools against `antiphon serve`, unchanged: what they say beside what the gateway's own metrics say.

`--tools` is a folder with one virtual environment for each tool (README: how to make them); nothing of them is a
dependency of this project. The house is real: with `--engine torch` the demo model with prefill and decode apart, with
`--engine timed` workers that wait where another computes. Each case is one run of one tool against one endpoint; the
tool's own files are kept as it wrote them, in `--output`, with `run.json` and `table.md` of all cases beside them,
written anew after each case.

    python -m benchmarks.load_tools.run --tools DIR --engine torch --output benchmarks/load_tools/results/torch
    python -m benchmarks.load_tools.run --tools DIR --engine timed --output benchmarks/load_tools/results/timed
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import httpx
import msgspec
from antiphon_engine.timed_tokenizer import CHAT_TEMPLATE, byte_tokenizer_json

from benchmarks.load_tools.counted import Counted, Page, between, read
from benchmarks.load_tools.tools import COMMANDS, TOLD, Case, Told, hub_cache
from tests.support.models import demo_model
from tests.support.serve import running_serve

DEADLINE_S = 900.0
"""Of one run of a tool."""
HOUSES = {
    "torch": ("--prefill", "1", "--decode", "1", "--threads", "1"),
    "timed": (
        *("--engine", "timed", "--prefill", "2", "--decode", "2"),
        *("--timed-base-ms", "20", "--timed-per-new-token-ms", "0.4", "--timed-per-sequence-ms", "0.5"),
    ),
}
CASES = {
    "torch": (
        Case("guidellm", "chat", 4, 24, 200, 48),
        Case("guidellm", "completions", 4, 24, 200, 48),
        Case("aiperf", "chat", 4, 24, 200, 48),
        Case("aiperf", "completions", 4, 24, 200, 48, own_count=True),
    ),
    "timed": (
        Case("guidellm", "responses", 8, 48, 512, 64),
        Case("aiperf", "messages", 8, 48, 512, 64),
        Case("guidellm", "chat", 8, 48, 512, 64, turns=4),
        Case("aiperf", "responses", 8, 48, 512, 64, own_count=True),
    ),
}
_NOT_KEPT = ("logs", ".aiperf_results_ready.json")


class Ran(msgspec.Struct, frozen=True):
    case: Case
    at: str
    command: str
    load_average: tuple[float, float]
    """Before and after, over one minute."""
    told: Told
    counted: Counted


class Result(msgspec.Struct):
    command: str
    house: str
    processors: int
    versions: dict[str, str]
    ran: list[Ran]


def version(tools: Path, tool: str) -> str:
    python = str(tools / tool / "bin" / "python")
    words = f"import importlib.metadata; print(importlib.metadata.version({tool!r}))"
    return subprocess.run([python, "-c", words], check=True, capture_output=True, text=True).stdout.strip()


def tokenizer_folder(engine: str, scratch: Path) -> Path:
    """The model's; of timed workers, what their cards say."""
    if engine == "torch":
        return demo_model()
    scratch.mkdir()
    (scratch / "tokenizer.json").write_bytes(byte_tokenizer_json())
    words = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": CHAT_TEMPLATE}
    (scratch / "tokenizer_config.json").write_text(json.dumps(words))
    (scratch / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return scratch


class House:
    def __init__(self, url: str) -> None:
        self.url = url
        self._client = httpx.Client(base_url=url, timeout=30.0, trust_env=False)
        self.model: str = self._client.get("/v1/models").json()["data"][0]["id"]

    def page(self) -> Page:
        return read(self._client.get("/metrics").text)


def run_case(case: Case, house: House, tools: Path, cache: Path, folder: Path) -> Ran:
    words = COMMANDS[case.tool](case, house.url, house.model)
    environment = os.environ | {
        "PATH": f"{tools / case.tool / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_CACHE": str(cache),
        "COLUMNS": "200",
    }
    folder.mkdir()
    load, before = os.getloadavg()[0], house.page()
    with (folder / "console.txt").open("w") as console:
        ended = subprocess.run(
            words, cwd=folder, env=environment, stdout=console, stderr=subprocess.STDOUT, timeout=DEADLINE_S
        )
    if ended.returncode:
        tail = (folder / "console.txt").read_text()[-3000:]
        raise RuntimeError(f"{case.name}: {words[0]} ended with {ended.returncode}:\n{tail}")
    counted = between(before, house.page(), case.endpoint)
    loads = (round(load, 1), round(os.getloadavg()[0], 1))
    at = datetime.now(UTC).isoformat(timespec="seconds")
    return Ran(case, at, " ".join(words), loads, TOLD[case.tool](folder), counted)


def table(ran: Sequence[Ran]) -> str:
    """Markdown: each figure as the tool tells it, and as the gateway counted it."""
    rows = [
        "| case | requests, errors | prompt tokens | output tokens | TTFT mean, ms | ITL mean, ms | load average |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in ran:
        told, counted = one.told, one.counted
        prompt = f"{_or_none(told.prompt_tokens)} / {counted.prompt_tokens}"
        output = f"{_or_none(told.output_tokens)} / {counted.output_tokens}"
        if told.own_prompt_tokens is not None:
            prompt += f" (own count {told.own_prompt_tokens})"
            output += f" (own count {told.own_output_tokens})"
        if counted.cached_tokens:
            prompt += f", {counted.cached_tokens} cached"
        rows.append(
            f"| {one.case.name}, {one.case.concurrency} at once "
            f"| {told.completed}, {told.errors} / {counted.requests}, {counted.other_statuses + counted.cancelled} "
            f"| {prompt} | {output} | {told.ttft_mean_ms:.1f} / {counted.ttft_mean_ms:.1f} "
            f"| {told.itl_mean_ms:.2f} / {counted.itl_mean_ms:.2f} "
            f"| {one.load_average[0]} to {one.load_average[1]} |"
        )
    return "\n".join(rows) + "\n"


def _or_none(count: int | None) -> str:
    return "not read" if count is None else str(count)


def measured(settings: argparse.Namespace, scratch: Path) -> Iterator[Ran]:
    """Each case as it ends, its files in `--output`."""
    tools: Path = settings.tools.resolve()
    cache = scratch / "hub"
    hub_cache(cache, tokenizer_folder(settings.engine, scratch / "tokenizer"))
    with running_serve(*HOUSES[settings.engine]) as url:
        house = House(url)
        for case in CASES[settings.engine]:
            if settings.only is None or case.name in settings.only:
                ran = run_case(case, house, tools, cache, scratch / case.name)
                kept = settings.output / case.name
                shutil.rmtree(kept, ignore_errors=True)
                shutil.copytree(scratch / case.name, kept, ignore=shutil.ignore_patterns(*_NOT_KEPT))
                yield ran


def keep(result: Result, folder: Path) -> None:
    (folder / "run.json").write_bytes(msgspec.json.format(msgspec.json.encode(result)) + b"\n")
    (folder / "table.md").write_text(table(result.ran))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", type=Path, required=True, help="folder with the tools' virtual environments")
    parser.add_argument("--engine", choices=list(HOUSES), default="timed")
    parser.add_argument("--only", nargs="+", default=None, help="these cases of the table, others stay as they are")
    parser.add_argument("--output", type=Path, required=True, help="folder for the results")
    settings = parser.parse_args()
    settings.output.mkdir(parents=True, exist_ok=True)
    before = settings.output / "run.json"
    known = msgspec.json.decode(before.read_bytes(), type=Result).ran if settings.only and before.exists() else []
    ran = {one.case.name: one for one in known}
    result = Result(
        command=f"python -m benchmarks.load_tools.run --tools DIR --engine {settings.engine}",
        house=" ".join(["antiphon serve", *HOUSES[settings.engine]]),
        processors=os.cpu_count() or 0,
        versions={"python": sys.version.split()[0], **{tool: version(settings.tools, tool) for tool in COMMANDS}},
        ran=[],
    )
    with tempfile.TemporaryDirectory(prefix="load-tools-") as folder:
        for one in measured(settings, Path(folder)):
            ran[one.case.name] = one
            # In the order of the cases.
            result.ran = [ran[case.name] for case in CASES[settings.engine] if case.name in ran]
            keep(result, settings.output)
            print(table([one]).splitlines()[-1], flush=True)
    wrong = [one.case.name for one in result.ran if one.told.errors or one.counted.other_statuses]
    if wrong:
        raise SystemExit(f"errors in {', '.join(wrong)}")


if __name__ == "__main__":
    main()
