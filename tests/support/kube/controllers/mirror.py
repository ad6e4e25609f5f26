"""All objects of the cluster as the controllers see them: exact, because the Api tells of each change synchronously.

Controllers read here and write through the Api. The objects are the stored ones, to be read only: they are never
changed in place, each change brings a new one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from tests.support.kube.api import Api
from tests.support.kube.controllers.podinfo import controller_of
from tests.support.kube.resources import PODS, Resource
from tests.support.kube.store import Change

Object = dict[str, Any]
Key = tuple[str, str]
"""(namespace, name); the namespace is empty for what has none."""


def key_of(thing: Object) -> Key:
    return thing["metadata"].get("namespace", ""), thing["metadata"]["name"]


class Mirror:
    """`close()` ends the subscription."""

    def __init__(self, api: Api, *resources: Resource) -> None:
        self._objects: dict[Resource, dict[Key, Object]] = {resource: {} for resource in resources}
        self._pods_by_owner: dict[str, dict[Key, Object]] = defaultdict(dict)
        self._pods_by_label: dict[tuple[str, str, str], dict[Key, Object]] = defaultdict(dict)
        self._pods_by_node: dict[str, dict[Key, Object]] = defaultdict(dict)
        self._listeners: list[Callable[[str, Resource, Object], None]] = []
        for resource in resources:
            for thing in api.select(resource):
                self._put(resource, thing)
        self.close = api.store.subscribe(self._changed)

    def on_change(self, listener: Callable[[str, Resource, Object], None]) -> None:
        """Called after the mirror has the change. `listener(type, resource, object)`."""
        self._listeners.append(listener)

    def get(self, resource: Resource, key: Key) -> Object | None:
        return self._objects[resource].get(key)

    def all(self, resource: Resource, namespace: str | None = None) -> list[Object]:
        return [
            thing
            for (thing_namespace, _), thing in self._objects[resource].items()
            if namespace is None or thing_namespace == namespace
        ]

    def everything(self) -> list[tuple[Resource, Object]]:
        return [(resource, thing) for resource, things in self._objects.items() for thing in things.values()]

    def pods_of(self, owner: Object) -> list[Object]:
        """Pods that this object controls, by name."""
        return [pod for _, pod in sorted(self._pods_by_owner[owner["metadata"]["uid"]].items())]

    def pods_with(self, namespace: str, label: str, value: str) -> list[Object]:
        """Pods with this label; all of the namespace where it is empty."""
        if not label:
            return self.all(PODS, namespace)
        return [pod for _, pod in sorted(self._pods_by_label[namespace, label, value].items())]

    def pods_on(self, node: str) -> list[Object]:
        return [pod for _, pod in sorted(self._pods_by_node[node].items())]

    def _changed(self, change: Change) -> None:
        kind, resource, thing = change.type, change.resource, change.value
        if resource not in self._objects:
            return
        if kind == "DELETED":
            self._drop(resource, key_of(thing))
        else:
            self._put(resource, thing)
        for listener in self._listeners:
            listener(kind, resource, thing)

    def _put(self, resource: Resource, thing: Object) -> None:
        key = key_of(thing)
        self._drop(resource, key)
        self._objects[resource][key] = thing
        if resource == PODS:
            for index in self._indices(thing):
                index[key] = thing

    def _drop(self, resource: Resource, key: Key) -> None:
        known = self._objects[resource].pop(key, None)
        if known is not None and resource == PODS:
            for index in self._indices(known):
                index.pop(key, None)

    def _indices(self, pod: Object) -> list[dict[Key, Object]]:
        """Where the pod is found beside its name."""
        found = [
            self._pods_by_label[pod["metadata"]["namespace"], name, value]
            for name, value in (pod["metadata"].get("labels") or {}).items()
        ]
        if (owner := controller_of(pod)) is not None:
            found.append(self._pods_by_owner[owner["uid"]])
        if node := pod["spec"].get("nodeName"):
            found.append(self._pods_by_node[node])
        return found
