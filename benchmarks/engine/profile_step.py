"""Where a step's processor time goes, by phase of the compiled decoder.

Builds the kernels with their profile counters (ANTIPHON_PROFILE) and runs a prefill of 512 tokens and decode steps at a
context of 512 on the model. Times are processor time summed over threads, so that other work on the machine, which
lengthens a step, moves them little; divided by the number of threads they are what a step takes at least.

    python benchmarks/engine/profile_step.py [--model FOLDER] [--threads 2]
"""

from __future__ import annotations

import argparse
import ctypes
from pathlib import Path

import torch
from antiphon_engine.executor import SampleSpec, SequenceStep
from antiphon_engine.interface import Sampling
from antiphon_engine.torch_engine import default_cache_dir, prepare_demo
from antiphon_engine.torch_engine.kernels.build import build, load
from antiphon_engine.torch_engine.kernels.native import NativeDecoder, with_types
from antiphon_engine.torch_engine.kv_cache import KvCache
from antiphon_engine.torch_engine.memory_estimate import kv_shape
from antiphon_engine.torch_engine.step_batch import StepBatch, build_batch
from transformers import AutoModelForCausalLM

PHASES = ("norm", "qkv", "rotary, KV write", "attention", "output", "norm 2", "gate, up", "down")
CONTEXT = 512
BLOCK_TOKENS = 64
STEPS = 8


def step_of(vocab_size: int, sequences: int, tokens: int, start: int) -> StepBatch:
    need = -(-(CONTEXT + STEPS) // BLOCK_TOKENS)
    parts = []
    for index in range(sequences):
        ids = torch.randint(10, vocab_size, (tokens,)).tolist()
        spec = SampleSpec(Sampling(), 0, ids, (), frozenset())
        parts.append(SequenceStep("profile", ids, start, range(index * need, (index + 1) * need), spec))
    return build_batch(
        parts,
        block_tokens=BLOCK_TOKENS,
        num_blocks=sequences * need,
        vocab_size=vocab_size,
        max_context_tokens=CONTEXT + STEPS,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=None, help="model folder; default: the demo model")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    folder = options.model or prepare_demo(default_cache_dir(), print)
    library = load(build(default_cache_dir() / "kernels", extra_flags=("-DANTIPHON_PROFILE",)))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    cache = KvCache(kv_shape(model.config, BLOCK_TOKENS), 16 * -(-(CONTEXT + STEPS) // BLOCK_TOKENS), torch.bfloat16)
    decoder = NativeDecoder(with_types(library), model, cache, options.threads)
    layers, vocab_size = cache.shape.layers, model.config.vocab_size
    count = layers * len(PHASES) + 4
    seconds = (ctypes.c_double * count)()

    def measured(name: str, batches: list[StepBatch]) -> None:
        library.antiphon_profile(seconds, count)
        for batch in batches:
            decoder.logits(batch)
        library.antiphon_profile(seconds, count)
        each = [value * 1e3 / len(batches) for value in seconds]
        body = each[1 : 1 + (layers - 1) * len(PHASES)]
        by_phase = [sum(body[index :: len(PHASES)]) for index in range(len(PHASES))]
        cells = [f"{value:.1f}" for value in (*by_phase, sum(each) - sum(body), sum(each))]
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)

    print("| processor ms | " + " | ".join(PHASES) + " | last layer, head | all |")
    print("|" + "---|" * (len(PHASES) + 3))
    cache.tensor.normal_()
    decoder.logits(step_of(vocab_size, 1, CONTEXT, 0))
    measured("prefill of 512", [step_of(vocab_size, 1, CONTEXT, 0) for _ in range(3)])
    for sequences in (1, 4, 8, 16):
        measured(f"decode of {sequences}", [step_of(vocab_size, sequences, 1, CONTEXT + i) for i in range(STEPS)])


if __name__ == "__main__":
    main()
