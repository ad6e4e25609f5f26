"""The safetensors files of a folder, looked at before anything is loaded: are they whole, how big, and whose are they.

Only headers and a few sampled bytes are read. Raises DamagedCheckpoint or BadModelFolder with what to do.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from antiphon_engine.torch_engine.errors import BadModelFolder, DamagedCheckpoint

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_PICKLED_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".ckpt"})
_MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors format."""
_SAMPLE_BYTES = 2048


@dataclass(frozen=True, slots=True)
class TensorEntry:
    name: str
    dtype: str
    """As safetensors names it: BF16, F32, ..."""
    shape: tuple[int, ...]
    begin: int
    """Bytes from the file's start."""
    end: int


@dataclass(frozen=True, slots=True)
class WeightFile:
    path: Path
    header: bytes
    size_bytes: int
    tensors: tuple[TensorEntry, ...]


def read_weight_files(folder: Path) -> tuple[WeightFile, ...]:
    """All weight files of the folder, each checked to be whole, in order of their names."""
    return tuple(_read(path) for path in _weight_paths(folder))


def content_revision(config: bytes, files: tuple[WeightFile, ...]) -> str:
    """Identity of the weights: 32 hexadecimal digits.

    SHA-256 over config.json, every file's header (names, dtypes, shapes, offsets) and size, and of every tensor the
    first 2 KiB and 2 KiB from its middle. Two trainings of one architecture differ in every tensor that was trained,
    so they differ here; and a model of 100 GB costs megabytes of reading, not minutes. File names do not count.
    """
    digest = hashlib.sha256()
    for field in _revision_fields(config, files):
        digest.update(len(field).to_bytes(8, "little"))
        digest.update(field)
    return digest.hexdigest()[:32]


def _revision_fields(config: bytes, files: tuple[WeightFile, ...]) -> Iterator[bytes]:
    yield config
    for file in files:
        yield file.header
        yield file.size_bytes.to_bytes(8, "little")
        with file.path.open("rb") as content:
            for tensor in file.tensors:
                for start in (tensor.begin, (tensor.begin + tensor.end) // 2):
                    content.seek(start)
                    yield content.read(min(_SAMPLE_BYTES, tensor.end - start))


def _weight_paths(folder: Path) -> list[Path]:
    index = folder / INDEX_FILE
    if index.is_file():
        return _indexed_paths(folder, index)
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    pickled = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLED_SUFFIXES)
    if pickled:
        raise BadModelFolder(
            f"{folder} has its weights as pickles ({pickled[0]}), which can run code and are never loaded: "
            "get or convert the model as safetensors"
        )
    raise BadModelFolder(f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}: get the model's weights as safetensors")


def _indexed_paths(folder: Path, index: Path) -> list[Path]:
    try:
        names = set(json.loads(index.read_bytes())["weight_map"].values())
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise DamagedCheckpoint(f"{index} is not a safetensors index ({error!r}): get the file again") from error
    paths = []
    for name in sorted(names):
        path = folder / str(name)
        if path.parent != folder:
            raise DamagedCheckpoint(f"{index} names {name!r}, which is outside the folder: get the file again")
        if not path.is_file():
            raise DamagedCheckpoint(f"{folder} lacks {name}, which {INDEX_FILE} names: get that file")
        paths.append(path)
    if not paths:
        raise DamagedCheckpoint(f"{index} names no file: get the file again")
    return paths


def _read(path: Path) -> WeightFile:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
            raise _damaged(path, "its header is cut off")
        header = file.read(length)
    data_begin = 8 + length
    try:
        tensors = tuple(
            TensorEntry(
                name=name,
                dtype=str(entry["dtype"]),
                shape=tuple(int(extent) for extent in entry["shape"]),
                begin=data_begin + int(entry["data_offsets"][0]),
                end=data_begin + int(entry["data_offsets"][1]),
            )
            for name, entry in json.loads(header).items()
            if name != "__metadata__"
        )
    except (ValueError, KeyError, AttributeError, TypeError, IndexError) as error:
        raise _damaged(path, "its header is not safetensors") from error
    expected = max((tensor.end for tensor in tensors), default=data_begin)
    if size != expected:
        raise _damaged(path, f"it has {size} bytes, its header says {expected}")
    return WeightFile(path=path, header=header, size_bytes=size, tensors=tensors)


def _damaged(path: Path, how: str) -> DamagedCheckpoint:
    return DamagedCheckpoint(f"{path} is damaged ({how}): get the file again")
