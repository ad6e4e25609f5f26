"""Structural schemas at work: unknown fields dropped, defaults filled in, values checked.

The sentences are the API server's own form, so that a test that reads a refusal reads what a person would.
"""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

import jsonschema

from tests.support.kube.errors import Cause
from tests.support.kube.fields import step_of_item
from tests.support.kube.objects import clone
from tests.support.kube.schema import Schema


def pruned(schema: Schema, value: Any, unknown: list[str], path: str = "") -> Any:
    """The value without fields that the schema does not have; their paths are added to `unknown`."""
    if isinstance(value, dict):
        kept: dict[str, Any] = {}
        for key, item in value.items():
            below = f"{path}.{key}" if path else key
            if key not in schema.properties and not schema.keeps_unknown:
                unknown.append(below)
            else:
                kept[key] = pruned(schema.child(key), item, unknown, below)
        return kept
    if isinstance(value, list):
        return [pruned(schema.items, item, unknown, f"{path}[{place}]") for place, item in enumerate(value)]
    return value


def without_nulls(value: Any) -> Any:
    """Built-in kinds know no null: it is the same as absent."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def fill_defaults(schema: Schema, value: Any) -> None:
    """In place, as a structural schema's defaults are applied: also where a null stands that may not."""
    if isinstance(value, dict):
        for key, raw in schema.properties.items():
            if "default" not in raw:
                continue
            if key not in value or (value[key] is None and not raw.get("nullable")):
                value[key] = clone(raw["default"])
        for key, item in value.items():
            fill_defaults(schema.child(key), item)
    elif isinstance(value, list):
        for item in value:
            fill_defaults(schema.items, item)


def faults(schema: Schema, value: Any, path: str = "") -> list[Cause]:
    """What is wrong with the value; empty if nothing."""
    found: list[Cause] = []
    _check(schema, value, path, found)
    return found


def type_faults(schema: Schema, value: Any, path: str = "") -> list[Cause]:
    """Only values of the wrong type (what a built-in kind cannot even decode)."""
    return [cause for cause in faults(schema, value, path) if cause.reason == "FieldValueTypeInvalid"]


def _types(raw: dict[str, Any]) -> tuple[str, ...]:
    if raw.get("x-kubernetes-int-or-string"):
        return ("integer", "string")
    declared = raw.get("type", ())
    names = (declared,) if isinstance(declared, str) else tuple(declared)
    return (*names, "null") if raw.get("nullable") else names


def _type_of(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"


def _shown(value: Any) -> str:
    return json.dumps(_type_of(value) if isinstance(value, dict | list) else value)


def _invalid(path: str, value: Any, why: str) -> Cause:
    return Cause("FieldValueInvalid", f"Invalid value: {_shown(value)}: {path} in body {why}", path)


def _check(schema: Schema, value: Any, path: str, found: list[Cause]) -> None:
    raw = schema.raw
    kind, allowed = _type_of(value), _types(raw)
    if allowed and kind not in allowed and not (kind == "integer" and "number" in allowed):
        expected = next(name for name in allowed if name != "null")
        why = f"Invalid value: {_shown(kind)}: {path} in body must be of type {expected}: {_shown(kind)}"
        found.append(Cause("FieldValueTypeInvalid", why, path))
        return
    if "enum" in raw and value not in raw["enum"]:
        supported = ", ".join(json.dumps(item) for item in raw["enum"])
        why = f"Unsupported value: {_shown(value)}: supported values: {supported}"
        found.append(Cause("FieldValueNotSupported", why, path))
    if any(word in raw for word in ("allOf", "anyOf", "oneOf", "not")):
        _check_logic(raw, value, path, found)
    match value:
        case dict():
            _check_object(schema, value, path, found)
        case list():
            _check_list(schema, value, path, found)
        case str():
            _check_text(raw, value, path, found)
        case int() | float():
            _check_number(raw, value, path, found)


def _check_object(schema: Schema, value: dict[str, Any], path: str, found: list[Cause]) -> None:
    raw = schema.raw
    for name in raw.get("required") or ():
        if name not in value:
            below = f"{path}.{name}" if path else name
            found.append(Cause("FieldValueRequired", "Required value", below))
    if (most := raw.get("maxProperties")) is not None and len(value) > most:
        found.append(Cause("FieldValueTooMany", f"Too many: {len(value)}: must have at most {most} items", path))
    if (least := raw.get("minProperties")) is not None and len(value) < least:
        found.append(_invalid(path, value, f"should have at least {least} properties"))
    for key, item in value.items():
        _check(schema.child(key), item, f"{path}.{key}" if path else key, found)


def _check_list(schema: Schema, value: list[Any], path: str, found: list[Cause]) -> None:
    raw = schema.raw
    if (most := raw.get("maxItems")) is not None and len(value) > most:
        found.append(Cause("FieldValueTooMany", f"Too many: {len(value)}: must have at most {most} items", path))
    if (least := raw.get("minItems")) is not None and len(value) < least:
        found.append(_invalid(path, value, f"should have at least {least} items"))
    seen: set[str] = set()
    for place, item in enumerate(value):
        below = f"{path}[{place}]"
        _check(schema.items, item, below, found)
        if schema.list_type in ("map", "set"):
            step = step_of_item(schema, item)
            if step in seen:
                found.append(Cause("FieldValueDuplicate", f"Duplicate value: {step[2:]}", below))
            seen.add(step)


def _check_text(raw: dict[str, Any], value: str, path: str, found: list[Cause]) -> None:
    if (pattern := raw.get("pattern")) is not None and not re.search(pattern, value):
        found.append(_invalid(path, value, f"should match '{pattern}'"))
    if (most := raw.get("maxLength")) is not None and len(value) > most:
        found.append(Cause("FieldValueTooLong", f"Too long: may not be more than {most} bytes", path))
    if (least := raw.get("minLength")) is not None and len(value) < least:
        found.append(_invalid(path, value, f"should be at least {least} chars long"))


def _check_number(raw: dict[str, Any], value: float, path: str, found: list[Cause]) -> None:
    if (least := raw.get("minimum")) is not None and value < least:
        found.append(_invalid(path, value, f"should be greater than or equal to {least}"))
    if (most := raw.get("maximum")) is not None and value > most:
        found.append(_invalid(path, value, f"should be less than or equal to {most}"))
    if (step := raw.get("multipleOf")) is not None and value % step:
        found.append(_invalid(path, value, f"should be a multiple of {step}"))


def _check_logic(raw: dict[str, Any], value: Any, path: str, found: list[Cause]) -> None:
    logic = json.dumps({word: raw[word] for word in ("allOf", "anyOf", "oneOf", "not") if word in raw})
    for fault in _logic(logic).iter_errors(value):
        found.append(_invalid(path, value, f"does not fit the schema: {fault.message}"))


@cache
def _logic(text: str) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(json.loads(text))
