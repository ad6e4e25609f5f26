"""`antiphon plan MODEL --gpus 8xH200`: which shapes of a model fit, with the arithmetic, and which to take.

Reads the model's config.json, or the head of a GGUF file, and nothing else: no weights, no network. The arithmetic is
`antiphon_engine.planning`.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from antiphon_engine.planning import (
    DEMO_CONFIG,
    ConfigRefused,
    DeviceRefused,
    ModelConfig,
    Question,
    QuestionRefused,
    Reserve,
    plan_shapes,
    read_config,
    read_fleet,
)
from antiphon_engine.planning.shapes import DTYPE_BYTES
from antiphon_telemetry.exit import ExitCode

from antiphon.fetch import PLACE
from antiphon.plan_text import as_json, as_text

_HUB = re.compile(rf"^hf://{PLACE}$")
_CONFIG = "config.json"
_GGUF = ".gguf"


class ModelNotFound(Exception):
    """There is no config.json or GGUF file to read. The message says what to do."""


def run_plan(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """The command; its exit code: 3 if nothing fits."""
    given = _parser().parse_args(arguments)
    try:
        question = Question(
            config=find_config(given.model, environment),
            fleet=read_fleet(given.gpus, gpus_per_node=given.gpus_per_node, memory_gb=given.gpu_memory_gb),
            dtype=given.dtype,
            block_tokens=given.block_tokens,
            context_tokens=given.context,
            contexts=given.contexts,
            reserve=_reserve(given.reserve_gb),
        )
    except (ModelNotFound, ConfigRefused, DeviceRefused, QuestionRefused) as error:
        print(f"antiphon: {error}", file=sys.stderr)
        return ExitCode.BAD_INPUT
    plan = plan_shapes(question)
    print(as_json(given.model, plan) if given.json else as_text(given.model, plan))
    return ExitCode.OK if plan.chosen is not None else ExitCode.TOO_LITTLE_MEMORY


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="antiphon plan",
        description="Says which shapes (tensor, pipeline, expert, replicas) of a model fit some GPUs, and which to "
        "take. Reads the model's config.json only, or the head of a GGUF file. GB are 10^9 bytes.",
        epilog="exit codes: 0: there is a shape to take; 2: the words or the model are refused; 3: nothing fits",
        allow_abbrev=False,
    )
    parser.add_argument(
        "model",
        help="`demo`, a model's folder or config.json, a GGUF file, or hf://ORG/NAME[/FILE.gguf] if this machine's "
        "Hugging Face cache has it",
    )
    parser.add_argument("--gpus", required=True, help="how many of which GPUs, such as 8xH200")
    parser.add_argument("--gpus-per-node", type=int, default=0, metavar="N", help="GPUs of one node (default: 8)")
    parser.add_argument(
        "--gpu-memory-gb", type=float, default=0.0, metavar="GB", help="memory of one GPU, instead of the data sheet's"
    )
    parser.add_argument(
        "--context", type=int, default=0, metavar="TOKENS", help="length of a request (default: the model's longest)"
    )
    parser.add_argument(
        "--contexts", type=int, default=4, metavar="N", help="how many of these a replica should hold (default: 4)"
    )
    parser.add_argument(
        "--dtype", choices=tuple(DTYPE_BYTES), default="bfloat16", help="of weights and KV (default: bfloat16)"
    )
    parser.add_argument("--block-tokens", type=int, default=64, metavar="N", help="tokens of a KV block (default: 64)")
    parser.add_argument(
        "--reserve-gb",
        type=float,
        default=None,
        metavar="GB",
        help="memory of each GPU kept for other than weights and KV (default: an estimate, which is printed)",
    )
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    return parser


def _reserve(given_gb: float | None) -> Reserve:
    """Raises QuestionRefused."""
    if given_gb is None:
        return Reserve()
    if given_gb < 0:
        raise QuestionRefused(f"--reserve-gb {given_gb:g}: it has to be 0 or more")
    return Reserve(fixed_bytes=round(given_gb * 1e9))


def find_config(model: str, environment: Mapping[str, str]) -> ModelConfig:
    """Of what a person calls a model. Raises ModelNotFound and ConfigRefused."""
    if model == "demo":
        return read_config(DEMO_CONFIG, "demo")
    path = _cached(model, environment) if model.startswith("hf://") else Path(model).expanduser()
    if path.is_dir():
        path /= _CONFIG
    if path.suffix == _GGUF:
        return _of_gguf(path)
    try:
        return read_config(path.read_bytes(), str(path))
    except OSError as error:
        raise ModelNotFound(
            f"{path} cannot be read ({error.strerror}): name a folder that holds a config.json, such a file, "
            "a GGUF file, or `demo`"
        ) from error


def _of_gguf(path: Path) -> ModelConfig:
    # Not every image that has this command has what reads these files.
    from antiphon_engine.torch_engine.errors import TorchEngineError
    from antiphon_engine.torch_engine.gguf_model.configuration import config_json
    from antiphon_engine.torch_engine.gguf_model.file import read_gguf

    try:
        return read_config(config_json(read_gguf(path)), str(path))
    except TorchEngineError as error:
        raise ModelNotFound(str(error)) from error


def _cached(model: str, environment: Mapping[str, str]) -> Path:
    """The newest snapshot of a repository in the Hugging Face cache."""
    match = _HUB.match(model)
    if match is None:
        raise ModelNotFound(f"{model} names no repository: write hf://ORG/NAME or hf://ORG/NAME/FILE.gguf")
    repository, file = match[1], match[2] or _CONFIG
    cache = _hub_cache(environment)
    folder = cache / f"models--{repository.replace('/', '--')}" / "snapshots"
    found = sorted(folder.glob(f"*/{file}"), key=lambda file: file.stat().st_mtime)
    if not found:
        raise ModelNotFound(
            f"{model} is not in {cache}, and nothing is downloaded here: save the model's {file} and name that "
            f"file, or run `antiphon fetch {model} --to FOLDER` and name the folder that it makes"
        )
    return found[-1]


def _hub_cache(environment: Mapping[str, str]) -> Path:
    """As the Hugging Face libraries look for it."""
    if explicit := environment.get("HF_HUB_CACHE"):
        return Path(explicit).expanduser()
    home = environment.get("HF_HOME") or os.path.join(environment.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(home).expanduser() / "hub"
