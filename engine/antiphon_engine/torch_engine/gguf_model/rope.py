"""Rotary embeddings of a GGUF file, as `rope_parameters` of a `transformers` configuration.

Llama 3's scaling is not in the metadata: llama.cpp's converter works out by what each frequency is divided and stores
these numbers as the tensor `rope_freqs.weight`. The parameters are found again from them, and are taken only if they
give the same numbers: for wavelengths between `original / high` and `original / low`, the share of the unscaled
frequency is a line over 1 / wavelength, which gives `original / (high - low)` and `low / (high - low)`. Published
models have low = 1, which fixes the rest.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from antiphon_engine.torch_engine.errors import UnsupportedModel
from antiphon_engine.torch_engine.gguf_model.file import GgufFile

FACTORS = "rope_freqs.weight"

_DEFAULT_BASE = 10000.0
_LOW = 1.0
_CLOSE = 1e-4
"""The factors are stored in 32 bits, after some arithmetic in 32 bits."""


def rope_parameters(file: GgufFile, architecture: str, head_dim: int) -> dict[str, Any]:
    """Raises UnsupportedModel for a scaling that cannot be told, DamagedCheckpoint."""
    prefix = f"{architecture}.rope"
    base = file.number(f"{prefix}.freq_base", _DEFAULT_BASE)
    rotary = file.integer(f"{prefix}.dimension_count", head_dim)
    if rotary != head_dim:
        raise UnsupportedModel(
            f"{file.path} rotates {rotary} of {head_dim} dimensions of a head: this is not supported"
        )
    kind = file.text(f"{prefix}.scaling.type", "none")
    if FACTORS in file.tensors:
        if kind != "none":
            raise UnsupportedModel(f"{file.path} has {FACTORS} beside {kind} scaling, which is not supported")
        return {"rope_theta": base, **_llama3(file, base, head_dim)}
    if kind == "none" and (legacy := file.number(f"{prefix}.scale_linear", 1.0)) != 1.0:
        return {"rope_type": "linear", "rope_theta": base, "factor": legacy}
    if kind == "none":
        return {"rope_type": "default", "rope_theta": base}
    if kind not in ("linear", "yarn"):
        raise UnsupportedModel(
            f"{file.path} has rotary scaling {kind!r}, which is not supported: use a model with none, linear, yarn or "
            "Llama 3's"
        )
    factor = file.number(f"{prefix}.scaling.factor")
    if kind == "linear":
        return {"rope_type": "linear", "rope_theta": base, "factor": factor}
    return {"rope_theta": base, **_yarn(file, prefix, factor)}


def _yarn(file: GgufFile, prefix: str, factor: float) -> dict[str, Any]:
    for key in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor", "yarn_log_multiplier"):
        if file.number(f"{prefix}.scaling.{key}", 1.0) not in (1.0, -1.0):  # -1: as usual
            raise UnsupportedModel(f"{file.path} says {prefix}.scaling.{key}, which is not supported")
    original = file.integer(f"{prefix}.scaling.original_context_length")
    found: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
    }
    for key in ("beta_fast", "beta_slow"):
        if (value := file.number(f"{prefix}.scaling.yarn_{key}", 0.0)) > 0:
            found[key] = value
    return found


def _llama3(file: GgufFile, base: float, head_dim: int) -> dict[str, Any]:
    entry = file.tensors[FACTORS]
    refused = UnsupportedModel(f"{file.path} has {FACTORS} that no scaling known here gives: it cannot be served")
    if entry.dtype != "F32" or entry.shape != (head_dim // 2,):
        raise refused
    with file.path.open("rb") as content:
        content.seek(entry.begin)
        factors = np.frombuffer(content.read(entry.end - entry.begin), "<f4").astype(np.float64)
    wavelengths = 2 * math.pi * base ** (2 * np.arange(head_dim // 2) / head_dim)
    largest = float(factors.max())
    between = (factors > 1 + _CLOSE) & (factors < largest * (1 - _CLOSE))
    if not np.all(factors >= 1 - _CLOSE) or between.sum() < 2:
        raise refused
    shares = (1 / factors[between] - 1 / largest) / (1 - 1 / largest)
    slope, offset = np.polyfit(1 / wavelengths[between], shares, 1)
    high = _neat(_LOW - _LOW / float(offset))
    found = {
        "rope_type": "llama3",
        "factor": _neat(largest),
        "low_freq_factor": _LOW,
        "high_freq_factor": high,
        "original_max_position_embeddings": round(float(slope) * (high - _LOW)),
    }
    if not np.allclose(llama3_factors(found, wavelengths), factors, rtol=_CLOSE):
        raise refused
    return found


def llama3_factors(rope: dict[str, Any], wavelengths: NDArray[np.float64]) -> NDArray[np.float64]:
    """By what each frequency is divided, as `transformers` does (modeling_rope_utils.py, "llama3")."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    share = (rope["original_max_position_embeddings"] / wavelengths - low) / (high - low)
    share = np.clip(share, 0.0, 1.0)
    factors: NDArray[np.float64] = 1 / ((1 - share) / rope["factor"] + share)
    return factors


def _neat(value: float) -> float:
    """The nearest quarter if it is near: these are numbers that people chose."""
    quarter = round(value * 4) / 4
    return quarter if math.isclose(value, quarter, rel_tol=1e-3) else value
