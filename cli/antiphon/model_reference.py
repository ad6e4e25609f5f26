"""`hf://org/name[@revision]` where a model's folder could stand: fetched once into the cache, and served from there.

`hf://org/name/file.gguf[@revision]` is one file of a repository, and stands where a GGUF file could.

`antiphon prepare`, which `antiphon serve` runs first, asks the hub which commit a branch is at, fetches it unless it is
there, and notes it. Workers go by the note, so those that start together serve the same commit and need no network. A
branch that cannot be looked up, because the hub is out of reach, is served as it was noted last.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import secrets
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from antiphon_telemetry.exit import ExitCode

from antiphon.fetch import PLACE, fetch, folder_name
from antiphon.fetch_errors import COMMAND, FetchError

if TYPE_CHECKING:
    from antiphon_worker.options import WorkerOptions

PREFIX = "hf://"

_REFERENCE = re.compile(rf"hf://{PLACE}(?:@([A-Za-z0-9._/-]+))?")


@dataclass(frozen=True, slots=True)
class Reference:
    """A repository of the hub, at a branch, tag or commit (empty: its main branch), or a GGUF file of it."""

    repository: str
    revision: str
    file: str = ""

    @property
    def place(self) -> str:
        """Without its revision."""
        return f"{self.repository}/{self.file}" if self.file else self.repository


def parse_reference(model: str) -> Reference | None:
    """What `model` refers to; None if it is a folder, a file or a name. Raises FetchError."""
    if not model.startswith(PREFIX):
        return None
    match = _REFERENCE.fullmatch(model)
    if match is None:
        raise FetchError(
            f"{model!r} names no model: say hf://org/name or hf://org/name@revision, or hf://org/name/file.gguf for "
            "one file of it",
            ExitCode.BAD_INPUT,
        )
    return Reference(match[1], match[3] or "", match[2] or "")


def fetched(reference: Reference, cache_dir: Path, say: Callable[[str], None]) -> Path:
    """The model's folder or file, as the hub has it now. Raises FetchError."""
    models = cache_dir / "models"
    try:
        told = json.loads(fetch(PREFIX + reference.place, reference.revision, models, wording=COMMAND))
    except FetchError as error:
        known = _noted(reference, models)
        if known is None or error.exit_code != ExitCode.UNAVAILABLE:
            raise
        say(f"{error}; going on with what is here: {known}")
        return known
    _note(reference, models, told["revision"])
    return Path(told["path"])


def located(reference: Reference, cache_dir: Path, say: Callable[[str], None]) -> Path:
    """The model's folder or file as it was noted, without asking anybody; fetched only if there is none.

    Raises FetchError.
    """
    return _noted(reference, cache_dir / "models") or fetched(reference, cache_dir, say)


def for_worker(options: WorkerOptions, say: Callable[[str], None]) -> WorkerOptions:
    """With the path instead of a reference to it, and the reference's name for clients. Raises FetchError."""
    if options.engine != "torch" or (reference := parse_reference(options.model)) is None:
        return options
    from antiphon_engine.torch_engine.demo import default_cache_dir

    cache_dir = Path(options.cache_dir) if options.cache_dir else default_cache_dir()
    path = located(reference, cache_dir, say)
    return dataclasses.replace(options, model=str(path), name=options.name or reference.place)


def _noted(reference: Reference, models: Path) -> Path | None:
    """The folder or file of the commit that was last looked up, if it is there."""
    try:
        commit = _note_file(reference, models).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
    path = models / folder_name(reference.repository, commit, reference.file) / reference.file
    return path if commit and path.exists() else None


def _note(reference: Reference, models: Path, commit: str) -> None:
    """All at once: workers may read it meanwhile."""
    file = _note_file(reference, models)
    fresh = file.with_name(f"{file.name}.{secrets.token_hex(4)}")
    try:
        fresh.write_text(commit + "\n", encoding="ascii")
        os.replace(fresh, file)
    except OSError as error:
        raise FetchError(
            f"{file} cannot be written: {error}: make the cache folder writable", ExitCode.FAILURE
        ) from error


def _note_file(reference: Reference, models: Path) -> Path:
    revision = urllib.parse.quote(reference.revision or "main", safe="")
    return models / f".{reference.place.replace('/', '--')}@{revision}"
