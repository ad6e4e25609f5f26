"""Merge patches (RFC 7386), JSON patches (RFC 6902) and strategic merge patches, as the API takes them."""

from __future__ import annotations

from typing import Any

from tests.support.kube.errors import ApiError, bad_request
from tests.support.kube.objects import clone
from tests.support.kube.schema import Schema


def merge_patched(value: Any, patch: Any) -> Any:
    """None removes, maps merge, everything else replaces."""
    if not isinstance(patch, dict):
        return clone(patch)
    result = dict(value) if isinstance(value, dict) else {}
    for key, item in patch.items():
        if item is None:
            result.pop(key, None)
        else:
            result[key] = merge_patched(result.get(key), item)
    return result


def strategic_patched(schema: Schema, value: Any, patch: Any) -> Any:
    """As a merge patch, but lists with a merge key merge by it; `$patch: delete` removes an item or a map."""
    if isinstance(patch, list):
        key = schema.merge_key
        if not schema.merges_strategically:
            return clone(patch)
        if not key:
            return list(dict.fromkeys([*(value or ()), *patch]))
        result = list(value or ())
        for item in patch:
            place = next((i for i, known in enumerate(result) if known.get(key) == item.get(key)), None)
            if item.get("$patch") == "delete":
                if place is not None:
                    del result[place]
            elif place is None:
                result.append(strategic_patched(schema.items, {}, item))
            else:
                result[place] = strategic_patched(schema.items, result[place], item)
        return result
    if not isinstance(patch, dict):
        return patch
    base = {} if patch.get("$patch") == "replace" or not isinstance(value, dict) else dict(value)
    for key, item in patch.items():
        if key == "$retainKeys":
            base = {name: kept for name, kept in base.items() if name in item}
        elif key.startswith("$deleteFromPrimitiveList/"):
            name = key.split("/", 1)[1]
            base[name] = [kept for kept in base.get(name, ()) if kept not in item]
        elif key.startswith("$"):
            continue
        elif item is None or (isinstance(item, dict) and item.get("$patch") == "delete"):
            base.pop(key, None)
        else:
            base[key] = strategic_patched(schema.child(key), base.get(key), item)
    return base


def json_patched(value: Any, operations: Any) -> Any:
    """Raises 422 where a `test` fails or a path is not there, 400 where it is no patch at all."""
    if not isinstance(operations, list):
        raise bad_request("error decoding patch: a JSON patch is a list of operations")
    result = clone(value)
    for operation in operations:
        result = _one(result, operation)
    return result


def _unprocessable(message: str) -> ApiError:
    return ApiError(422, "Invalid", f"the server rejected our request due to an error in our request: {message}")


def _steps(pointer: str) -> list[str]:
    if pointer == "":
        return []
    if not pointer.startswith("/"):
        raise bad_request(f"not a JSON pointer: {pointer!r}")
    return [step.replace("~1", "/").replace("~0", "~") for step in pointer[1:].split("/")]


def _one(document: Any, operation: dict[str, Any]) -> Any:
    kind, path = operation.get("op"), _steps(operation.get("path", ""))
    if kind in ("move", "copy"):
        source = _steps(operation["from"])
        taken = clone(_at(document, source))
        if kind == "move":
            _change(document, source, "remove", None)
        kind, operation = "add", {"value": taken}
    if kind == "test":
        try:
            found = _at(document, path)
        except ApiError:
            found = None
        if found != operation.get("value"):
            raise _unprocessable(f"testing path {operation.get('path')!r} value does not match")
        return document
    if kind not in ("add", "remove", "replace"):
        raise bad_request(f"unknown operation {kind!r}")
    if not path:
        return clone(operation.get("value"))
    _change(document, path, kind, clone(operation.get("value")))
    return document


def _at(document: Any, path: list[str]) -> Any:
    here = document
    for step in path:
        if isinstance(here, dict) and step in here:
            here = here[step]
        elif isinstance(here, list) and step.isdigit() and int(step) < len(here):
            here = here[int(step)]
        else:
            raise _unprocessable(f"no such path: /{'/'.join(path)}")
    return here


def _change(document: Any, path: list[str], kind: str, value: Any) -> None:
    parent, last = _at(document, path[:-1]), path[-1]
    if isinstance(parent, dict):
        if kind != "add" and last not in parent:
            raise _unprocessable(f"unable to {kind} nonexistent key: {last}")
        if kind == "remove":
            del parent[last]
        else:
            parent[last] = value
        return
    if not isinstance(parent, list):
        raise _unprocessable(f"no such path: /{'/'.join(path)}")
    if kind == "add" and last == "-":
        parent.append(value)
        return
    place = int(last) if last.isdigit() else len(parent) + 1
    if place > len(parent) or (kind != "add" and place == len(parent)):
        raise _unprocessable(f"index out of bounds: {last}")
    if kind == "add":
        parent.insert(place, value)
    elif kind == "remove":
        del parent[place]
    else:
        parent[place] = value
