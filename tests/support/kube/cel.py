"""`x-kubernetes-validations`: the CEL rules of a custom resource's schema, by `cel-python`.

As a real server does since 1.30, a part of the object that did not change is not judged again. A rule that
`cel-python` cannot evaluate (it lacks some of the API server's own functions) is not held against the object;
`unevaluated` names it, so that a test can demand that there is none.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import celpy
import msgspec
from celpy import celtypes
from celpy.evaluation import CELEvalError

from tests.support.kube.errors import Cause
from tests.support.kube.fields import step_of_item
from tests.support.kube.schema import Schema

unevaluated: dict[str, str] = {}
"""Rule -> why it could not be evaluated."""
_NOTHING: Any = object()
_RESERVED = frozenset(("true", "false", "null", "in", "as", "break", "const", "continue", "else", "for", "function"))
_RESERVED |= frozenset(("if", "import", "let", "loop", "package", "namespace", "return", "var", "void", "while"))


@cache
def _program(rule: str) -> celpy.Runner | None:
    try:
        environment = celpy.Environment()
        return environment.program(environment.compile(rule))
    except Exception as error:  # noqa: BLE001 - whatever the parser says, the rule is not evaluated, and is named
        unevaluated[rule] = str(error)
        return None


def _field(name: str) -> str:
    if name in _RESERVED:
        return f"__{name}__"
    return (
        name.replace("__", "__underscores__").replace(".", "__dot__").replace("-", "__dash__").replace("/", "__slash__")
    )


def _to_cel(schema: Schema, value: Any) -> Any:
    match value:
        case dict():
            return celtypes.MapType(
                {
                    celtypes.StringType(_field(key) if key in schema.properties else key): _to_cel(
                        schema.child(key), item
                    )
                    for key, item in value.items()
                }
            )
        case list():
            return celtypes.ListType([_to_cel(schema.items, item) for item in value])
        case bool():
            return celtypes.BoolType(value)
        case int():
            return celtypes.IntType(value)
        case float():
            return celtypes.DoubleType(value)
        case str():
            return celtypes.StringType(value)
    return None


@cache
def _has_rules(schema: Schema) -> bool:
    raw = schema.raw
    if raw.get("x-kubernetes-validations"):
        return True
    if any(_has_rules(schema.child(name)) for name in schema.properties if name != "metadata"):
        return True
    if isinstance(schema.extra, dict) and _has_rules(schema.child("")):
        return True
    return "items" in raw and _has_rules(schema.items)


def faults(schema: Schema, value: Any, before: Any = _NOTHING, path: str = "") -> list[Cause]:
    """Every rule that does not hold."""
    if value is None or (before is not _NOTHING and before == value) or not _has_rules(schema):
        return []
    found: list[Cause] = []
    if schema.raw.get("x-kubernetes-validations"):
        at_root = path == ""
        old = b"" if before is _NOTHING else _seen(before, at_root)
        for rule, message in _broken(schema, _seen(value, at_root), old):
            why = f'Invalid value: "{_kind(value)}": {message}'
            found.append(
                Cause(rule.get("reason", "FieldValueInvalid"), why, path + rule.get("fieldPath", "") or "<nil>")
            )
    if isinstance(value, dict):
        earlier = before if isinstance(before, dict) else {}
        for key, item in value.items():
            if path == "" and key == "metadata":
                continue
            below = f"{path}.{key}" if path else key
            found += faults(schema.child(key), item, earlier.get(key, _NOTHING), below)
    elif isinstance(value, list):
        olds = {}
        if schema.list_type == "map" and isinstance(before, list):
            olds = {step_of_item(schema, item): item for item in before}
        for place, item in enumerate(value):
            old_item = olds.get(step_of_item(schema, item), _NOTHING) if olds else _NOTHING
            found += faults(schema.items, item, old_item, f"{path}[{place}]")
    return found


def rules_of(schema: Schema) -> list[str]:
    """Every rule below a schema, each compiled: `unevaluated` names those that cannot be."""
    found = [rule["rule"] for rule in schema.raw.get("x-kubernetes-validations") or ()]
    for rule in found:
        _program(rule)
    below = [schema.child(name) for name in schema.properties if name != "metadata"]
    if isinstance(schema.extra, dict):
        below.append(schema.child(""))
    if "items" in schema.raw:
        below.append(schema.items)
    return found + [rule for each in below for rule in rules_of(each)]


def _seen(value: Any, at_root: bool) -> bytes:
    """What a rule sees of a value, as text: of an object's metadata only its names."""
    if at_root and isinstance(value, dict):
        metadata = value.get("metadata") or {}
        names = {key: metadata[key] for key in ("name", "generateName") if key in metadata}
        value = value | {"metadata": names}
    return msgspec.json.encode(value)


def _kind(value: Any) -> str:
    kinds = {dict: "object", list: "array", str: "string", bool: "boolean", int: "integer", float: "number"}
    return kinds.get(type(value), "object")


@lru_cache(maxsize=16_384)
def _broken(schema: Schema, value: bytes, before: bytes) -> tuple[tuple[dict[str, Any], str], ...]:
    """The rules of one node that do not hold, with their messages. Equal values are judged once: CEL here is slow."""
    names = {"self": _to_cel(schema, msgspec.json.decode(value))}
    if before:
        names["oldSelf"] = _to_cel(schema, msgspec.json.decode(before))
    broken = []
    for rule in schema.raw["x-kubernetes-validations"]:
        if "oldSelf" in rule["rule"] and not before:
            continue
        if _value_of(rule["rule"], names) is False:
            message = _value_of(rule["messageExpression"], names) if "messageExpression" in rule else None
            broken.append((rule, str(message or rule.get("message") or f"failed rule: {rule['rule']}")))
    return tuple(broken)


def _value_of(expression: str, names: dict[str, Any]) -> bool | str | None:
    """None where it cannot be evaluated."""
    program = _program(expression)
    if program is None:
        return None
    try:
        result = program.evaluate(names)
    except CELEvalError as error:
        if "no such" in str(error):
            return False  # As on a real server: a rule that asks for what is not there does not hold.
        unevaluated[expression] = str(error)
        return None
    return str(result) if isinstance(result, celtypes.StringType) else bool(result)
