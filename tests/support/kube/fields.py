"""Sets of fields, in the form of `managedFields[].fieldsV1`, and what merging and comparing need of them.

A set is a trie: `{"f:spec": {"f:replicas": {}}}` holds `.spec.replicas`. An empty node is a member; a node that has
children is a member only if it holds `"."`. Steps: `f:name` a field or map key, `k:{...}` the list item with these
keys, `v:...` the value of a set. How a list merges (by keys, as a set, or as one value) its schema says.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tests.support.kube.schema import Schema

Trie = dict[str, Any]
MEMBER = "."


def step_of_item(schema: Schema, item: Any) -> str:
    if schema.list_type == "set":
        return "v:" + json.dumps(item, separators=(",", ":"))
    keys: dict[str, Any] = {}
    for key in sorted(schema.list_keys):
        value = item.get(key) if isinstance(item, dict) else None
        default = "TCP" if key == "protocol" else schema.items.child(key).default
        keys[key] = default if value is None else value
    return "k:" + json.dumps({k: v for k, v in keys.items() if v is not None}, separators=(",", ":"))


def is_granular(schema: Schema, value: Any) -> bool:
    """Whether the value's parts are owned one by one."""
    if isinstance(value, dict):
        return not schema.atomic_map
    return isinstance(value, list) and schema.list_type in ("map", "set")


def parts(schema: Schema, value: Any) -> Iterator[tuple[str, Schema, Any]]:
    """The steps below a granular value: (step, schema of the part, part)."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield f"f:{key}", schema.child(key), item
    else:
        for item in value:
            yield step_of_item(schema, item), schema.items, item


def set_of(schema: Schema, value: Any) -> Trie:
    """The fields that a configuration states (for an apply)."""
    if not is_granular(schema, value) or not value:
        return {}
    trie: Trie = {}
    for step, below, item in parts(schema, value):
        inner = set_of(below, item)
        if step[0] in "kv":
            inner = {MEMBER: {}} | inner if inner else {}
        trie[step] = inner
    return trie


def all_of(schema: Schema, value: Any) -> Trie:
    """Every field of a value that came whole (for a create or an update), parents too."""
    if not is_granular(schema, value) or not value:
        return {}
    trie: Trie = {MEMBER: {}}
    for step, below, item in parts(schema, value):
        trie[step] = all_of(below, item)
    return trie


def changed(schema: Schema, before: Any, after: Any) -> Trie | None:
    """The fields that were added or have another value; None if nothing."""
    if before == after:
        return None
    if type(before) is not type(after) or not is_granular(schema, after) or not is_granular(schema, before):
        return all_of(schema, after)
    if not after or not before:
        return all_of(schema, after)
    earlier = {step: item for step, _, item in parts(schema, before)}
    trie: Trie = {}
    for step, below, item in parts(schema, after):
        if step not in earlier:
            trie[step] = all_of(below, item)
        else:
            inner = changed(below, earlier[step], item)
            if inner is not None:
                trie[step] = inner
    return trie or None


def present(schema: Schema, trie: Trie, value: Any) -> Trie | None:
    """The part of a set that still exists in the value; None if nothing is left."""
    if not trie:
        return trie
    if not is_granular(schema, value):
        return {} if MEMBER in trie else None
    existing = {step: (below, item) for step, below, item in parts(schema, value)}
    left: Trie = {}
    for step, inner in trie.items():
        if step == MEMBER:
            left[step] = inner
        elif step in existing:
            kept = present(existing[step][0], inner, existing[step][1])
            if kept is not None:
                left[step] = kept
    return left or None


def is_member(trie: Trie) -> bool:
    return not trie or MEMBER in trie


def union(first: Trie, second: Trie) -> Trie:
    if first == second:
        return first
    result: Trie = {}
    if is_member(first) or is_member(second):
        result[MEMBER] = {}
    for step in (first | second).keys() - {MEMBER}:
        if step in first and step in second:
            result[step] = union(first[step], second[step])
        else:
            result[step] = first[step] if step in first else second[step]
    return {} if result.keys() == {MEMBER} else result


def difference(first: Trie, second: Trie) -> Trie | None:
    """The members of `first` that are not members of `second`; None if none."""
    result: Trie = {}
    if is_member(first) and not is_member(second):
        result[MEMBER] = {}
    for step in first.keys() - {MEMBER}:
        inner = difference(first[step], second[step]) if step in second else first[step]
        if inner is not None:
            result[step] = inner
    if not result:
        return None
    return {} if result.keys() == {MEMBER} else result


def intersection(first: Trie, second: Trie) -> Trie | None:
    result: Trie = {}
    if is_member(first) and is_member(second):
        result[MEMBER] = {}
    for step in (first.keys() & second.keys()) - {MEMBER}:
        inner = intersection(first[step], second[step])
        if inner is not None:
            result[step] = inner
    if not result:
        return None
    return {} if result.keys() == {MEMBER} else result


def without_step(trie: Trie, *path: str) -> Trie:
    """The set without a field and all below it."""
    step, *rest = path
    if step not in trie:
        return trie
    left = {key: inner for key, inner in trie.items() if key != step}
    if rest:
        inner = without_step(trie[step], *rest)
        if inner or not trie[step]:
            left[step] = inner
    return left


def paths(trie: Trie, above: str = "") -> list[str]:
    """The members as the API writes them in messages: `.spec.containers[name="a"].image`."""
    found: list[str] = []
    if above and is_member(trie):
        found.append(above)
    for step in sorted(trie.keys() - {MEMBER}):
        found += paths(trie[step], above + _written(step))
    return found


def _written(step: str) -> str:
    kind, text = step[0], step[2:]
    if kind == "f":
        return f".{text}"
    if kind == "v":
        return f"[={text}]"
    return "[" + ",".join(f"{key}={json.dumps(value)}" for key, value in json.loads(text).items()) + "]"
