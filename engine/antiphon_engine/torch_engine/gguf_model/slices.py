"""Reads slices of tensors from a GGUF file, by the names that a Hugging Face checkpoint has for them.

As with safetensors, rows are read in pieces and the wanted columns are kept. A row of a quantised tensor is a run of
whole blocks, so that any rows can be taken out of their blocks by themselves: memory while loading is what is loaded
and one piece, in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import gguf
import numpy as np
import torch
from numpy.typing import NDArray

from antiphon_engine.torch_engine.errors import DamagedCheckpoint
from antiphon_engine.torch_engine.gguf_model.configuration import read_config
from antiphon_engine.torch_engine.gguf_model.file import read_gguf
from antiphon_engine.torch_engine.gguf_model.layout import Stored, check_tensors, layout
from antiphon_engine.torch_engine.weights import TensorEntry

_PIECE_ELEMENTS = 2 * 1024 * 1024
"""8 MiB once they are fp32."""
_RUN_ELEMENTS = 4096


class GgufSlices:
    """Of one file; a context manager that keeps it open. Its methods raise DamagedCheckpoint."""

    def __init__(self, path: Path) -> None:
        """Raises TorchEngineError."""
        self._path = path
        self._file = read_gguf(path)
        config = read_config(self._file)
        check_tensors(self._file, config)
        self._places = layout(config)
        self._content: BinaryIO | None = None

    @property
    def names(self) -> Collection[str]:
        """All tensors, by their names in a checkpoint."""
        return self._places

    def read(self, name: str, shape: tuple[int, ...], rows: range, columns: range | None, into: torch.Tensor) -> None:
        """Fill `into` with these rows and columns (None: all) of a tensor that has to have this shape."""
        stored = self._places.get(name)
        if stored is None or stored.shape != shape:
            raise DamagedCheckpoint(f"{self._path} has no tensor {name} of the shape {shape}: get another conversion")
        head_rows = shape[0] // stored.interleaved_heads if stored.interleaved_heads else 1
        width = math.prod(shape[1:])
        at_once = max(1, _PIECE_ELEMENTS // width // head_rows) * head_rows
        # Rows of whole heads, in order of the file, with the wanted ones among them.
        first, last = rows.start // head_rows * head_rows, -(-rows.stop // head_rows) * head_rows
        for begin in range(first, last, at_once):
            end = min(begin + at_once, last)
            values = self._rows(stored, width, begin, end)
            if stored.interleaved_heads:
                values = _separate_halves(values, head_rows)
            values = values[max(rows.start - begin, 0) : rows.stop - begin]
            place = max(begin - rows.start, 0)
            kept = values.view(-1, *shape[1:])
            kept = kept if columns is None else kept[:, columns.start : columns.stop]
            into[place : place + len(kept)].copy_(kept)

    def _rows(self, stored: Stored, width: int, begin: int, end: int) -> torch.Tensor:
        """Rows as they lie in the file, [rows, width] in fp32. A vector's elements are rows of one."""
        entry = self._file.tensors[stored.tensor]
        kind = gguf.GGMLQuantizationType[entry.dtype]
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        first = stored.expert * math.prod(stored.shape) + begin * width
        raw = self._read(entry, first // block * block_bytes, (end - begin) * width // block * block_bytes)
        return torch.from_numpy(_values(raw, kind)).view(end - begin, width)

    def _read(self, entry: TensorEntry, begin: int, count: int) -> NDArray[np.uint8]:
        if self._content is None:
            self._content = self._path.open("rb")
        self._content.seek(entry.begin + begin)
        raw = bytearray(count)
        if self._content.readinto(raw) != count:  # type: ignore[attr-defined]
            raise DamagedCheckpoint(f"{self._path} ends before the tensor {entry.name} does: get the file again")
        return np.frombuffer(raw, np.uint8)

    def __enter__(self) -> GgufSlices:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._content is not None:
            self._content.close()
            self._content = None


def _values(raw: NDArray[np.uint8], kind: gguf.GGMLQuantizationType) -> NDArray[np.float32]:
    """Of any number of whole blocks.

    The package works through 16 runs at a time: of this length they fill a cache, and a row's length does not count.
    """
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    run = _RUN_ELEMENTS // block * block_bytes
    whole = len(raw) // run * run
    parts = [part for part in (raw[:whole].reshape(-1, run), raw[whole:].reshape(1, -1)) if part.size]
    values = [np.asarray(gguf.dequantize(part, kind), np.float32).reshape(-1) for part in parts]
    return values[0] if len(values) == 1 else np.concatenate(values)


def _separate_halves(values: torch.Tensor, head_rows: int) -> torch.Tensor:
    """Rows of a head from (a0 b0 a1 b1 ...) to (a0 a1 ... b0 b1 ...)."""
    return values.view(-1, head_rows // 2, 2, values.shape[1]).transpose(1, 2).reshape(values.shape)
