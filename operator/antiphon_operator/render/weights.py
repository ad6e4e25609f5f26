"""Where a Model's weights lie in its pods, and how large they are.

`hf://` names are resolved to a commit by a Job before any pod is made, so that all pods of a revision load the same
bytes; what the Job found comes back as JSON in its termination message. `pvc://` folders are taken as they are.
A path that ends in `.gguf` is a file: the folder that has it is mounted, and the worker is told the file's path.
`demo` and the timed engine need none: the image has the demo model in it.
"""

from __future__ import annotations

import hashlib
import json
import posixpath
import re
from dataclasses import dataclass
from typing import NamedTuple

from antiphon_operator.resource.effective import EffectiveModel

MODELS_FOLDER = "/models"
"""Where weights are mounted in worker and Job pods."""

HUB = "hf://"
CLAIM = "pvc://"
GGUF = ".gguf"

_COMMIT = re.compile(r"^[0-9a-f]{7,64}$")


class SourceResultError(ValueError):
    """A termination message of the source Job that is not what `antiphon fetch` writes. It is shown as it is."""


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of one revision, resolved."""

    revision: str
    """Commit, in full; empty for a folder of a claim, whose content nobody names."""
    size_bytes: int
    """0: not known."""
    path: str
    """In the pod: a folder right below `MODELS_FOLDER`, or a file in one."""

    @property
    def folder(self) -> str:
        """Below `MODELS_FOLDER`: also the folder inside a claim."""
        return posixpath.relpath(self.path, MODELS_FOLDER).split("/", 1)[0]

    @property
    def mount_path(self) -> str:
        """Where `folder` is in the pod."""
        return posixpath.join(MODELS_FOLDER, self.folder)


def needs_source_job(model: EffectiveModel) -> bool:
    """Whether a Job has to find (and for a claim, fetch) the weights before pods can be rendered."""
    return model.spec.engine.name != "timed" and model.spec.source.uri.startswith(HUB)


def weights_at_rest(model: EffectiveModel) -> Weights | None:
    """The weights of a Model that needs no Job: those of `pvc://`, or None where the image has all there is."""
    uri = model.spec.source.uri
    if model.spec.engine.name == "timed" or not uri.startswith(CLAIM):
        return None
    name, _, file = claim_of(uri)
    path = f"{MODELS_FOLDER}/{name}/{file}" if file else f"{MODELS_FOLDER}/{name}"
    return Weights(revision="", size_bytes=0, path=path)


class ClaimPlace(NamedTuple):
    """What `pvc://claim/folder` and `pvc://claim/folder/file.gguf` name."""

    name: str
    folder: str
    """Inside the claim; empty: its root."""
    file: str
    """In that folder; empty: the folder is served."""


def claim_of(uri: str) -> ClaimPlace:
    name, _, path = uri.removeprefix(CLAIM).partition("/")
    path = path.strip("/")
    if not path.endswith(GGUF):
        return ClaimPlace(name, path, "")
    folder, _, file = path.rpartition("/")
    return ClaimPlace(name, folder, file)


def source_content(model: EffectiveModel) -> str:
    """8 hex digits that name what the Job has to find: another source, revision or cache is another Job."""
    source = model.spec.source
    told = json.dumps([source.uri, source.revision, source.cache.type, source.cache.claim_name])
    return hashlib.sha256(told.encode()).hexdigest()[:8]


def read_source_result(message: str) -> Weights:
    """What a finished Job says it found, `{"revision": ..., "size_bytes": ..., "path": ...}`.

    Raises SourceResultError: the Job failed and the message is its error, or its image is of another version.
    """
    try:
        told = json.loads(message)
        found = Weights(revision=str(told["revision"]), size_bytes=int(told["size_bytes"]), path=str(told["path"]))
    except (ValueError, KeyError, TypeError) as error:
        raise SourceResultError(message.strip() or "the Job that gets the weights said nothing") from error
    path = posixpath.normpath(found.path)
    depth = path.removeprefix(f"{MODELS_FOLDER}/").count("/")
    if (
        not _COMMIT.match(found.revision)
        or not path.startswith(f"{MODELS_FOLDER}/")
        or (depth > 0 and not path.endswith(GGUF))
    ):
        raise SourceResultError(
            f"the Job's answer is not a commit with a folder below {MODELS_FOLDER}, or a file in one: {message[:300]}"
        )
    return found
