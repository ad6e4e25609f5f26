"""What the operator knows of the cluster: the newest look at every object that matters, by kind of question.

Fed by kopf's watches and, at once, by the answers to our own requests (read your writes), so that the next plan never
acts on a look from before the last one was carried out. The newest `resourceVersion` wins, whichever way it came; what
was deleted stays known for a while, so that a late answer or event does not bring it back. Plain dictionaries, touched
on the event loop only: nothing here waits.

Plain caches rather than `kopf.index`: an index cannot be told an answer of our own, and has no rule for which look is
newer. Each change answers with the keys of the Models that it concerns; a change that no plan can depend on (a status
that we wrote, the heartbeat of a node) concerns none.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from antiphon_operator.names import model_key
from antiphon_operator.plan.observed import Object
from antiphon_operator.runtime.objects import (
    claim_names,
    client_names,
    is_deleting,
    key_of,
    metadata,
    model_key_of_pod,
    name_of,
    namespace_of,
    node_is_lost,
    node_of_pod,
    owner_model_uid,
    replicas_owners,
    slim,
    uid_of,
    version_of,
)

_REMEMBERED = 20_000
"""Uids of deleted objects that are remembered."""

Keys = frozenset[str]
NOBODY: Keys = frozenset()


class Caches:
    """See the module's docstring. Kinds are Kubernetes kinds: `Model`, `Pod`, `StatefulSet`, ..."""

    def __init__(self, *, nodes_known: bool = True) -> None:
        self._nodes_known = nodes_known
        self._kinds: dict[str, dict[str, Object]] = {}
        self._gone: OrderedDict[str, int | None] = OrderedDict()
        self._deleting: dict[str, str] = {}
        self._models: dict[str, str] = {}
        self._model_keys: dict[str, str] = {}
        self._children: dict[str, dict[str, Object]] = {}
        self._pods: dict[str, dict[str, Object]] = {}
        self._pods_on: dict[str, dict[str, str]] = {}
        self._nodes: dict[str, bool] = {}
        self._claimants: dict[str, set[str]] = {}

    # -- what changes it

    def put(self, kind: str, thing: Object) -> Keys:
        """A look at an object, from a watch or from an answer. The keys of the Models it concerns, if it is news."""
        uid = uid_of(thing)
        before = self._of(kind).get(uid)
        version = version_of(thing)
        known = version_of(before) if before is not None else self._gone.get(uid)
        if before is None and uid in self._gone and not _newer(version, known):
            return NOBODY
        if before is not None and known is not None and version is not None and version <= known:
            return NOBODY
        self._gone.pop(uid, None)
        now = slim(kind, thing)
        if uid in self._deleting and not is_deleting(now):
            now = _marked(now, self._deleting[uid])
        self._of(kind)[uid] = now
        self._unindex(kind, before)
        self._index(kind, now)
        return self._concerned(kind, before, now)

    def remove(self, kind: str, thing: Object) -> Keys:
        """The object is gone. `thing` is the last look at it."""
        uid = uid_of(thing)
        before = self._of(kind).pop(uid, None)
        self._deleting.pop(uid, None)
        self._gone[uid] = version_of(thing)
        while len(self._gone) > _REMEMBERED:
            self._gone.popitem(last=False)
        if before is None:
            return NOBODY
        self._unindex(kind, before)
        return self._concerned(kind, before, None)

    def mark_deleting(self, kind: str, uid: str, at: datetime) -> None:
        """The server has taken our request to delete it: it counts as going until a watch says that it is gone."""
        before = self._of(kind).get(uid)
        if before is None or is_deleting(before):
            return
        self._deleting[uid] = at.isoformat(timespec="seconds").replace("+00:00", "Z")
        now = _marked(before, self._deleting[uid])
        self._of(kind)[uid] = now
        self._unindex(kind, before)
        self._index(kind, now)

    # -- what is asked of it

    def model(self, key: str) -> Object | None:
        """The Model, unless it is gone or going."""
        uid = self._models.get(key)
        return self._of("Model").get(uid) if uid is not None else None

    def model_keys(self) -> tuple[str, ...]:
        return tuple(self._models)

    def children(self, model: Object) -> tuple[Object, ...]:
        """All that this Model controls, but its pods."""
        return tuple(self._children.get(uid_of(model), {}).values())

    def child(self, model: Object, kind: str, name: str) -> Object | None:
        return next(
            (c for c in self.children(model) if c.get("kind") == kind and name_of(c) == name),
            None,
        )

    def pods(self, model: Object) -> tuple[Object, ...]:
        return tuple(self._pods.get(key_of(model), {}).values())

    def pod(self, key: str, name: str) -> Object | None:
        return next((pod for pod in self._pods.get(key, {}).values() if name_of(pod) == name), None)

    def lost_nodes(self, pods: Iterable[Object]) -> frozenset[str]:
        """Of the nodes of these pods, those that are gone or not Ready. None, where nodes cannot be watched."""
        if not self._nodes_known:
            return frozenset()
        nodes = {node_of_pod(pod) for pod in pods} - {""}
        return frozenset(node for node in nodes if self._nodes.get(node, True))

    def name_owners(self, model: Object) -> Mapping[str, str]:
        """For each name that the Model asks for, the key of the oldest Model that asks for it."""
        return {name: min(self._claimants.get(name, {key_of(model)}), key=self._age) for name in client_names(model)}

    def claims(self, model: Object) -> Mapping[str, Object]:
        wanted = claim_names(model)
        return {
            name_of(claim): claim
            for claim in self._of("PersistentVolumeClaim").values()
            if name_of(claim) in wanted and namespace_of(claim) == namespace_of(model)
        }

    def namespace_labels(self, namespace: str) -> Mapping[str, str]:
        for thing in self._of("Namespace").values():
            if name_of(thing) == namespace:
                labels: Mapping[str, str] = metadata(thing).get("labels") or {}
                return labels
        return {}

    def look(self, kind: str, uid: str) -> Object | None:
        return self._of(kind).get(uid)

    def uids(self, kind: str) -> Mapping[str, Object]:
        """A snapshot of all objects of a kind, by uid."""
        return dict(self._of(kind))

    def all_uids(self) -> tuple[str, ...]:
        return tuple(uid for things in self._kinds.values() for uid in things)

    def size(self) -> int:
        return sum(len(things) for things in self._kinds.values())

    # -- inside

    def _of(self, kind: str) -> dict[str, Object]:
        return self._kinds.setdefault(kind, {})

    def _age(self, key: str) -> tuple[str, str]:
        model = self.model(key)
        return (str(metadata(model).get("creationTimestamp", "")) if model is not None else "", key)

    def _index(self, kind: str, thing: Object) -> None:
        uid = uid_of(thing)
        if kind == "Model":
            if is_deleting(thing):
                return
            key = key_of(thing)
            self._models[key] = uid
            self._model_keys[uid] = key
            for name in client_names(thing):
                self._claimants.setdefault(name, set()).add(key)
        elif kind == "Pod":
            key_or_none = model_key_of_pod(thing)
            if key_or_none is not None:
                self._pods.setdefault(key_or_none, {})[uid] = thing
                self._pods_on.setdefault(node_of_pod(thing), {})[uid] = key_or_none
        elif kind == "Node":
            self._nodes[name_of(thing)] = node_is_lost(thing)
        elif (owner := owner_model_uid(thing)) is not None:
            self._children.setdefault(owner, {})[uid] = thing

    def _unindex(self, kind: str, thing: Object | None) -> None:
        if thing is None:
            return
        uid = uid_of(thing)
        if kind == "Model":
            key = key_of(thing)
            self._model_keys.pop(uid, None)
            if self._models.get(key) == uid:
                del self._models[key]
                for name in client_names(thing):
                    _drop(self._claimants, name, key)
        elif kind == "Pod":
            _drop_item(self._pods, model_key_of_pod(thing) or "", uid)
            _drop_item(self._pods_on, node_of_pod(thing), uid)
        elif kind == "Node":
            self._nodes.pop(name_of(thing), None)
        elif (owner := owner_model_uid(thing)) is not None:
            _drop_item(self._children, owner, uid)

    def _concerned(self, kind: str, before: Object | None, now: Object | None) -> Keys:
        thing = now if now is not None else before
        assert thing is not None
        match kind:
            case "Model":
                return self._concerned_by_model(before, now)
            case "Node":
                if _lost(before) == _lost(now):
                    return NOBODY
                return frozenset(self._pods_on.get(name_of(thing), {}).values())
            case "Namespace":
                if before is not None and now is not None and _labels(before) == _labels(now):
                    return NOBODY
                prefix = model_key(name_of(thing), "")
                return frozenset(key for key in self._models if key.startswith(prefix))
            case "PersistentVolumeClaim":
                named = (key for key in self._models if key.startswith(model_key(namespace_of(thing), "")))
                return frozenset(key for key in named if name_of(thing) in claim_names(self.model(key) or {}))
            case "Pod":
                key = model_key_of_pod(thing)
                return frozenset({key}) if key in self._models else NOBODY
            case "Pool" if before is not None and now is not None and _wish(before) == _wish(now):
                return NOBODY
            case _:
                owners = {owner_model_uid(look) for look in (before, now) if look is not None}
                return frozenset(self._model_keys[uid] for uid in owners if uid in self._model_keys)

    def _concerned_by_model(self, before: Object | None, now: Object | None) -> Keys:
        if before is not None and now is not None and _wish(before) == _wish(now):
            return NOBODY
        looks = [look for look in (before, now) if look is not None]
        names = {name for look in looks for name in client_names(look)}
        rivals = {key for name in names for key in self._claimants.get(name, ())}
        return frozenset(rivals | {key_of(look) for look in looks})


def _newer(version: int | None, known: int | None) -> bool:
    return version is not None and known is not None and version > known


def _marked(thing: Object, at: str) -> Object:
    return {**thing, "metadata": {**metadata(thing), "deletionTimestamp": at}}


def _wish(thing: Object) -> tuple[Any, ...]:
    """All of a custom resource but its status: what a person, or a scaler, can change. A scaler that applies the
    number which stands there changes only who owns it."""
    about = metadata(thing)
    parts = ("uid", "generation", "labels", "annotations", "deletionTimestamp", "ownerReferences")
    return (*(about.get(part) for part in parts), replicas_owners(thing))


def _labels(thing: Object) -> object:
    return metadata(thing).get("labels")


def _lost(node: Object | None) -> bool:
    return node is None or node_is_lost(node)


def _drop(groups: dict[str, set[str]], group: str, item: str) -> None:
    members = groups.get(group)
    if members is not None:
        members.discard(item)
        if not members:
            del groups[group]


def _drop_item(groups: dict[str, dict[str, Any]], group: str, item: str) -> None:
    members = groups.get(group)
    if members is not None:
        members.pop(item, None)
        if not members:
            del groups[group]
