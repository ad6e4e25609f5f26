"""Server-side apply: who owns which field, what an apply changes, and when it conflicts.

An object's `metadata.managedFields` has an entry for each (manager, operation, subresource). An *apply* states all that
its manager wants: what it states is merged in, what it stated before and no longer does is removed unless somebody else
has it. An *update* (everything but an apply) owns what it changed. An apply that would change a field of somebody else
is a conflict, unless forced; then it takes the field over.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tests.support.kube.errors import ApiError, Cause
from tests.support.kube.fields import (
    Trie,
    changed,
    difference,
    intersection,
    is_granular,
    parts,
    paths,
    present,
    set_of,
    step_of_item,
    union,
    without_step,
)
from tests.support.kube.objects import Object, clone, timestamp
from tests.support.kube.schema import Schema

_NOBODYS = (
    ("f:apiVersion",),
    ("f:kind",),
    *(
        ("f:metadata", f"f:{name}")
        for name in (
            "name", "namespace", "uid", "resourceVersion", "generation", "creationTimestamp", "deletionTimestamp",
            "deletionGracePeriodSeconds", "managedFields", "selfLink",
        )
    ),
)  # fmt: skip
"""Fields that no manager can own."""


@dataclass(frozen=True)
class Entry:
    manager: str
    operation: str
    subresource: str
    api_version: str
    fields: Trie
    time: str

    @property
    def id(self) -> tuple[str, str, str]:
        return (self.manager, self.operation, self.subresource)

    def to_json(self) -> Object:
        entry = {
            "manager": self.manager,
            "operation": self.operation,
            "apiVersion": self.api_version,
            "time": self.time,
            "fieldsType": "FieldsV1",
            "fieldsV1": self.fields,
        }
        return entry | ({"subresource": self.subresource} if self.subresource else {})


def entries(value: Object) -> list[Entry]:
    return [
        Entry(
            raw.get("manager", ""),
            raw.get("operation", ""),
            raw.get("subresource", ""),
            raw.get("apiVersion", ""),
            raw.get("fieldsV1") or {},
            raw.get("time", ""),
        )
        for raw in value["metadata"].get("managedFields") or ()
    ]


def write_entries(value: Object, found: list[Entry]) -> None:
    if found:
        value["metadata"]["managedFields"] = [entry.to_json() for entry in found]
    else:
        value["metadata"].pop("managedFields", None)


def _ownable(trie: Trie) -> Trie:
    for path in _NOBODYS:
        trie = without_step(trie, *path)
    return {
        step: inner for step, inner in trie.items() if step != "." and (step != "f:metadata" or inner.keys() - {"."})
    }


def after_update(schema: Schema, before: Object | None, after: Object, manager: str, subresource: str) -> list[Entry]:
    """The entries once `manager` has made `after` of `before` by anything but an apply."""
    known = entries(before) if before else []
    change = changed(schema, before if before is not None else {}, after)
    mine = _ownable(change) if change else {}
    left: list[Entry] = []
    found = False
    for entry in known:
        is_mine = entry.id == (manager, "Update", subresource)
        fields: Trie | None = entry.fields
        if not is_mine and mine:
            fields = difference(entry.fields, mine)
        if fields is not None:
            fields = present(schema, fields, after)
        if is_mine:
            found = True
            fields = union(fields, mine) if fields and mine else (fields or mine)
        if not fields:
            continue
        time = timestamp() if fields != entry.fields else entry.time
        left.append(replace(entry, fields=fields, time=time))
    if mine and not found:
        left.append(Entry(manager, "Update", subresource, after["apiVersion"], mine, timestamp()))
    return left


@dataclass(frozen=True)
class Applied:
    value: Object
    entries: list[Entry]


def apply(
    schema: Schema, live: Object | None, wanted: Object, manager: str, *, force: bool, subresource: str = ""
) -> Applied:
    """What the object becomes. `wanted` holds only what this apply may state. Raises 409 on conflicts."""
    known = entries(live) if live else []
    mine_id = (manager, "Apply", subresource)
    mine_before = next((entry for entry in known if entry.id == mine_id), None)
    others = [entry for entry in known if entry.id != mine_id]
    mine = _ownable(set_of(schema, wanted))

    value = merged(schema, live, wanted) if live is not None else clone(wanted)
    if mine_before is not None:
        value = _pruned(schema, value, mine_before.fields, mine, [entry.fields for entry in others])

    change = _ownable(changed(schema, live, value) or {}) if live is not None else {}
    stated_change = intersection(change, mine) if change else None
    conflicts = (
        [(entry, both) for entry in others if (both := intersection(entry.fields, stated_change)) is not None]
        if stated_change
        else []
    )
    if conflicts and not force:
        raise _conflict(conflicts)
    taken = {entry.id: both for entry, both in conflicts}
    left: list[Entry] = []
    for entry in others:
        fields: Trie | None = entry.fields
        if entry.id in taken:
            fields = difference(entry.fields, taken[entry.id])
        if fields:
            fields = present(schema, fields, value)
        if fields:
            left.append(replace(entry, fields=fields))
    if mine:
        same = mine_before is not None and mine_before.fields == mine
        time = mine_before.time if same and mine_before is not None else timestamp()
        left.append(Entry(manager, "Apply", subresource, wanted["apiVersion"], mine, time))
        order = {entry.id: place for place, entry in enumerate(known)}
        left.sort(key=lambda entry: order.get(entry.id, len(order)))
    return Applied(value, left)


def merged(schema: Schema, live: Any, wanted: Any) -> Any:
    """`wanted` laid over `live`: maps key by key, lists by the schema, everything else replaced."""
    if type(live) is not type(wanted) or not is_granular(schema, wanted) or not is_granular(schema, live):
        return clone(wanted)
    if isinstance(wanted, dict):
        result = dict(live)
        for key, item in wanted.items():
            result[key] = merged(schema.child(key), live[key], item) if key in live else clone(item)
        return result
    places = {step: place for place, (step, _, _) in enumerate(parts(schema, live))}
    result_list = list(live)
    for item in wanted:
        place = places.get(step_of_item(schema, item))
        if place is None:
            result_list.append(clone(item))
        else:
            result_list[place] = merged(schema.items, live[place], item)
    order = {step_of_item(schema, item): place for place, item in enumerate(wanted)}
    if len(order) == len(result_list):
        result_list.sort(key=lambda item: order[step_of_item(schema, item)])
    return result_list


def _pruned(schema: Schema, value: Any, stated: Trie, states: Trie, others: list[Trie]) -> Any:
    """`value` without what was stated, is stated no longer, and is nobody else's."""
    if not is_granular(schema, value):
        return value
    gone: set[str] = set()
    below: dict[str, Any] = {}
    for step, inner_schema, item in parts(schema, value):
        if step not in stated:
            continue
        theirs = [trie[step] for trie in others if step in trie]
        if step not in states and not theirs:
            gone.add(step)
        else:
            below[step] = _pruned(inner_schema, item, stated[step], states.get(step, {}), theirs)
    if not gone and not below:
        return value
    if isinstance(value, dict):
        return {key: below.get(f"f:{key}", item) for key, item in value.items() if f"f:{key}" not in gone}
    steps = [step for step, _, _ in parts(schema, value)]
    return [below.get(step, item) for step, item in zip(steps, value, strict=True) if step not in gone]


def _conflict(conflicts: list[tuple[Entry, Trie]]) -> ApiError:
    causes: list[Cause] = []
    for entry, fields in conflicts:
        where = f' with subresource "{entry.subresource}"' if entry.subresource else ""
        who = f'conflict with "{entry.manager}"{where} using {entry.api_version}'
        causes += [Cause("FieldManagerConflict", who, path) for path in paths(fields)]
    if len(causes) == 1:
        text = f"Apply failed with 1 conflict: {causes[0].message}: {causes[0].field}"
    else:
        lines: list[str] = []
        for who in dict.fromkeys(cause.message for cause in causes):
            lines.append(who.replace("conflict", "conflicts", 1) + ":")
            lines += [f"- {cause.field}" for cause in causes if cause.message == who]
        text = f"Apply failed with {len(causes)} conflicts: " + "\n".join(lines)
    return ApiError(409, "Conflict", text, causes=tuple(causes))
