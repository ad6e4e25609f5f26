"""What structured output costs and whether it holds, with the demo model.

*Schemas.* Generated ones (300 by default), most of them bounded, all in one engine, many at a time: each answer with
finish reason `stop` must validate (by `jsonschema`), each that was cut must be a legal beginning (by a matcher of its
own), and each bounded schema must end. Some are cut on purpose.

*Cost.* What a mask takes, what the sampler takes with one and without, and what a token takes in batches of equal
length with a grammar and without, in turns. All in processor time (of the thread, or of the process), which other work
on the machine moves little; tokens per second are there too.

    python benchmarks/structured/run.py [--schemas 300] [--rounds 3] [--threads 2]

prints a summary and writes results/<time>.json with every single measurement.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import random
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import torch
from antiphon_engine import (
    BlockEngine,
    BlocksChanged,
    EngineListener,
    EngineRequest,
    FinishReason,
    Grammar,
    GrammarKind,
    RequestOutput,
    Sampling,
    SchedulerConfig,
    StepResult,
)
from antiphon_engine.executor import KnownMask, SampleSpec
from antiphon_engine.torch_engine import TorchSettings, create_torch_executor
from antiphon_engine.torch_engine.sampler import Sampler
from antiphon_proto.grammars import compile_grammar, load_tokenizer
from tokenizers import Tokenizer

QUESTION = "<|im_start|>user\nGive one example as JSON.<|im_end|>\n<|im_start|>assistant\n"
WORDS = ("name", "size", "colour", "address", "items", "price", "is_open", "größe", "tags", "owner")
BOUNDED_TOKENS = 1500
"""More than any of the bounded schemas can need."""
CUT_TOKENS = 9
DEADLINE_S = 3600.0


class Answers(EngineListener):
    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.ends: dict[str, RequestOutput] = {}
        self.failure: BaseException | None = None

    def wait(self, names: Sequence[str]) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self.failure or all(name in self.ends for name in names), DEADLINE_S)
        if self.failure is not None:
            raise self.failure

    def on_step(self, result: StepResult) -> None:
        with self.changed:
            for output in result.outputs:
                self.tokens[output.request_id].extend(output.token_ids)
                if output.finish is not None:
                    self.ends[output.request_id] = output
            self.changed.notify_all()

    def on_blocks(self, change: BlocksChanged) -> None:
        pass

    def on_capacity(self) -> None:
        pass

    def on_failure(self, error: BaseException) -> None:
        with self.changed:
            self.failure = error
            self.changed.notify_all()


# ------------------------------------------------------------------ schemas


def schema_of(draw: random.Random, depth: int = 0, *, bounded: bool = True) -> dict[str, Any]:
    kinds = ["string", "integer", "number", "boolean", "enum", "pattern", "null"]
    if depth < 2:
        kinds += ["object", "object", "array", "anyOf"]
    kind = "object" if depth == 0 else draw.choice(kinds)
    match kind:
        case "string":
            return {"type": "string", "maxLength": draw.randint(0, 24)} if bounded else {"type": "string"}
        case "integer":
            low = draw.randint(-(10**6), 10**6)
            return {"type": "integer", "minimum": low, "maximum": low + draw.randint(0, 10**6)}
        case "number":
            return {"enum": [round(draw.random(), 9), draw.randint(0, 99)]} if bounded else {"type": "number"}
        case "enum":
            return {
                "enum": draw.sample([1, 2.5, "red", "süß", None, True, "two words", 'a "quote"'], draw.randint(1, 5))
            }
        case "pattern":
            return {
                "type": "string",
                "pattern": draw.choice([r"^[A-Z]{2}-\d{1,4}$", r"^\d{4}-\d{2}-\d{2}$", "^(a|bc){1,3}$"]),
            }
        case "array":
            low = draw.randint(0, 2)
            items = schema_of(draw, depth + 1, bounded=bounded)
            return {"type": "array", "items": items, "minItems": low, "maxItems": low + draw.randint(0, 2)}
        case "anyOf":
            return {"anyOf": [schema_of(draw, depth + 1, bounded=bounded) for _ in range(draw.randint(1, 3))]}
        case "object":
            names = draw.sample(WORDS, draw.randint(1, 4 - depth))
            return {
                "type": "object",
                "properties": {name: schema_of(draw, depth + 1, bounded=bounded) for name in names},
                "required": names[: draw.randint(0, len(names))],
                "additionalProperties": False,
            }
    return {"type": kind}


@dataclass(frozen=True)
class Outcome:
    schema: dict[str, Any]
    bounded: bool
    max_tokens: int
    finish: str
    tokens: int
    text: str
    validates: bool | None
    """None: it was cut."""
    legal: bool
    problem: str = ""


@dataclass(frozen=True)
class Case:
    schema: dict[str, Any]
    bounded: bool
    max_tokens: int
    seed: int

    @property
    def grammar(self) -> Grammar:
        return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(self.schema, ensure_ascii=False))


def cases_of(count: int) -> list[Case]:
    draw = random.Random(7)
    cases = []
    for number in range(count):
        bounded = number % 10 != 9
        max_tokens = CUT_TOKENS if number % 10 == 8 else BOUNDED_TOKENS if bounded else 60
        cases.append(Case(schema_of(draw, bounded=bounded), bounded, max_tokens, number))
    return cases


def run_schemas(engine: BlockEngine, answers: Answers, count: int) -> list[Outcome]:
    info = engine.info
    tokenizer: Tokenizer = Tokenizer.from_buffer(info.tokenizer_json)
    guide = load_tokenizer(info.tokenizer_json, info.vocab_size, list(info.eos_token_ids))
    prompt = tokenizer.encode(QUESTION, add_special_tokens=False).ids
    cases = cases_of(count)
    names = [f"schema{number}" for number in range(count)]
    for name, case in zip(names, cases, strict=True):
        sampling = Sampling(temperature=0.8, seed=case.seed, max_tokens=case.max_tokens, grammar=case.grammar)
        engine.submit(EngineRequest(name, prompt, sampling))
    answers.wait(names)
    outcomes = []
    for name, case in zip(names, cases, strict=True):
        token_ids, end = answers.tokens[name], answers.ends[name]
        matcher = compile_grammar(guide, case.grammar.kind.value, case.grammar.text)
        legal = matcher.consume_tokens(token_ids)
        text = tokenizer.decode(token_ids, skip_special_tokens=True)
        validates, problem = None, end.error
        if end.finish is FinishReason.STOP:
            try:
                jsonschema.validate(json.loads(text), case.schema)
                validates = True
            except (ValueError, jsonschema.ValidationError) as error:
                validates, problem = False, str(error)[:500]
        finish = end.finish.value if end.finish else ""
        outcomes.append(
            Outcome(case.schema, case.bounded, case.max_tokens, finish, len(token_ids), text, validates, legal, problem)
        )
    return outcomes


# ------------------------------------------------------------------ cost


def mask_times_us(engine: BlockEngine, outcomes: Sequence[Outcome]) -> list[float]:
    """Of the masks along the answers, one after the other on an idle thread."""
    info = engine.info
    tokenizer: Tokenizer = Tokenizer.from_buffer(info.tokenizer_json)
    guide = load_tokenizer(info.tokenizer_json, info.vocab_size, list(info.eos_token_ids))
    times = []
    for outcome in outcomes[:60]:
        matcher = compile_grammar(guide, "json_schema", json.dumps(outcome.schema, ensure_ascii=False))
        for token_id in tokenizer.encode(outcome.text, add_special_tokens=False).ids:
            begun_s = time.thread_time()
            matcher.compute_bitmask()
            matcher.consume_token(token_id)
            times.append((time.thread_time() - begun_s) * 1e6)
    return times


def sampler_times_us(vocab_size: int, *, masked: bool, repeats: int = 200) -> list[float]:
    """One row by temperature 0.8, its mask with about half of the vocabulary."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn((1, vocab_size), generator=generator)
    bits = np.random.default_rng(3).integers(0, 256, -(-vocab_size // 32) * 4, dtype=np.uint8).tobytes()
    sampler = Sampler(vocab_size)
    times = []
    for position in range(repeats):
        mask = KnownMask(bits) if masked else None
        spec = SampleSpec(Sampling(temperature=0.8, seed=1), position, (), (), frozenset(), mask)
        begun_s = time.thread_time()
        sampler.sample(logits, [spec])
        times.append((time.thread_time() - begun_s) * 1e6)
    return times


@dataclass(frozen=True)
class Rate:
    tokens_per_s: float
    processor_ms_per_token: float


def rate_of(engine: BlockEngine, answers: Answers, name: str, grammar: Grammar | None, batch: int) -> Rate:
    """`batch` answers of 64 tokens each, which neither side can end before."""
    prompt = Tokenizer.from_buffer(engine.info.tokenizer_json).encode(QUESTION, add_special_tokens=False).ids
    names = [f"{name}-{number}" for number in range(batch)]
    ends = grammar is None
    begun_s, processor_s = time.perf_counter(), time.process_time()
    for number, one in enumerate(names):
        sampling = Sampling(temperature=0.8, seed=number, max_tokens=64, ignore_eos=ends, grammar=grammar)
        engine.submit(EngineRequest(one, prompt, sampling))
    answers.wait(names)
    tokens = sum(len(answers.tokens[one]) for one in names)
    processor_s = time.process_time() - processor_s
    return Rate(tokens / (time.perf_counter() - begun_s), processor_s * 1e3 / tokens)


LONG = Grammar(
    GrammarKind.JSON_SCHEMA,
    json.dumps(
        {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "kind": {"enum": ["a", "b"]}},
                "required": ["name", "age", "kind"],
                "additionalProperties": False,
            },
            "minItems": 20,
        }
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemas", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, default=8)
    options = parser.parse_args()
    settings = TorchSettings(dtype="bfloat16", kv_blocks=1200, block_tokens=16, threads=options.threads)
    executor = create_torch_executor(settings, print)
    engine = BlockEngine(executor, SchedulerConfig(max_sequences=32, max_waiting_tokens=10**6))
    answers = Answers()
    engine.start(answers)
    try:
        begun = time.perf_counter()
        outcomes = run_schemas(engine, answers, options.schemas)
        schemas_s = time.perf_counter() - begun
        rates: dict[str, list[Rate]] = {"plain": [], "grammar": []}
        rate_of(engine, answers, "warm", LONG, options.batch)
        for number in range(options.rounds):
            rates["plain"].append(rate_of(engine, answers, f"plain{number}", None, options.batch))
            rates["grammar"].append(rate_of(engine, answers, f"grammar{number}", LONG, options.batch))
        masks = mask_times_us(engine, outcomes)
        sampler = {
            "plain": sampler_times_us(engine.info.vocab_size, masked=False),
            "masked": sampler_times_us(engine.info.vocab_size, masked=True),
        }
    finally:
        engine.close()
    stopped = [outcome for outcome in outcomes if outcome.finish == "stop"]
    cut = [outcome for outcome in outcomes if outcome.finish == "length"]
    meant_to_end = [outcome for outcome in outcomes if outcome.bounded and outcome.max_tokens == BOUNDED_TOKENS]
    quantiles = statistics.quantiles(masks, n=100)
    summary = {
        "schemas": len(outcomes),
        "stopped": len(stopped),
        "stopped_and_valid": sum(outcome.validates is True for outcome in stopped),
        "cut": len(cut),
        "cut_and_legal": sum(outcome.legal for outcome in cut),
        "bounded": len(meant_to_end),
        "bounded_and_ended": sum(outcome.finish == "stop" for outcome in meant_to_end),
        "failed": sum(outcome.finish not in ("stop", "length") for outcome in outcomes),
        "output_tokens": sum(outcome.tokens for outcome in outcomes),
        "seconds": round(schemas_s, 1),
        "mask_us": {"median": round(quantiles[49], 1), "p99": round(quantiles[98], 1), "masks": len(masks)},
        "sampler_us": {name: round(statistics.median(times), 1) for name, times in sampler.items()},
        "processor_ms_per_token": {
            name: round(statistics.median(rate.processor_ms_per_token for rate in values), 2)
            for name, values in rates.items()
        },
        "tokens_per_s": {
            name: round(statistics.median(rate.tokens_per_s for rate in values), 1) for name, values in rates.items()
        },
    }
    print(json.dumps(summary, indent=1))
    results = Path(__file__).parent / "results"
    results.mkdir(exist_ok=True)
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")
    (results / f"{stamp}.json").write_text(
        json.dumps(
            {
                "options": vars(options),
                "machine": {"cpus": os.cpu_count(), "python": platform.python_version(), "load": os.getloadavg()},
                "summary": summary,
                "rates": {name: [asdict(rate) for rate in values] for name, values in rates.items()},
                "outcomes": [asdict(outcome) for outcome in outcomes],
            },
            ensure_ascii=False,
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
