"""Deletion: at once, or marked with a deletionTimestamp until finalizers, grace or contents are gone."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from tests.support.kube.collector import CRD_CLEANUP, FOREGROUND, ORPHAN
from tests.support.kube.errors import bad_request, conflict
from tests.support.kube.objects import Object, timestamp
from tests.support.kube.registry import Known, resource_of_crd
from tests.support.kube.resources import CRDS, NAMESPACES, PODS, Resource
from tests.support.kube.store import Key

if TYPE_CHECKING:
    from tests.support.kube.api import Api

_POLICY_FINALIZERS = {"Foreground": FOREGROUND, "Orphan": ORPHAN}


class Deletion:
    def __init__(self, api: Api) -> None:
        self._api = api

    def check(self, known: Known, live: Object, *, uid: str, version: str) -> None:
        """Preconditions. Raises 409."""
        metadata = live["metadata"]
        if uid and uid != metadata["uid"]:
            why = f"Precondition failed: UID in precondition: {uid}, UID in object meta: {metadata['uid']}"
            raise conflict(known.resource, metadata["name"], why)
        if version and version != metadata["resourceVersion"]:
            why = (
                f"Precondition failed: ResourceVersion in precondition: {version}, "
                f"ResourceVersion in object meta: {metadata['resourceVersion']}"
            )
            raise conflict(known.resource, metadata["name"], why)

    def delete(self, known: Known, key: Key, live: Object, grace_s: int | None, propagation: str) -> Object:
        resource, metadata = known.resource, dict(live["metadata"])
        if propagation not in ("Background", "Foreground", "Orphan"):
            raise bad_request(f'invalid propagationPolicy: "{propagation}"')
        finalizers = [each for each in metadata.get("finalizers") or () if each not in _POLICY_FINALIZERS.values()]
        if propagation in _POLICY_FINALIZERS:
            finalizers.append(_POLICY_FINALIZERS[propagation])
        if resource == CRDS and self._api.store.count(resource_of_crd(live)[0]) and CRD_CLEANUP not in finalizers:
            finalizers.append(CRD_CLEANUP)
        if finalizers:
            metadata["finalizers"] = finalizers
        else:
            metadata.pop("finalizers", None)
        grace = self._grace_s(resource, live, grace_s)
        marked = "deletionTimestamp" in metadata
        if not marked or (resource == PODS and grace < metadata.get("deletionGracePeriodSeconds", 0)):
            metadata["deletionTimestamp"] = timestamp(datetime.now(UTC) + timedelta(seconds=grace))
            metadata["deletionGracePeriodSeconds"] = grace
            if not marked and metadata.get("generation"):
                metadata["generation"] += 1
        status = {}
        if resource == NAMESPACES:
            status = {"status": {**(live.get("status") or {}), "phase": "Terminating"}}
        new = {**live, **status, "metadata": metadata}
        if self.is_over(resource, new):
            return self._api.store.remove(resource, key)
        if metadata == live["metadata"]:
            return live
        return self._api.store.put(resource, key, new)

    def is_over(self, resource: Resource, value: Object) -> bool:
        """Whether nothing keeps an object that is marked."""
        metadata = value["metadata"]
        if metadata.get("finalizers"):
            return False
        if resource == NAMESPACES:
            return not self._api.store.resources_in(metadata["name"])
        return not (resource == PODS and metadata.get("deletionGracePeriodSeconds"))

    def _grace_s(self, resource: Resource, live: Object, asked_s: int | None) -> int:
        if resource != PODS:
            return 0
        spec, status = live["spec"], live.get("status") or {}
        if not spec.get("nodeName") or status.get("phase") in ("Succeeded", "Failed"):
            return 0
        own: int = spec.get("terminationGracePeriodSeconds", 30)
        return own if asked_s is None else max(asked_s, 0)
