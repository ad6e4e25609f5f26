"""The objects, their versions and their history.

One counter gives every change its resourceVersion. A stored object is never changed in place: a change puts a new
dictionary in its stead, so that the history and any number of watchers may hold the same one. An event is
serialised at most once, whoever watches.

Subscribers are called after each change, in the order of changes: a change made inside a subscriber is stored at once
and told when the earlier one has been told to all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from tests.support.kube.errors import expired
from tests.support.kube.objects import Object, owner_uids
from tests.support.kube.resources import Resource

EventType = Literal["ADDED", "MODIFIED", "DELETED"]
Key = tuple[str, str]
"""Namespace (empty for what is cluster-wide) and name."""
HISTORY = 20_000


@dataclass(slots=True, eq=False)
class Change:
    """One event of the history. `before` lets a watcher with a selector see an object enter or leave it."""

    version: int
    type: EventType
    resource: Resource
    value: Object
    before: Object | None
    _encoded: bytes = b""

    @property
    def encoded(self) -> bytes:
        if not self._encoded:
            self._encoded = msgspec.json.encode(self.value)
        return self._encoded


Subscriber = Callable[[Change], None]


@dataclass(slots=True)
class _Table:
    objects: dict[Key, Object] = field(default_factory=dict)
    by_namespace: dict[str, dict[str, Object]] = field(default_factory=dict)
    history: deque[Change] = field(default_factory=lambda: deque(maxlen=HISTORY))
    compacted: int = 0
    """Watches from a version before this one are answered 410."""


class Store:
    def __init__(self) -> None:
        self.version = 1
        self._tables: dict[Resource, _Table] = {}
        self._by_uid: dict[str, tuple[Resource, Key]] = {}
        self._owned: dict[str, dict[tuple[Resource, Key], None]] = {}
        self._subscribers: list[Subscriber] = []
        self._untold: deque[Change] = deque()
        self._telling = False

    # -- reading

    def get(self, resource: Resource, key: Key) -> Object | None:
        return self._table(resource).objects.get(key)

    def all(self, resource: Resource, namespace: str | None = None) -> Iterator[Object]:
        """In order of namespace and name."""
        table = self._table(resource)
        if namespace is None:
            return (table.objects[key] for key in sorted(table.objects))
        inside = table.by_namespace.get(namespace, {})
        return (inside[name] for name in sorted(inside))

    def count(self, resource: Resource) -> int:
        return len(self._table(resource).objects)

    def resources_in(self, namespace: str) -> list[Resource]:
        return [resource for resource, table in self._tables.items() if table.by_namespace.get(namespace)]

    def find(self, uid: str) -> tuple[Resource, Object] | None:
        found = self._by_uid.get(uid)
        return (found[0], self._table(found[0]).objects[found[1]]) if found else None

    def owned_by(self, uid: str) -> list[tuple[Resource, Object]]:
        return [(resource, self._table(resource).objects[key]) for resource, key in self._owned.get(uid, {})]

    def since(self, resource: Resource, version: int) -> list[Change]:
        """What changed after `version`. Raises 410 where the history no longer reaches back so far."""
        table = self._table(resource)
        if version < table.compacted:
            raise expired(version, table.compacted)
        return [change for change in table.history if change.version > version]

    def oldest(self, resource: Resource) -> int:
        """The oldest version that a watch or a list may go on from."""
        return self._table(resource).compacted

    # -- changing

    def next_version(self) -> int:
        self.version += 1
        return self.version

    def put(self, resource: Resource, key: Key, value: Object) -> Object:
        """Store `value` (which now belongs to the store) under a new resourceVersion."""
        table = self._table(resource)
        before = table.objects.get(key)
        version = self.next_version()
        value["metadata"]["resourceVersion"] = str(version)
        if before is not None:
            self._forget(resource, key, before)
        table.objects[key] = value
        table.by_namespace.setdefault(key[0], {})[key[1]] = value
        place = (resource, key)
        self._by_uid[value["metadata"]["uid"]] = place
        for uid in owner_uids(value):
            self._owned.setdefault(uid, {})[place] = None
        self._record(Change(version, "ADDED" if before is None else "MODIFIED", resource, value, before))
        return value

    def remove(self, resource: Resource, key: Key) -> Object:
        table = self._table(resource)
        before = table.objects.pop(key)
        inside = table.by_namespace[key[0]]
        del inside[key[1]]
        if not inside:
            del table.by_namespace[key[0]]
        self._forget(resource, key, before)
        version = self.next_version()
        last = before | {"metadata": before["metadata"] | {"resourceVersion": str(version)}}
        self._record(Change(version, "DELETED", resource, last, before))
        return last

    def drop_table(self, resource: Resource) -> None:
        self._tables.pop(resource, None)

    def compact(self, resource: Resource | None = None) -> None:
        """Forget the history: watches from any older version are answered 410."""
        for each in [resource] if resource else list(self._tables):
            table = self._table(each)
            table.history.clear()
            table.compacted = self.version

    # -- telling

    def subscribe(self, subscriber: Subscriber) -> Callable[[], None]:
        self._subscribers.append(subscriber)

        def unsubscribe() -> None:
            if subscriber in self._subscribers:
                self._subscribers.remove(subscriber)

        return unsubscribe

    def _record(self, change: Change) -> None:
        table = self._table(change.resource)
        if len(table.history) == HISTORY:
            table.compacted = table.history[0].version
        table.history.append(change)
        self._untold.append(change)
        if self._telling:
            return
        self._telling = True
        try:
            while self._untold:
                told = self._untold.popleft()
                for subscriber in tuple(self._subscribers):
                    subscriber(told)
        finally:
            self._telling = False

    def _table(self, resource: Resource) -> _Table:
        table = self._tables.get(resource)
        if table is None:
            table = self._tables[resource] = _Table()
        return table

    def _forget(self, resource: Resource, key: Key, value: Object) -> None:
        self._by_uid.pop(value["metadata"]["uid"], None)
        for uid in owner_uids(value):
            owned = self._owned.get(uid, {})
            owned.pop((resource, key), None)
            if not owned:
                self._owned.pop(uid, None)


def text(value: Any) -> bytes:
    return msgspec.json.encode(value)
