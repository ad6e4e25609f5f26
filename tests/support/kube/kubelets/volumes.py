"""A pod's volumes as folders: empty ones, the content of Secrets and ConfigMaps, labels, and claims that outlive pods.

Contents are written when the pod starts and followed on `refresh` (a Secret that changes reaches the pod's folder, as
it does after a while in a cluster). A claim is one folder for its whole life.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.kube.kubelets.environment import KeyedKind, Keys
from tests.support.kube.kubelets.runtime import NotYet, TestFault
from tests.support.kube.kubelets.substitution import Mount

Object = Mapping[str, Any]
KINDS: Mapping[str, KeyedKind] = {"secret": "Secret", "configMap": "ConfigMap"}


class Volumes:
    """Of one pod. `folder` is its own; claims lie in `claims`."""

    def __init__(self, pod: Object, folder: Path, claims: Path, fields: Callable[[str], str], keys: Keys) -> None:
        self._pod, self._folder, self._claims = pod, folder, claims
        self._fields, self._keys = fields, keys
        self._places: dict[str, Path] = {}
        self._fixed: set[str] = set()

    async def make(self) -> None:
        """All of them. Raises NotYet while something that is mounted is missing."""
        for volume in self._pod["spec"].get("volumes") or ():
            self._places[volume["name"]] = await self._made(volume)

    async def refresh(self) -> None:
        """Write again what has changed."""
        for volume in self._pod["spec"].get("volumes") or ():
            if volume["name"] in self._fixed:
                await self._made(volume)

    def mounts(self, container: Object) -> list[Mount]:
        return [self._mount(each) for each in container.get("volumeMounts") or ()]

    def _mount(self, mount: Object) -> Mount:
        place = self._places.get(mount["name"])
        if place is None:
            raise TestFault(f"volumeMount {mount['mountPath']} names {mount['name']!r}, which is no volume of the pod")
        if sub_path := mount.get("subPath"):
            place = place / sub_path
            if mount["name"] not in self._fixed:
                place.mkdir(parents=True, exist_ok=True)
        return Mount(mount["mountPath"].rstrip("/"), place, fixed=mount["name"] in self._fixed)

    async def _made(self, volume: Object) -> Path:
        name = volume["name"]
        if claim := volume.get("persistentVolumeClaim"):
            return _folder(self._claims / self._pod["metadata"]["namespace"] / claim["claimName"])
        place = _folder(self._folder / "volumes" / name)
        if "emptyDir" in volume:
            return place
        self._fixed.add(name)
        for file, content in (await self._content(volume)).items():
            _write(place / file, content)
        return place

    async def _content(self, volume: Object) -> dict[str, bytes]:
        if "projected" in volume:
            content: dict[str, bytes] = {}
            for source in volume["projected"].get("sources") or ():
                content |= await self._source(source, volume["name"])
            return content
        return await self._source(volume, volume["name"])

    async def _source(self, source: Object, volume: str) -> dict[str, bytes]:
        if downward := source.get("downwardAPI"):
            return {
                item["path"]: self._fields(item["fieldRef"]["fieldPath"]).encode()
                for item in downward.get("items") or ()
            }
        if "serviceAccountToken" in source:
            return {source["serviceAccountToken"]["path"]: b"a token that opens nothing"}
        for field, kind in KINDS.items():
            if (reference := source.get(field)) is not None:
                name = reference.get("secretName") or reference["name"]
                found = await self._keys(kind, name)
                if found is not None:
                    return _picked(found, reference.get("items") or (), f"{kind} {name}")
                if reference.get("optional"):
                    return {}
                why = f'MountVolume.SetUp failed for volume "{volume}" : {kind.lower()} "{name}" not found'
                raise NotYet("FailedMount", why)
        raise TestFault(f"volume {volume!r}: the process kubelet plays no {sorted(set(source) - {'name'})}")


def _folder(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    return path


def _picked(found: Mapping[str, bytes], items: Sequence[Object], what: str) -> dict[str, bytes]:
    if not items:
        return dict(found)
    for item in items:
        if item["key"] not in found:
            raise NotYet("FailedMount", f"{what} has no key {item['key']}")
    return {item["path"]: found[item["key"]] for item in items}


def _write(file: Path, content: bytes) -> None:
    """Whole or not at all, as a reader may read meanwhile."""
    if file.is_file() and file.read_bytes() == content:
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    fresh = file.with_name(f".{file.name}.fresh")
    fresh.write_bytes(content)
    os.replace(fresh, file)
