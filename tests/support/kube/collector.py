"""What goes when something else goes: children of owners, contents of namespaces, objects of removed kinds.

Owner references are by uid. An object all of whose owners are gone is deleted; one of several owners that is gone is
struck from the list. A foreground deletion waits for the children that block it; an orphaning one lets them go free.
A namespace goes when nothing is left in it.

The collector is a client of the Api like any other: it sees changes and makes requests. Nothing here needs a controller
of the product to be alive.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.support.kube.errors import ApiError
from tests.support.kube.objects import Object, owner_uids, without
from tests.support.kube.registry import resource_of_crd
from tests.support.kube.resources import CRDS, NAMESPACES, Resource
from tests.support.kube.store import Change

if TYPE_CHECKING:
    from tests.support.kube.api import Api

FOREGROUND = "foregroundDeletion"
ORPHAN = "orphan"
CRD_CLEANUP = "customresourcecleanup.apiextensions.k8s.io"


class Collector:
    """`later(action)` says when to act: at once in tests of the Api, a moment later beside a running operator."""

    def __init__(self, api: Api, later: Callable[[Callable[[], None]], None]) -> None:
        self._api = api
        self._later = later

    def see(self, change: Change) -> None:
        value, metadata = change.value, change.value["metadata"]
        uid = metadata["uid"]
        if change.type == "DELETED":
            if self._api.store.owned_by(uid):
                self._later(lambda: self._owner_gone(uid))
            for owner in owner_uids(value):
                self._later(lambda owner=owner: self._finish_foreground(owner))  # type: ignore[misc]
            if namespace := metadata.get("namespace"):
                self._later(lambda: self._finish_namespace(namespace))
            crd = f"{change.resource.plural}.{change.resource.group}"
            if self._api.store.get(CRDS, ("", crd)) is not None:
                self._later(lambda: self._empty_kind(crd))
            return
        if owner_uids(value) and (change.before is None or owner_uids(change.before) != owner_uids(value)):
            self._later(lambda: self._check_owners(uid))
        if metadata.get("deletionTimestamp"):
            finalizers = metadata.get("finalizers") or ()
            if FOREGROUND in finalizers:
                self._later(lambda: self._start_foreground(uid))
            if ORPHAN in finalizers:
                self._later(lambda: self._orphan(uid))
            if change.resource == NAMESPACES:
                self._later(lambda: self._empty_namespace(metadata["name"]))
            if change.resource == CRDS:
                self._later(lambda: self._empty_kind(metadata["name"]))

    def _owner_gone(self, uid: str) -> None:
        for _, child in self._api.store.owned_by(uid):
            self._check_owners(child["metadata"]["uid"])

    def _check_owners(self, uid: str) -> None:
        """Delete what has no owner left; strike owners that are gone."""
        found = self._api.store.find(uid)
        if found is None:
            return
        resource, value = found
        references = value["metadata"].get("ownerReferences") or []
        alive = [owner for owner in references if self._exists(owner, value["metadata"].get("namespace", ""))]
        if not references or len(alive) == len(references):
            return
        if alive:
            self._strike_owners(resource, value, alive)
            return
        self._delete(resource, value, "Background")

    def _exists(self, owner: Object, namespace: str) -> bool:
        if self._api.registry.of_kind(owner["apiVersion"], owner["kind"]) is None:
            return True  # A kind that is not served: nothing can be said, so nothing is deleted.
        found = self._api.store.find(owner["uid"])
        if found is None:
            return False
        resource, value = found
        return (
            resource.kind == owner["kind"]
            and value["metadata"]["name"] == owner["name"]
            and value["metadata"].get("namespace", "") in ("", namespace)
        )

    def _start_foreground(self, uid: str) -> None:
        for resource, child in self._api.store.owned_by(uid):
            if not child["metadata"].get("deletionTimestamp"):
                has_children = bool(self._api.store.owned_by(child["metadata"]["uid"]))
                self._delete(resource, child, "Foreground" if has_children else "Background")
        self._finish_foreground(uid)

    def _finish_foreground(self, uid: str) -> None:
        found = self._api.store.find(uid)
        if found is None or FOREGROUND not in (found[1]["metadata"].get("finalizers") or ()):
            return
        for _, child in self._api.store.owned_by(uid):
            for owner in child["metadata"]["ownerReferences"]:
                if owner["uid"] == uid and owner.get("blockOwnerDeletion"):
                    return
        self._drop_finalizer(found[0], found[1], FOREGROUND)

    def _orphan(self, uid: str) -> None:
        found = self._api.store.find(uid)
        if found is None:
            return
        for resource, child in self._api.store.owned_by(uid):
            others = [owner for owner in child["metadata"]["ownerReferences"] if owner["uid"] != uid]
            self._strike_owners(resource, child, others)
        self._drop_finalizer(found[0], found[1], ORPHAN)

    def _empty_namespace(self, namespace: str) -> None:
        for resource in self._api.store.resources_in(namespace):
            for value in list(self._api.store.all(resource, namespace)):
                if not value["metadata"].get("deletionTimestamp"):
                    self._delete(resource, value, "Background")
        self._finish_namespace(namespace)

    def _finish_namespace(self, namespace: str) -> None:
        value = self._api.store.get(NAMESPACES, ("", namespace))
        if value is None or not value["metadata"].get("deletionTimestamp"):
            return
        if not self._api.store.resources_in(namespace):
            self._api.rewrite(NAMESPACES, value, value["metadata"])

    def _empty_kind(self, name: str) -> None:
        """A CustomResourceDefinition that is to go takes its objects with it."""
        crd = self._api.store.get(CRDS, ("", name))
        if crd is None or not crd["metadata"].get("deletionTimestamp"):
            return
        resource, _ = resource_of_crd(crd)
        for value in list(self._api.store.all(resource)):
            if not value["metadata"].get("deletionTimestamp"):
                self._delete(resource, value, "Background")
        crd = self._api.store.get(CRDS, ("", name))
        if crd is not None and not self._api.store.count(resource):
            self._drop_finalizer(CRDS, crd, CRD_CLEANUP)

    def _strike_owners(self, resource: Resource, value: Object, left: list[Object]) -> None:
        metadata = without(value["metadata"], "ownerReferences")
        self._api.rewrite(resource, value, metadata | ({"ownerReferences": left} if left else {}))

    def _drop_finalizer(self, resource: Resource, value: Object, finalizer: str) -> None:
        left = [each for each in value["metadata"].get("finalizers") or () if each != finalizer]
        metadata = without(value["metadata"], "finalizers")
        self._api.rewrite(resource, value, metadata | ({"finalizers": left} if left else {}))

    def _delete(self, resource: Resource, value: Object, propagation: str) -> None:
        metadata = value["metadata"]
        try:
            self._api.delete(
                resource, metadata.get("namespace"), metadata["name"], propagation=propagation, uid=metadata["uid"]
            )
        except ApiError as error:
            if error.status not in (404, 409):
                raise
