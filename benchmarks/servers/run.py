"""Whole servers side by side on the same bf16 weights: ours, llama.cpp's, and `transformers`' generate as the floor.

Every round asks each of them the same cases in turn, so that a slow minute of the machine hits all of them; the table
shows medians over the rounds and the ratios of those. Prompts are fresh random token ids (no cache hits), all output
lengths are fixed, and both servers get two threads.

    python benchmarks/servers/run.py --llama-server PATH/llama-server --rounds 3

llama.cpp's server is built from its own source, apart from this project (README.md beside this file says how).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
from antiphon_engine.torch_engine.demo import default_cache_dir, prepare_demo
from antiphon_engine.torch_engine.gguf_files import write_gguf

_PROMPT_TOKENS = 512
_OUTPUT_TOKENS = 128
_CONCURRENT = (1, 4, 8, 16)
_FIRST_ID, _LAST_ID = 1000, 40_000
_START_S = 120.0


@dataclass(frozen=True)
class Answer:
    ttft_ms: float
    tpot_ms: float


def _prompt(dice: random.Random) -> list[int]:
    return [dice.randrange(_FIRST_ID, _LAST_ID) for _ in range(_PROMPT_TOKENS)]


class Server(ABC):
    """A server under test: how to ask it for exactly so many tokens."""

    name: str
    url: str

    @abstractmethod
    def request(self, prompt: list[int], tokens: int) -> tuple[str, dict[str, Any]]:
        """Path and body."""

    async def ask(self, client: httpx.AsyncClient, prompt: list[int], tokens: int) -> Answer:
        path, body = self.request(prompt, tokens)
        started = time.perf_counter()
        arrivals: list[float] = []
        async with client.stream("POST", self.url + path, json=body) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if line.startswith("data: ") and line != "data: [DONE]" and '"error"' not in line:
                    arrivals.append(time.perf_counter())
        assert arrivals, "nothing was answered"
        spread_ms = (arrivals[-1] - arrivals[0]) * 1e3
        return Answer((arrivals[0] - started) * 1e3, spread_ms / max(1, tokens - 1))


class Ours(Server):
    name = "antiphon"

    def request(self, prompt: list[int], tokens: int) -> tuple[str, dict[str, Any]]:
        body = {"model": "demo", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        return "/v1/completions", body | {"stream": True}


class LlamaCpp(Server):
    name = "llama.cpp"

    def request(self, prompt: list[int], tokens: int) -> tuple[str, dict[str, Any]]:
        body = {"prompt": prompt, "n_predict": tokens, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
        return "/completion", body | {"stream": True}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def _process(command: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("ANTIPHON_")}
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True, env=environment)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


async def _until_answers(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    async with asyncio.timeout(_START_S), httpx.AsyncClient(trust_env=False) as client:
        while True:
            if process.poll() is not None:
                said = await asyncio.to_thread(log.read_text)
                raise RuntimeError(f"{process.args!r} ended with {process.returncode}:\n{said[-3000:]}")
            with contextlib.suppress(httpx.HTTPError):
                if (await client.get(url)).status_code == 200:
                    return
            await asyncio.sleep(0.2)


@contextlib.asynccontextmanager
async def _ours(threads: int, folder: Path) -> AsyncIterator[Server]:
    """One worker that does both, behind the gateway: what `antiphon serve --prefill 0 --decode 1` starts."""
    port, log = _free_port(), folder / "antiphon.log"
    command = [sys.executable, "-m", "antiphon", "serve", "--prefill", "0", "--decode", "1", "--port", str(port)]
    with _process([*command, "--threads", str(threads), "--kv-blocks", "400"], log) as process:
        await _until_answers(f"http://127.0.0.1:{port}/ready", process, log)
        server = Ours()
        server.url = f"http://127.0.0.1:{port}"
        yield server


@contextlib.asynccontextmanager
async def _llama_cpp(binary: str, gguf: Path, threads: int, folder: Path) -> AsyncIterator[Server]:
    port, log = _free_port(), folder / "llama.log"
    command = [binary, "-m", str(gguf), "--host", "127.0.0.1", "--port", str(port), "-t", str(threads)]
    command += ["-tb", str(threads), "-c", str(16 * 1024), "-np", "16", "-kvu", "-cram", "0"]
    with _process(command, log) as process:
        await _until_answers(f"http://127.0.0.1:{port}/health", process, log)
        server = LlamaCpp()
        server.url = f"http://127.0.0.1:{port}"
        yield server


class Generate:
    """`transformers`' generate in this process: prompts of equal length in one batch."""

    name = "transformers"

    def __init__(self, folder: Path, threads: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        self._torch = torch
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)

    def run(self, prompts: Sequence[list[int]], tokens: int) -> float:
        """Seconds for the whole batch."""
        batch = self._torch.tensor(prompts)
        started = time.perf_counter()
        with self._torch.inference_mode():
            self._model.generate(
                batch,
                attention_mask=self._torch.ones_like(batch),
                do_sample=False,
                min_new_tokens=tokens,
                max_new_tokens=tokens,
                pad_token_id=0,
            )
        return time.perf_counter() - started


