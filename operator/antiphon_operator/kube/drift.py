"""Does a live object still say what we want? Pure.

Judged on the fields that the operator owns and never on whole objects: the API server fills in defaults and others own
fields of their own. A field that we wanted once and do not want any more cannot be seen that way; the digest of what
was applied last, kept in an annotation, tells that.

An object that is `create_only` (its fields cannot be changed once made: the StatefulSet of a replica, a
ControllerRevision, a Job) is compared, and changed, in its metadata alone. There, what carries our prefix is ours.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import msgspec

from antiphon_operator.kube.compare import differences
from antiphon_operator.kube.resources import Object
from antiphon_operator.names import APPLIED_ANNOTATION, GROUP

_OURS = f"{GROUP}/"


class Wanted(Protocol):
    """An object as it should be; `plan.planned.Apply` is one."""

    @property
    def manifest(self) -> Mapping[str, Any]: ...

    @property
    def create_only(self) -> bool: ...


def stamped(manifest: Object) -> dict[str, Any]:
    """The manifest with the digest of all that it says in its annotations: this is what is applied."""
    metadata = dict(manifest["metadata"])
    metadata["annotations"] = {**(metadata.get("annotations") or {}), APPLIED_ANNOTATION: digest(manifest)}
    return {**manifest, "metadata": metadata}


def digest(manifest: Object) -> str:
    """16 hex digits; the same for equal manifests, however their maps are ordered, and whether stamped or not."""
    metadata = dict(manifest["metadata"])
    annotations = {key: text for key, text in (metadata.get("annotations") or {}).items() if key != APPLIED_ANNOTATION}
    metadata["annotations"] = annotations
    said = msgspec.json.encode({**manifest, "metadata": metadata}, order="deterministic")
    return hashlib.sha256(said).hexdigest()[:16]


def needs_apply(wanted: Wanted, live: Object | None) -> bool:
    """There is no such object, or it does not say what we want."""
    if live is None:
        return True
    if wanted.create_only:
        return metadata_patch(wanted.manifest, live) is not None
    return _applied(live) != digest(wanted.manifest) or next(_owned(wanted.manifest, live), None) is not None


def changed_fields(wanted: Wanted, live: Object) -> list[str]:
    """Paths of what somebody else changed since we applied this same manifest: hand edits, for an Event about them.

    Empty where the manifest itself is a new one: then a difference says nothing about others.
    """
    if wanted.create_only or _applied(live) != digest(wanted.manifest):
        return []
    return list(_owned(wanted.manifest, live))


def metadata_patch(manifest: Object, live: Object) -> dict[str, Any] | None:
    """Merge patch that makes labels, annotations and owners as wanted; None if they are.

    Labels and annotations of ours (by prefix) that are not wanted any more go; those of others stay.
    """
    metadata, live_metadata = manifest["metadata"], live["metadata"]
    patch: dict[str, Any] = {}
    for field in ("labels", "annotations"):
        wanted, there = metadata.get(field) or {}, live_metadata.get(field) or {}
        changes = {key: value for key, value in wanted.items() if there.get(key) != value and key != APPLIED_ANNOTATION}
        changes |= {
            key: None for key in there if key.startswith(_OURS) and key not in wanted and key != APPLIED_ANNOTATION
        }
        if changes:
            patch[field] = changes
    owners, owners_there = metadata.get("ownerReferences") or [], live_metadata.get("ownerReferences") or []
    if next(differences({"ownerReferences": owners}, {"ownerReferences": owners_there}), None) is not None:
        ours = {owner["uid"] for owner in owners}
        patch["ownerReferences"] = [*owners, *(owner for owner in owners_there if owner["uid"] not in ours)]
    return {"metadata": patch} if patch else None


def status_patch(wanted: Mapping[str, Any], live: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Merge patch that makes a status, which is ours alone, as wanted: what is not wanted goes. None if it is so."""
    return _replace(wanted, live or {}) or None


def _replace(wanted: Mapping[str, Any], live: Mapping[str, Any]) -> dict[str, Any]:
    patch: dict[str, Any] = {key: None for key in live if wanted.get(key) is None and live[key] is not None}
    for key, value in wanted.items():
        there = live.get(key)
        if isinstance(value, Mapping) and isinstance(there, Mapping):
            inner = _replace(value, there)
            if inner:
                patch[key] = inner
        elif value is not None and (
            _plain(value) != _plain(there) or isinstance(value, bool) != isinstance(there, bool)
        ):
            patch[key] = value
    return patch


def _plain(value: Any) -> Any:
    """Tuples are written as lists."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def _owned(manifest: Object, live: Object) -> Iterator[str]:
    """Lists leave out apiVersion and kind; objects are found by them, so they are right."""
    return differences({key: value for key, value in manifest.items() if key not in ("apiVersion", "kind")}, live)


def _applied(live: Object) -> str:
    return str((live["metadata"].get("annotations") or {}).get(APPLIED_ANNOTATION, ""))
