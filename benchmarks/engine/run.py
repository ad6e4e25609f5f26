"""Measures the torch engine beside `transformers`' generate, and both against what the machine can do.

Every round runs every case once on each side, one after the other, so that both see the same machine. Cases: prefill of
512 tokens; output tokens per second of 1, 4, 8 and 16 requests that arrive at once, with 512 tokens in and 128 out
(prefill and decode mixed) and with 32 in and 128 out (decode); our step times by batch size. `transformers` gets each
case as one batch of equal prompts, which spares it all padding. Prompts are random, so that no prefix cache can help.

Limits are measured in the same run: reading 1 GB, and matrix products in each dtype.

    python benchmarks/engine/run.py [--model FOLDER] [--threads 2] [--rounds 3] [--skip-transformers]

prints a table and writes results/<time>.json with every single measurement.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers
from antiphon_engine import (
    BlockEngine,
    BlocksChanged,
    EngineListener,
    EngineRequest,
    Executor,
    SampleSpec,
    Sampling,
    SchedulerConfig,
    SequenceStep,
    StepResult,
)
from antiphon_engine.torch_engine import TorchSettings, create_torch_executor, default_cache_dir, prepare_demo

RESULTS = Path(__file__).parent / "results"
DEADLINE_S = 900.0
CONCURRENT = (1, 4, 8, 16)
PREFILL_TOKENS = 512
OUTPUT_TOKENS = 128
GREEDY = Sampling(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)


@dataclass(frozen=True)
class Measurement:
    side: str
    case: str
    tokens_per_s: float
    seconds: float


@dataclass(frozen=True)
class StepTime:
    sequences: int
    context: int
    best_ms: float
    median_ms: float


@dataclass(frozen=True)
class Limits:
    read_gigabytes_per_s: float
    gemm_gigaflop_per_s: dict[str, float]


class Prompts:
    """Random token ids, never the same prompt twice."""

    def __init__(self, vocab_size: int) -> None:
        self._generator = torch.Generator().manual_seed(int(time.time()))
        self._vocab_size = vocab_size

    def draw(self, tokens: int) -> list[int]:
        return [int(token) for token in torch.randint(10, self._vocab_size, (tokens,), generator=self._generator)]


class Ended(EngineListener):
    """Sets an event when so many requests have ended."""

    def __init__(self) -> None:
        self._left = 0
        self.done = threading.Event()
        self.failure: str | None = None

    def expect(self, requests: int) -> None:
        self._left = requests
        self.done.clear()

    def on_step(self, result: StepResult) -> None:
        for output in result.outputs:
            if output.error:
                self.failure = output.error
            if output.finish is not None:
                self._left -= 1
        if self._left <= 0 or self.failure:
            self.done.set()

    def on_blocks(self, change: BlocksChanged) -> None: ...

    def on_capacity(self) -> None: ...

    def on_failure(self, error: BaseException) -> None:
        self.failure = repr(error)
        self.done.set()


def sampling_step(tokens: Sequence[int], start: int, blocks: Sequence[int]) -> SequenceStep:
    return SequenceStep("bench", tokens, start, blocks, SampleSpec(GREEDY, 0, tokens, (), frozenset()))


def blocks_of(index: int, tokens: int, block_tokens: int) -> list[int]:
    """Disjoint blocks for sequence `index`."""
    need = -(-tokens // block_tokens)
    return list(range(index * need, (index + 1) * need))


def prefill_seconds(executor: Executor, prompts: Prompts) -> float:
    prompt = prompts.draw(PREFILL_TOKENS)
    step = [sampling_step(prompt, 0, blocks_of(0, PREFILL_TOKENS, executor.info.block_tokens))]
    start = time.perf_counter()
    executor.execute(step)
    return time.perf_counter() - start


def step_times(executor: Executor, prompts: Prompts) -> list[StepTime]:
    """Steps that decode one token of each sequence."""
    times = []
    for context in (32, 512):
        for sequences in CONCURRENT:
            blocks = [blocks_of(i, context + 32, executor.info.block_tokens) for i in range(sequences)]
            for own in blocks:
                executor.execute([sampling_step(prompts.draw(context), 0, own)])
            taken = []
            for position in range(context, context + 24):
                step = [sampling_step([position], position, own) for own in blocks]
                start = time.perf_counter()
                executor.execute(step)
                taken.append((time.perf_counter() - start) * 1e3)
            times.append(StepTime(sequences, context, min(taken), statistics.median(taken)))
    return times


class EngineBench:
    """Requests through `BlockEngine`, as a worker runs them."""

    def __init__(self, executor: Executor, prompts: Prompts) -> None:
        self._prompts = prompts
        self._listener = Ended()
        self._engine = BlockEngine(executor, SchedulerConfig(max_batch_tokens=512))
        self._engine.start(self._listener)
        self._requests = 0

    def seconds(self, concurrent: int, prompt_tokens: int) -> float:
        prompts = [self._prompts.draw(prompt_tokens) for _ in range(concurrent)]
        self._listener.expect(concurrent)
        start = time.perf_counter()
        for prompt in prompts:
            self._requests += 1
            self._engine.submit(EngineRequest(f"bench-{self._requests}", prompt, GREEDY))
        if not self._listener.done.wait(DEADLINE_S) or self._listener.failure:
            raise RuntimeError(f"requests did not end: {self._listener.failure or 'out of time'}")
        return time.perf_counter() - start

    def close(self) -> None:
        self._engine.close()


class TransformersBench:
    def __init__(self, folder: Path, dtype: torch.dtype, prompts: Prompts) -> None:
        self._model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        self._prompts = prompts

    def seconds(self, concurrent: int, prompt_tokens: int, output_tokens: int = OUTPUT_TOKENS) -> float:
        ids = torch.tensor([self._prompts.draw(prompt_tokens) for _ in range(concurrent)])
        start = time.perf_counter()
        with torch.inference_mode():
            self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=output_tokens,
                max_new_tokens=output_tokens,
                pad_token_id=0,
            )
        return time.perf_counter() - start


def best_seconds(work: Callable[[], object], repeats: int = 8) -> float:
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best


def measure_limits() -> Limits:
    data = torch.ones(1 << 28)  # 1 GB
    read = data.numel() * 4 / best_seconds(data.sum) / 1e9
    gemm = {}
    for dtype in (torch.float32, torch.bfloat16):
        left, right = torch.ones(512, 2048, dtype=dtype), torch.ones(2048, 2048, dtype=dtype)
        gemm[str(dtype).removeprefix("torch.")] = (
            2 * 512 * 2048 * 2048 / best_seconds(lambda a=left, b=right: a @ b) / 1e9  # type: ignore[misc]
        )
    return Limits(read, gemm)


def cases() -> dict[str, tuple[int, int]]:
    """Name: (concurrent, prompt tokens)."""
    mixed = {f"512 in / 128 out, {n} at once": (n, 512) for n in CONCURRENT}
    return mixed | {f"32 in / 128 out, {n} at once": (n, 32) for n in CONCURRENT}


def run_round(
    executor: Executor, engine: EngineBench, peers: dict[str, TransformersBench], prompts: Prompts
) -> list[Measurement]:
    found = []

    def note(side: str, case: str, tokens: int, seconds: float) -> None:
        found.append(Measurement(side, case, tokens / seconds, seconds))
        print(f"  {case:32} {side:24} {tokens / seconds:8.1f} tok/s", flush=True)

    case = f"prefill of {PREFILL_TOKENS}"
    note("antiphon", case, PREFILL_TOKENS, prefill_seconds(executor, prompts))
    for name, peer in peers.items():
        note(name, case, PREFILL_TOKENS, peer.seconds(1, PREFILL_TOKENS, output_tokens=1))
    for case, (concurrent, prompt_tokens) in cases().items():
        tokens = concurrent * OUTPUT_TOKENS
        note("antiphon", case, tokens, engine.seconds(concurrent, prompt_tokens))
        for name, peer in peers.items():
            note(name, case, tokens, peer.seconds(concurrent, prompt_tokens))
    return found


def table(measurements: Sequence[Measurement], steps: Sequence[StepTime], limits: Limits) -> str:
    sides = list(dict.fromkeys(one.side for one in measurements))
    others = [side for side in sides if side != "antiphon"]
    lines = ["| tok/s, best round | " + " | ".join(sides) + "".join(f" | ratio to {side}" for side in others) + " |"]
    lines.append("|" + "---|" * (1 + len(sides) + len(others)))
    for case in dict.fromkeys(one.case for one in measurements):
        best = {side: max(m.tokens_per_s for m in measurements if (m.side, m.case) == (side, case)) for side in sides}
        ratios = [f"{best['antiphon'] / best[side]:.2f}" for side in others]
        lines.append(f"| {case} | " + " | ".join([*(f"{best[side]:.0f}" for side in sides), *ratios]) + " |")
    lines += ["", "| decode step, ms | context | best | median |", "|---|---|---|---|"]
    lines += [f"| {s.sequences} sequences | {s.context} | {s.best_ms:.1f} | {s.median_ms:.1f} |" for s in steps]
    gemm = ", ".join(f"{dtype} {value:.0f}" for dtype, value in limits.gemm_gigaflop_per_s.items())
    lines += ["", f"Measured limits: read {limits.read_gigabytes_per_s:.1f} GB/s; GEMM GFLOP/s: {gemm}."]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=None, help="model folder; default: the demo model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--skip-transformers", action="store_true")
    options = parser.parse_args()
    folder = options.model or prepare_demo(default_cache_dir(), print)
    torch.set_num_threads(options.threads)
    executor = create_torch_executor(
        TorchSettings(model=str(folder), dtype="bfloat16", kv_blocks=256, threads=options.threads), print
    )
    prompts = Prompts(executor.info.vocab_size)
    peers = {}
    if not options.skip_transformers:
        peers = {
            f"transformers {name}": TransformersBench(folder, dtype, prompts)
            for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32))
        }
    started, load_before = datetime.datetime.now(datetime.UTC), os.getloadavg()[0]
    limits = measure_limits()
    prefill_seconds(executor, prompts)
    steps = step_times(executor, prompts)
    engine = EngineBench(executor, prompts)
    measurements: list[Measurement] = []
    try:
        for number in range(options.rounds):
            print(f"round {number + 1} of {options.rounds}", flush=True)
            measurements += run_round(executor, engine, peers, prompts)
    finally:
        engine.close()
    print("\n" + table(measurements, steps, limits))
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{started:%Y%m%dT%H%M%SZ}.json"
    record = {
        "started": started.isoformat(),
        "threads": options.threads,
        "load_before": load_before,
        "load_after": os.getloadavg()[0],
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "machine": platform.machine(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "limits": asdict(limits),
        "steps": [asdict(step) for step in steps],
        "measurements": [asdict(measurement) for measurement in measurements],
    }
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"\nraw results: {path}")


if __name__ == "__main__":
    main()
