"""The head of a GGUF file: metadata and the list of tensors, with an error that says what to do for any that is odd.

The `gguf` package has a reader too, which makes two arrays of every string: seconds for a vocabulary. This one reads
the head once, in order, and never past what the file's size allows. The numbers of the types are that package's.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import gguf
import numpy as np

from antiphon_engine.torch_engine.errors import BadModelFolder, DamagedCheckpoint, UnsupportedModel
from antiphon_engine.torch_engine.weights import TensorEntry, WeightFile, content_revision

SUFFIX = ".gguf"

_Type = gguf.GGMLQuantizationType
_Value = gguf.GGUFValueType

SUPPORTED_TYPES: tuple[str, ...] = (
    *("F32", "F16", "BF16", "Q8_0"),
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1"),
    *("Q4_K", "Q5_K", "Q6_K"),
)
"""Of tensors. llama.cpp takes Q4_1, Q5_0 and Q5_1 for rows in a K-quantised file that its blocks do not divide."""

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = 32
_MOST_DIMENSIONS = 4
_PART = re.compile(r"-\d{5}-of-(\d{5})\.gguf$")
_SCALARS: Mapping[int, str] = {
    _Value.UINT8: "<u1",
    _Value.INT8: "<i1",
    _Value.UINT16: "<u2",
    _Value.INT16: "<i2",
    _Value.UINT32: "<u4",
    _Value.INT32: "<i4",
    _Value.FLOAT32: "<f4",
    _Value.BOOL: "?",
    _Value.UINT64: "<u8",
    _Value.INT64: "<i8",
    _Value.FLOAT64: "<f8",
}


@dataclass(frozen=True, slots=True)
class GgufFile:
    """What the head says, checked against the file's size."""

    path: Path
    metadata: Mapping[str, object]
    tensors: Mapping[str, TensorEntry]
    """By name. Shapes as in torch: the longest-lying dimension last."""
    data_begin: int
    size_bytes: int

    def get(self, key: str) -> object:
        """Raises DamagedCheckpoint if there is none."""
        if key not in self.metadata:
            raise DamagedCheckpoint(f"{self.path} does not say {key}: get another conversion of the model")
        return self.metadata[key]

    def integer(self, key: str, default: int | None = None) -> int:
        """Raises DamagedCheckpoint, and UnsupportedModel for one that is given for each layer."""
        value = self.get(key) if default is None else self.metadata.get(key, default)
        if isinstance(value, list):
            raise UnsupportedModel(f"{self.path} has another {key} in each layer, which is not supported")
        if not isinstance(value, int) or value < 0:
            raise DamagedCheckpoint(f"{self.path} says {key}: {value!r}: get the file again")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A float is stored in 32 bits: the shortest decimal that gives the same is the number that was meant."""
        value = self.get(key) if default is None else self.metadata.get(key, default)
        if not isinstance(value, int | float):
            raise DamagedCheckpoint(f"{self.path} says {key}: {value!r}: get the file again")
        return float(str(np.float32(value)))

    def text(self, key: str, default: str | None = None) -> str:
        value = self.get(key) if default is None else self.metadata.get(key, default)
        if not isinstance(value, str):
            raise DamagedCheckpoint(f"{self.path} says {key}: {value!r}: get the file again")
        return value

    def revision(self) -> str:
        """Identity of the file's content, as for safetensors: head, size, and samples of every tensor."""
        with self.path.open("rb") as file:
            head = file.read(self.data_begin)
        return content_revision(b"", (WeightFile(self.path, head, self.size_bytes, tuple(self.tensors.values())),))


def is_gguf(path: Path) -> bool:
    """By its name; a folder is none."""
    return path.suffix.lower() == SUFFIX and not path.is_dir()


def parts_of(name: str) -> int:
    """Into how many files a model is split of which `name` is one; 1: it is whole."""
    found = _PART.search(name)
    return int(found[1]) if found else 1


def read_gguf(path: Path) -> GgufFile:
    """Raises BadModelFolder, DamagedCheckpoint, UnsupportedModel."""
    if not path.is_file():
        raise BadModelFolder(f"there is no file {path}: name a GGUF file, or a model's folder")
    if (parts := parts_of(path.name)) > 1:
        raise _split(path, parts)
    try:
        with path.open("rb", buffering=1 << 20) as content:
            file = _Head(path, content).read()
    except OSError as error:
        raise BadModelFolder(f"{path} cannot be read ({error.strerror}): make it readable") from error
    if (parts := file.integer("split.count", 1)) > 1:
        raise _split(path, parts)
    return file


