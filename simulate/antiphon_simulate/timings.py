"""What workers and links are taken to be: presets by name, or a JSON file of a person's own.

    {"name": "mine", "source": "who measured it, and how",
     "chunk_tokens": 2048, "mixed_chunk_tokens": 512, "block_bytes": 83886080, "link_gigabytes_per_s": 25.0,
     "step": {"base_ms": 8.0, "per_new_token_ms": 0.06, "per_token_context_ms": 6e-7,
              "per_sequence_ms": 0.02, "per_kv_token_ms": 2.5e-5}}

`step` are the coefficients of `antiphon_policy.latency.StepModel`; `block_bytes` is the KV of one block of the trace
(512 tokens). The presets are such files in `data/`. Figures of GPUs are inputs that somebody gives, never results.
"""

from __future__ import annotations

import importlib.resources
from pathlib import Path
from typing import Annotated

import msgspec
from antiphon_policy.latency import StepModel

from antiphon_simulate.records import Timing

PRESETS = ("demo", "example-gpu")
DEFAULT = "example-gpu"


class TimingError(ValueError):
    """No such preset, or a file that says no timing; the message says what to write."""


_Ms = Annotated[float, msgspec.Meta(ge=0)]
_More = Annotated[int, msgspec.Meta(ge=1)]


class _Step(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    base_ms: _Ms
    per_new_token_ms: _Ms
    per_token_context_ms: _Ms
    per_sequence_ms: _Ms
    per_kv_token_ms: _Ms


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    step: _Step
    chunk_tokens: _More
    mixed_chunk_tokens: _More
    block_bytes: _More
    link_gigabytes_per_s: Annotated[float, msgspec.Meta(gt=0)]
    name: str = ""
    source: str = ""


def read_timing(words: str) -> Timing:
    """The preset of that name, or the file at that path. Raises `TimingError`."""
    if words in PRESETS:
        file = importlib.resources.files("antiphon_simulate") / "data" / f"{words.replace('-', '_')}_timing.json"
        return _timing(words, file.read_bytes())
    path = Path(words)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise TimingError(
            f"{words!r} is neither a preset ({', '.join(PRESETS)}) nor a file that can be read: {error.strerror}"
        ) from error
    return _timing(path.stem, content)


def _timing(name: str, content: bytes) -> Timing:
    try:
        found = msgspec.json.decode(content, type=_File)
    except msgspec.DecodeError as error:
        raise TimingError(
            f"timing {name}: {error}; a timing has name, source, chunk_tokens, mixed_chunk_tokens, block_bytes, "
            "link_gigabytes_per_s and step with base_ms, per_new_token_ms, per_token_context_ms, per_sequence_ms and "
            "per_kv_token_ms, none of them negative"
        ) from error
    if found.step.base_ms + found.step.per_new_token_ms <= 0.0:
        raise TimingError(f"timing {name}: steps that take no time: give base_ms or per_new_token_ms")
    return Timing(
        step=StepModel(**msgspec.structs.asdict(found.step)),
        chunk_tokens=found.chunk_tokens,
        mixed_chunk_tokens=found.mixed_chunk_tokens,
        block_bytes=found.block_bytes,
        link_gigabytes_per_s=found.link_gigabytes_per_s,
        name=found.name or name,
        source=found.source,
    )
