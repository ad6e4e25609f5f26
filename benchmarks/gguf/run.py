"""What it takes to load a GGUF file, beside the folder with the same weights; and ids of real vocabularies.

*Loading.* The demo model out of the file that it is published as (Q4_1), written again in other types, and out of its
folder, each in a process of its own: processor time from the path to a model that could compute, and anonymous memory
at its peak and at the end, above what the process had with all libraries loaded.

*Vocabularies* (with --vocabularies): llama.cpp keeps in its folder `models/` files `ggml-vocab-NAME.gguf` of published
models without their weights, texts in many scripts (`.inp`), and the ids that the models' own tokenizers give (`.out`).
Every one that is read here has to give these ids.

    python -m benchmarks.gguf.run [--vocabularies llama.cpp/models]

prints a summary and writes results/<time>.json.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import torch
from antiphon_engine.torch_engine import default_cache_dir, load_checkpoint, prepare_demo
from antiphon_engine.torch_engine.demo import fetch_gguf
from antiphon_engine.torch_engine.errors import TorchEngineError
from antiphon_engine.torch_engine.gguf_model.file import read_gguf
from antiphon_engine.torch_engine.gguf_model.tokenizer import build_tokenizer

from tests.support.gguf_models import write_gguf_of

_TYPES = ("F16", "Q8_0")
_DTYPES = ("bfloat16", "float32")
_POLL_S = 0.002
_BETWEEN = "\n__ggml_vocab_test__\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabularies", type=Path, default=None, help="llama.cpp's folder `models`")
    parser.add_argument("--load", nargs=2, default=None, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.load is not None:
        print(json.dumps(_measured(Path(given.load[0]), given.load[1])))
        return
    report: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__}
    report["loading"] = list(_loading())
    if given.vocabularies is not None:
        report["vocabularies"] = list(_vocabularies(given.vocabularies))
    time_now = datetime.datetime.now(datetime.UTC)
    target = Path(__file__).parent / "results" / f"{time_now:%Y%m%d-%H%M%S}.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps(report, indent=1) + "\n")
    print(target)


# ------------------------------------------------------------------ loading


def _loading() -> Iterator[dict[str, Any]]:
    folder = prepare_demo(default_cache_dir(), print)
    published = fetch_gguf(default_cache_dir(), print)
    with tempfile.TemporaryDirectory() as scratch:
        sources = {"folder, bf16": folder, "published, Q4_1": published}
        for kind in _TYPES:
            target = Path(scratch) / f"{kind}.gguf"
            sources[kind] = write_gguf_of(folder, target, gguf.GGMLQuantizationType[kind], pre="smollm")
        for name, path in sources.items():
            for dtype in _DTYPES:
                command = [sys.executable, "-m", "benchmarks.gguf.run", "--load", str(path), dtype]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                found = {"source": name, "dtype": dtype, **json.loads(done.stdout)}
                print(found)
                yield found


def _measured(path: Path, dtype: str) -> dict[str, float]:
    torch.set_num_threads(1)
    before, most, stop = _anonymous_mb(), 0.0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not stop.wait(_POLL_S):
            most = max(most, _anonymous_mb())

    watcher = threading.Thread(target=watch)
    watcher.start()
    started = time.process_time()
    model = load_checkpoint(path, getattr(torch, dtype)).model
    processor_s = time.process_time() - started
    stop.set()
    watcher.join()
    end = _anonymous_mb()
    weights = sum(parameter.numel() * parameter.element_size() for parameter in set(model.parameters())) / 1e6
    return {
        "processor_s": round(processor_s, 2),
        "weights_mb": round(weights, 1),
        "peak_mb": round(max(most, end) - before, 1),
        "end_mb": round(end - before, 1),
    }


def _anonymous_mb() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise RuntimeError("this system does not say how much anonymous memory a process has")


# ------------------------------------------------------------------ vocabularies


def _vocabularies(models: Path) -> Iterator[dict[str, Any]]:
    for path in sorted(models.glob("ggml-vocab-*.gguf")):
        texts_file = path.with_name(f"{path.name}.inp")
        if not texts_file.is_file():
            continue
        found: dict[str, Any] = {"vocabulary": path.name}
        started = time.process_time()
        try:
            tokenizer = build_tokenizer(read_gguf(path))
        except TorchEngineError as error:
            yield {**found, "refused": str(error).replace(str(path), path.name)}
            continue
        found["processor_s"] = round(time.process_time() - started, 2)
        texts = texts_file.read_text(encoding="utf-8").split(_BETWEEN)
        lines = path.with_name(f"{path.name}.out").read_text().split("\n")
        wanted = [[int(index) for index in line.split()] for line in lines[: len(texts)]]
        read = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
        found |= {"texts": len(texts), "tokens": sum(map(len, wanted))}
        found["other_ids"] = [text for text, own, ids in zip(texts, read, wanted, strict=False) if own != ids]
        print(found)
        yield found


if __name__ == "__main__":
    main()
