"""The API of a Kubernetes server, in process: what the HTTP server serves and the double's own controllers use.

Synchronous, for one event loop. Objects go in and come out as copies. Refusals are `ApiError`s. Each change is told to
all subscribers before the call returns (see `store`).

    api = Api()
    api.create(CONFIG_MAPS, "default", {"metadata": {"name": "a"}, "data": {"k": "v"}})
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

from tests.support.kube import ssa
from tests.support.kube.admission import admit_pod, quota_status
from tests.support.kube.collector import Collector
from tests.support.kube.defaults import fill, initial_status
from tests.support.kube.deletion import Deletion
from tests.support.kube.errors import (
    ApiError,
    Cause,
    already_exists,
    bad_request,
    conflict,
    forbidden,
    invalid,
    no_such_path,
    not_found,
)
from tests.support.kube.objects import Object, clone, new_uid, timestamp, without
from tests.support.kube.patches import json_patched, merge_patched, strategic_patched
from tests.support.kube.registry import Known, Registry
from tests.support.kube.requests import RequestLog
from tests.support.kube.resources import (
    CONFIG_MAPS,
    CRDS,
    NAMESPACES,
    PODS,
    RESOURCE_QUOTAS,
    SERVICE_ACCOUNTS,
    Resource,
)
from tests.support.kube.rules import name_faults
from tests.support.kube.selectors import both, field_test, label_test
from tests.support.kube.store import Change, Key, Store
from tests.support.kube.writing import completed, confined, decoded, is_same, spec_changed, typed_patch

__all__ = ["Api", "ApiError"]

Entries = list[ssa.Entry] | None
"""Who owns which fields, where an apply has said so already."""
Later = Callable[[Callable[[], None]], None]
Subscriber = Callable[[str, Resource, Object], None]
PodLog = Callable[[Object, str, bool], str | None]
"""(pod, container, previous) -> the log, or None where there is none."""

_ALPHABET = "bcdfghjklmnpqrstvwxz2456789"
_FIRST_NAMESPACES = ("default", "kube-system", "kube-public", "kube-node-lease")


def at_once(action: Callable[[], None]) -> None:
    action()


class Api:
    """`later` puts the collector's work off (a real one needs a moment); by default it is done at once."""

    def __init__(self, later: Later = at_once) -> None:
        self.store = Store()
        self.registry = Registry()
        self.requests = RequestLog()
        self.pod_log: PodLog = lambda pod, container, previous: None
        self._collector = Collector(self, later)
        self._deletion = Deletion(self)
        self.store.subscribe(self._settle)
        self.store.subscribe(self._collector.see)
        for name in _FIRST_NAMESPACES:
            self.create(NAMESPACES, None, {"metadata": {"name": name}})

    # -- reading

    def get(self, resource: Resource, namespace: str | None, name: str) -> Object:
        return clone(self.peek(resource, namespace, name))  # type: ignore[no-any-return]

    def list(
        self, resource: Resource, namespace: str | None = None, *, labels: str = "", fields: str = ""
    ) -> list[Object]:
        return [clone(value) for value in self.select(resource, namespace, labels=labels, fields=fields)]

    def peek(self, resource: Resource, namespace: str | None, name: str) -> Object:
        """The stored object itself, to be read only."""
        known = self.known(resource)
        value = self.store.get(known.resource, _key(known, namespace, name))
        if value is None:
            raise not_found(resource, name)
        return value

    def select(
        self, resource: Resource, namespace: str | None = None, *, labels: str = "", fields: str = ""
    ) -> Iterator[Object]:
        """The stored objects themselves, in order of namespace and name, to be read only."""
        known = self.known(resource)
        test = both(label_test(labels), field_test(fields, resource.kind, known.selectable))
        values = self.store.all(resource, namespace)
        return values if test is None else filter(test, values)

    def subscribe(self, callback: Subscriber) -> Callable[[], None]:
        """`callback(event type, resource, object)` after each change; returns what ends it."""
        return self.store.subscribe(lambda change: callback(change.type, change.resource, clone(change.value)))

    def known(self, resource: Resource) -> Known:
        known = self.registry.get(resource)
        if known is None:
            raise no_such_path()
        return known

    # -- writing

    def create(
        self,
        resource: Resource,
        namespace: str | None,
        body: Object,
        *,
        manager: str = "controller",
        dry_run: bool = False,
        strict: bool = False,
    ) -> Object:
        known = self.known(resource)
        value = decoded(known, body, strict=strict)
        value["metadata"].pop("managedFields", None)
        return self._create(known, namespace, value, manager, None, dry_run)

    def replace(
        self,
        resource: Resource,
        namespace: str | None,
        name: str,
        body: Object,
        *,
        subresource: str = "",
        manager: str = "controller",
        dry_run: bool = False,
        strict: bool = False,
    ) -> Object:
        """PUT: refused with 409 where the body names another resourceVersion than the stored one."""
        known = self.known(resource)
        value = decoded(known, body, strict=strict)
        if (body.get("metadata") or {}).get("name", name) != name:
            raise bad_request("the name of the object does not match the name on the URL")
        if known.needs_version and not value["metadata"].get("resourceVersion"):
            why = "Invalid value: 0x0: must be specified for an update"
            raise invalid(resource, name, [Cause("FieldValueInvalid", why, "metadata.resourceVersion")])
        return self._update(known, namespace, name, lambda live: value, subresource, manager, dry_run)

    def merge_patch(
        self,
        resource: Resource,
        namespace: str | None,
        name: str,
        patch: Object,
        *,
        subresource: str = "",
        manager: str = "controller",
        dry_run: bool = False,
        strict: bool = False,
    ) -> Object:
        known = self.known(resource)

        def patched(live: Object) -> Object:
            return decoded(known, merge_patched(live, patch), strict=strict)

        return self._update(known, namespace, name, patched, subresource, manager, dry_run)

    def strategic_patch(
        self,
        resource: Resource,
        namespace: str | None,
        name: str,
        patch: Object,
        *,
        subresource: str = "",
        manager: str = "controller",
        dry_run: bool = False,
        strict: bool = False,
    ) -> Object:
        known = self.known(resource)
        if known.custom:
            raise ApiError(
                415,
                "UnsupportedMediaType",
                "the body of the request was in an unknown format - accepted media types include: "
                "application/json-patch+json, application/merge-patch+json, application/apply-patch+yaml",
            )

        def patched(live: Object) -> Object:
            return decoded(known, strategic_patched(known.schema, live, patch), strict=strict)

        return self._update(known, namespace, name, patched, subresource, manager, dry_run)

    def json_patch(
        self,
        resource: Resource,
        namespace: str | None,
        name: str,
        operations: Any,
        *,
        subresource: str = "",
        manager: str = "controller",
        dry_run: bool = False,
        strict: bool = False,
    ) -> Object:
        known = self.known(resource)

        def patched(live: Object) -> Object:
            return decoded(known, json_patched(live, operations), strict=strict)

        return self._update(known, namespace, name, patched, subresource, manager, dry_run)

    def apply(
        self,
        resource: Resource,
        namespace: str | None,
        name: str,
        body: Object,
        *,
        manager: str,
        force: bool = False,
        subresource: str = "",
        dry_run: bool = False,
    ) -> Object:
        """Server-side apply. Raises 409 with all conflicts where another manager has a field and `force` is not set."""
        known = self.known(resource)
        stated = (body.get("metadata") or {}).get("name", name)
        if stated != name:
            raise bad_request(f"name in the body ({stated}) does not match the name on the URL ({name})")
        wanted = typed_patch(known, body)
        wanted["metadata"]["name"] = name
        if subresource == "status":
            wanted = {key: item for key, item in wanted.items() if key in ("apiVersion", "kind", "status")}
            wanted["metadata"] = {"name": name}
        elif known.traits.status:
            wanted.pop("status", None)
        key = _key(known, namespace, name)
        live = self.store.get(resource, key)
        if live is None:
            if subresource:
                raise not_found(resource, name)
            if wanted["metadata"].get("uid"):
                raise conflict(
                    resource,
                    name,
                    "uid mismatch: the provided object specified a uid, and no existing object was found",
                )
            applied = ssa.apply(known.schema, None, wanted, manager, force=force)
            return self._create(known, namespace, applied.value, manager, applied.entries, dry_run)
        self._check_version(known, live, wanted)
        applied = ssa.apply(known.schema, live, wanted, manager, force=force, subresource=subresource)
        return clone(self._store(known, key, live, applied.value, subresource, manager, applied.entries, dry_run))  # type: ignore[no-any-return]

    def delete(
        self,
        resource: Resource,
        namespace: str | None,
        name: str,
        *,
        grace_s: int | None = None,
        propagation: str = "Background",
        uid: str = "",
        version: str = "",
        dry_run: bool = False,
    ) -> Object:
        """Gone at once, or marked: by finalizers, by the grace of a pod, by what is left in a namespace.

        A pod that is on a node stays until somebody (its kubelet) deletes it with `grace_s=0`.
        """
        known = self.known(resource)
        key = _key(known, namespace, name)
        live = self.store.get(resource, key)
        if live is None:
            raise not_found(resource, name)
        self._deletion.check(known, live, uid=uid, version=version)
        if dry_run:
            return clone(live)  # type: ignore[no-any-return]
        return clone(self._deletion.delete(known, key, live, grace_s, propagation))  # type: ignore[no-any-return]

    # -- how

    def _create(
        self,
        known: Known,
        namespace: str | None,
        value: Object,
        manager: str,
        entries: Entries,
        dry_run: bool,
    ) -> Object:
        resource, metadata = known.resource, value["metadata"]
        if metadata.get("resourceVersion"):
            raise bad_request("resourceVersion should not be set on objects to be created")
        if not metadata.get("name"):
            prefix = metadata.get("generateName")
            if not prefix:
                why = "Required value: name or generateName is required"
                raise invalid(resource, "", [Cause("FieldValueRequired", why, "metadata.name")])
            metadata["name"] = prefix[:58] + "".join(random.choices(_ALPHABET, k=5))  # as unguessable as a real one
        name = metadata["name"]
        if faults := name_faults(resource, name):
            raise invalid(resource, name, faults)
        key = _key(known, namespace, name)
        if resource.namespaced:
            if metadata.get("namespace", namespace) != namespace:
                raise bad_request(
                    "the namespace of the provided object does not match the namespace sent on the request"
                )
            metadata["namespace"] = namespace
            self._check_namespace(resource, key)
        else:
            metadata.pop("namespace", None)
        if self.store.get(resource, key) is not None:
            raise already_exists(resource, name)
        for field in ("deletionTimestamp", "deletionGracePeriodSeconds", "generation", "selfLink"):
            metadata.pop(field, None)
        metadata["uid"] = new_uid()
        metadata["creationTimestamp"] = timestamp()
        if known.traits.generation:
            metadata["generation"] = 1
        if known.traits.status and not (resource.plural == "nodes" and not resource.group):
            value.pop("status", None)
        status = None if known.custom else initial_status(resource, value) if resource != PODS else None
        if resource == PODS:
            fill(resource, value)
            admit_pod(self.store, value)
            status = initial_status(resource, value)
        if status is not None:
            value["status"] = status
        owned = clone(value) if entries is None else None
        value = completed(known, value, None)
        if entries is None:
            stated = without(owned or value, "status") if known.traits.status else owned or value
            entries = ssa.after_update(known.schema, None, stated, manager, "")
        ssa.write_entries(value, entries)
        if dry_run:
            return value
        return clone(self.store.put(resource, key, value))  # type: ignore[no-any-return]

    def _update(
        self,
        known: Known,
        namespace: str | None,
        name: str,
        change: Callable[[Object], Object],
        subresource: str,
        manager: str,
        dry_run: bool,
    ) -> Object:
        key = _key(known, namespace, name)
        live = self.store.get(known.resource, key)
        if live is None:
            raise not_found(known.resource, name)
        wanted = change(live)
        self._check_version(known, live, wanted)
        return clone(self._store(known, key, live, wanted, subresource, manager, None, dry_run))  # type: ignore[no-any-return]

    def _store(
        self,
        known: Known,
        key: Key,
        live: Object,
        wanted: Object,
        subresource: str,
        manager: str,
        entries: Entries,
        dry_run: bool,
    ) -> Object:
        """`wanted` in the place of `live`, unless nothing changes. Returns what is stored now."""
        value = decoded(known, confined(known, live, wanted, subresource))
        value = completed(known, value, live)
        if entries is None:
            cleared = wanted["metadata"].get("managedFields") in ([], [{}]) and not subresource
            base = live | {"metadata": live["metadata"] | {"managedFields": []}} if cleared else live
            entries = ssa.after_update(known.schema, base, value, manager, subresource)
        ssa.write_entries(value, entries)
        if is_same(live, value) or dry_run:
            return live if is_same(live, value) else value
        if known.traits.generation and spec_changed(known, live, value):
            value["metadata"]["generation"] = live["metadata"].get("generation", 1) + 1
        metadata = value["metadata"]
        if metadata.get("deletionTimestamp") and self._deletion.is_over(known.resource, value):
            return self.store.remove(known.resource, key)
        return self.store.put(known.resource, key, value)

    def _check_version(self, known: Known, live: Object, wanted: Object) -> None:
        metadata, stored = wanted["metadata"], live["metadata"]
        if metadata.get("uid") and metadata["uid"] != stored["uid"]:
            why = f"Precondition failed: UID in precondition: {metadata['uid']}, UID in object meta: {stored['uid']}"
            raise conflict(known.resource, stored["name"], why)
        if metadata.get("resourceVersion") not in (None, "", stored["resourceVersion"]):
            raise conflict(known.resource, stored["name"])

    def _check_namespace(self, resource: Resource, key: Key) -> None:
        namespace = self.store.get(NAMESPACES, ("", key[0]))
        if namespace is None:
            raise not_found(NAMESPACES, key[0])
        if namespace["metadata"].get("deletionTimestamp"):
            why = f"unable to create new content in namespace {key[0]} because it is being terminated"
            cause = Cause("NamespaceTerminating", f"namespace {key[0]} is being terminated", "metadata.namespace")
            raise forbidden(resource, key[1], why, cause)

    # -- what the server does by itself

    def _settle(self, change: Change) -> None:
        """First of the subscribers: kinds come and go, namespaces get what every one has, quotas count."""
        value, resource = change.value, change.resource
        if resource == CRDS:
            if change.type == "DELETED":
                self.store.drop_table(self.registry.uninstall(value))
            else:
                self.registry.install(value)
        elif resource == NAMESPACES and change.type == "ADDED":
            name = value["metadata"]["name"]
            self.create(SERVICE_ACCOUNTS, name, {"metadata": {"name": "default"}})
            self.create(CONFIG_MAPS, name, {"metadata": {"name": "kube-root-ca.crt"}, "data": {"ca.crt": ""}})
        elif (resource in (PODS, RESOURCE_QUOTAS) and change.type != "DELETED") or resource == PODS:
            self._count_quotas(value["metadata"]["namespace"])

    def _count_quotas(self, namespace: str) -> None:
        for quota in list(self.store.all(RESOURCE_QUOTAS, namespace)):
            status = quota_status(self.store, quota)
            if quota.get("status") != status:
                self.merge_patch(
                    RESOURCE_QUOTAS, namespace, quota["metadata"]["name"], {"status": status}, subresource="status"
                )

    def rewrite(self, resource: Resource, value: Object, metadata: Object, **fields: Any) -> Object:
        """Store the object with other metadata, past all checks; removes it where that ends its deletion."""
        key = (value["metadata"].get("namespace", ""), value["metadata"]["name"])
        new = {**value, **fields, "metadata": metadata}
        if metadata.get("deletionTimestamp") and self._deletion.is_over(resource, new):
            return self.store.remove(resource, key)
        return self.store.put(resource, key, new)


def _key(known: Known, namespace: str | None, name: str) -> Key:
    if known.resource.namespaced and not namespace:
        raise bad_request("an empty namespace may not be set when a resource name is provided")
    return (namespace or "" if known.resource.namespaced else "", name)