def _split(path: Path, parts: int) -> UnsupportedModel:
    return UnsupportedModel(
        f"{path} is one of {parts} parts of a model: join them with llama.cpp's `llama-gguf-split --merge`, and name "
        "the file that it makes"
    )


class _Head:
    """Reads a file's head from its begin to its end."""

    def __init__(self, path: Path, content: BinaryIO) -> None:
        self._path = path
        self._content = content
        self._size = path.stat().st_size
        self._place = 0

    def read(self) -> GgufFile:
        if self._bytes(len(_MAGIC)) != _MAGIC:
            raise DamagedCheckpoint(f"{self._path} is not a GGUF file: get the file again")
        version = self._number("<I")
        if version not in _VERSIONS:
            known = " and ".join(map(str, _VERSIONS))
            raise UnsupportedModel(
                f"{self._path} has version {version} of the format, and {known} can be read, in little-endian order: "
                "convert the model again"
            )
        tensor_count, value_count = self._number("<Q"), self._number("<Q")
        metadata: dict[str, object] = {}
        for _ in range(value_count):
            key = self._text()
            metadata[key] = self._value(self._number("<I"))
        tensors = [self._tensor() for _ in range(tensor_count)]
        alignment = metadata.get("general.alignment", _ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise self._damaged(f"its alignment is {alignment!r}")
        begin = -(-self._place // alignment) * alignment
        return GgufFile(self._path, metadata, self._placed(tensors, begin), begin, self._size)

    def _placed(self, tensors: list[tuple[str, tuple[int, ...], int, int]], begin: int) -> dict[str, TensorEntry]:
        placed: dict[str, TensorEntry] = {}
        for name, shape, number, offset in tensors:
            kind = _type_name(number)
            if kind not in SUPPORTED_TYPES:
                raise UnsupportedModel(
                    f"{self._path} has {name} in {kind}, which cannot be read: use a file whose tensors are in "
                    f"{', '.join(SUPPORTED_TYPES)}"
                )
            block, block_bytes = gguf.GGML_QUANT_SIZES[_Type(number)]
            if name in placed or shape[-1] % block:
                raise self._damaged(f"its tensor {name} is there twice, or its rows are not whole blocks")
            end = begin + offset + math.prod(shape) // block * block_bytes
            if end > self._size:
                raise self._damaged(f"it is cut off: it has {self._size} bytes, and its tensors take {end} or more")
            placed[name] = TensorEntry(name, kind, shape, begin + offset, end)
        return placed

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape, number of its type, and its place among the tensors."""
        name = self._text()
        dimensions = self._number("<I")
        if not 1 <= dimensions <= _MOST_DIMENSIONS:
            raise self._damaged(f"its tensor {name} has {dimensions} dimensions")
        shape = tuple(self._number("<Q") for _ in range(dimensions))
        return name, shape[::-1], self._number("<I"), self._number("<Q")

    def _value(self, kind: int) -> object:
        if kind == _Value.STRING:
            return self._text()
        if kind == _Value.ARRAY:
            of, count = self._number("<I"), self._number("<Q")
            if of == _Value.STRING:
                return [self._text() for _ in range(count)]
            return self._scalars(of, count)
        return self._scalars(kind, 1)[0]

    def _scalars(self, kind: int, count: int) -> list[object]:
        form = _SCALARS.get(kind)
        if form is None:
            raise self._damaged(f"it has a value of the unknown type {kind}")
        dtype = np.dtype(form)
        values: list[object] = np.frombuffer(self._bytes(dtype.itemsize * count), dtype).tolist()
        return values

    def _text(self) -> str:
        return self._bytes(self._number("<Q")).decode("utf-8", "replace")

    def _number(self, form: str) -> int:
        return int(struct.unpack(form, self._bytes(struct.calcsize(form)))[0])

    def _bytes(self, count: int) -> bytes:
        self._place += count
        if self._place > self._size:
            raise self._damaged("it is cut off")
        return self._content.read(count)

    def _damaged(self, how: str) -> DamagedCheckpoint:
        return DamagedCheckpoint(f"{self._path} is damaged ({how}): get the file again")


def _type_name(number: int) -> str:
    try:
        return str(_Type(number).name)
    except ValueError:
        return f"the type of number {number}"