async def _measure(server: Server, dice: random.Random) -> dict[str, float]:
    """One round of one server: prefill tokens/s, output tokens/s at each concurrency, TTFT and TPOT medians."""
    found: dict[str, float] = {}
    limits = httpx.Limits(max_connections=64)
    async with httpx.AsyncClient(timeout=600, trust_env=False, limits=limits) as client:
        alone = [await server.ask(client, _prompt(dice), 1) for _ in range(3)]
        found["prefill_tokens_per_s"] = _PROMPT_TOKENS / (min(answer.ttft_ms for answer in alone) / 1e3)
        for concurrent in _CONCURRENT:
            started = time.perf_counter()
            answers = await asyncio.gather(
                *(server.ask(client, _prompt(dice), _OUTPUT_TOKENS) for _ in range(concurrent))
            )
            elapsed_s = time.perf_counter() - started
            found[f"output_tokens_per_s_{concurrent}"] = concurrent * _OUTPUT_TOKENS / elapsed_s
            found[f"ttft_ms_{concurrent}"] = statistics.median(answer.ttft_ms for answer in answers)
            found[f"tpot_ms_{concurrent}"] = statistics.median(answer.tpot_ms for answer in answers)
    return found


def _measure_generate(model: Generate, dice: random.Random) -> dict[str, float]:
    found = {"prefill_tokens_per_s": _PROMPT_TOKENS / min(model.run([_prompt(dice)], 1) for _ in range(3))}
    for concurrent in _CONCURRENT:
        elapsed_s = model.run([_prompt(dice) for _ in range(concurrent)], _OUTPUT_TOKENS)
        found[f"output_tokens_per_s_{concurrent}"] = concurrent * _OUTPUT_TOKENS / elapsed_s
    return found


async def _run(options: argparse.Namespace, folder: Path) -> dict[str, list[dict[str, float]]]:
    model_folder = prepare_demo(default_cache_dir(), lambda text: print(text, file=sys.stderr))
    gguf = folder / "demo-bf16.gguf" if options.llama_server else None
    results: dict[str, list[dict[str, float]]] = {}
    async with contextlib.AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(_ours(options.threads, folder))]
        if gguf is not None:
            write_gguf(model_folder, gguf)
            peer = _llama_cpp(options.llama_server, gguf, options.threads, folder)
            servers.append(await stack.enter_async_context(peer))
        generate = Generate(model_folder, options.threads)
        for number in range(options.rounds + 1):  # the first one warms up and is not counted
            for server in servers:
                measured = await _measure(server, random.Random(f"{number} {server.name}"))
                print(f"round {number}: {server.name}: {measured}", file=sys.stderr)
                if number:
                    results.setdefault(server.name, []).append(measured)
            if not number:
                continue
            measured = await asyncio.to_thread(_measure_generate, generate, random.Random(f"{number} generate"))
            print(f"round {number}: {generate.name}: {measured}", file=sys.stderr)
            results.setdefault(generate.name, []).append(measured)
    return results


def _table(results: dict[str, list[dict[str, float]]]) -> str:
    medians = {
        name: {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
        for name, rounds in results.items()
    }
    ours = medians["antiphon"]
    peers = [name for name in medians if name != "antiphon"]
    lines = ["| figure | antiphon | " + " | ".join(f"{name} | ratio" for name in peers) + " |"]
    lines.append("|" + "---|" * (2 + 2 * len(peers)))
    for key, value in ours.items():
        cells = [f"| {key} | {value:.1f} |"]
        for name in peers:
            other = medians[name].get(key)
            cells.append(f" {other:.1f} | {value / other:.2f} |" if other else " - | - |")
        lines.append("".join(cells))
    return "\n".join(lines)


def _told(options: argparse.Namespace) -> list[str]:
    """The options of this run, without the folders of the machine it ran on."""
    peer = ["--llama-server", Path(options.llama_server).name] if options.llama_server else []
    return [*peer, f"--threads {options.threads}", f"--rounds {options.rounds}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-server", default="", help="llama.cpp's llama-server binary (left out: not compared)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    # Told to end, end as with Ctrl-C: servers are stopped on the way out.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    load_before = os.getloadavg()
    with tempfile.TemporaryDirectory() as folder:
        results = asyncio.run(_run(options, Path(folder)))
    print(_table(results))
    now = datetime.now(UTC)
    record = {
        "command": " ".join(["python benchmarks/servers/run.py", *_told(options)]),
        "time": now.isoformat(timespec="seconds"),
        "machine": platform.processor() or platform.machine(),
        "load_before": load_before,
        "rounds": results,
    }
    target = Path(__file__).parent / "results" / f"{now:%Y%m%dT%H%M%SZ}.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps(record, indent=1) + "\n")
    print(f"\nraw results: {target.relative_to(Path.cwd())}", file=sys.stderr)


if __name__ == "__main__":
    main()
