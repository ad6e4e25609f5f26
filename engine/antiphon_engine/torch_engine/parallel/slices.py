"""Reads slices of tensors from a model's files, without ever holding a whole tensor. `SliceReader`: of safetensors.

Rows are read in pieces of a few megabytes, of which the wanted columns are kept. So a rank's memory while loading is
its own weights and one such piece, however big the model's matrices are. Files are read, not mapped: pages of a mapped
file would count as this process's memory.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Protocol

import torch

from antiphon_engine.torch_engine.errors import DamagedCheckpoint
from antiphon_engine.torch_engine.gguf_model.file import is_gguf
from antiphon_engine.torch_engine.gguf_model.slices import GgufSlices
from antiphon_engine.torch_engine.weights import TensorEntry, read_weight_files

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_PIECE_BYTES = 8 * 1024 * 1024


class Slices(Protocol):
    """Tensors of one model, by the names that a Hugging Face checkpoint has for them."""

    @property
    def names(self) -> Collection[str]: ...

    def read(self, name: str, shape: tuple[int, ...], rows: range, columns: range | None, into: torch.Tensor) -> None:
        """Fill `into` with these rows and columns (None: all) of a tensor that has to have this shape.

        Raises DamagedCheckpoint.
        """
        ...

    def __enter__(self) -> Slices: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def open_slices(path: Path) -> Slices:
    """Of a folder or a GGUF file; to be used as a context. Raises TorchEngineError."""
    return GgufSlices(path) if is_gguf(path) else SliceReader(path)


class SliceReader:
    """Of one folder; a context manager that keeps its files open. Its methods raise DamagedCheckpoint."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._places: dict[str, tuple[Path, TensorEntry]] = {
            entry.name: (file.path, entry) for file in read_weight_files(folder) for entry in file.tensors
        }
        self._open: dict[Path, BinaryIO] = {}

    @property
    def names(self) -> Collection[str]:
        """All tensors of the folder."""
        return self._places

    def read(self, name: str, shape: tuple[int, ...], rows: range, columns: range | None, into: torch.Tensor) -> None:
        """Fill `into` with these rows and columns (None: all) of a tensor that has to have this shape."""
        path, entry = self._entry(name, shape)
        dtype = _DTYPES[entry.dtype]
        file = self._file(path)
        width = math.prod(shape[1:])
        row_bytes = width * dtype.itemsize
        at_once = max(1, _PIECE_BYTES // row_bytes)
        for begin in range(rows.start, rows.stop, at_once):
            count = min(at_once, rows.stop - begin)
            piece = bytearray(count * row_bytes)
            file.seek(entry.begin + begin * row_bytes)
            if file.readinto(piece) != len(piece):  # type: ignore[attr-defined]
                raise DamagedCheckpoint(f"{path} ends before the tensor {name} does: get the file again")
            values = torch.frombuffer(piece, dtype=dtype).view(count, *shape[1:])
            kept = values if columns is None else values[:, columns.start : columns.stop]
            into[begin - rows.start : begin - rows.start + count].copy_(kept)

    def _entry(self, name: str, shape: tuple[int, ...]) -> tuple[Path, TensorEntry]:
        if name not in self._places:
            raise DamagedCheckpoint(f"{self._folder} lacks the tensor {name}: get the model's weights again")
        path, entry = self._places[name]
        if entry.shape != shape:
            raise DamagedCheckpoint(
                f"{self._folder} has a wrong shape for the tensor {name} ({entry.shape}, not {shape}): "
                "get the model's weights again"
            )
        if entry.dtype not in _DTYPES:
            raise DamagedCheckpoint(
                f"{path} has {name} as {entry.dtype}, which cannot be read: get the model's weights in one of "
                f"{', '.join(_DTYPES)}"
            )
        return path, entry

    def _file(self, path: Path) -> BinaryIO:
        if path not in self._open:
            self._open[path] = path.open("rb")
        return self._open[path]

    def __enter__(self) -> SliceReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._open.values():
            file.close()
        self._open.clear()
