"""`x-kubernetes-validations`: the CEL rules of a custom resource's schema, by `cel-python`.

As a real server does since 1.30, a part of the object that did not change is not judged again. A rule that
`cel-python` cannot evaluate (it lacks some of the API server's own functions) is not held against the object;
`unevaluated` names it, so that a test can demand that there is none.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import celpy
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
    rules = schema.raw.get("x-kubernetes-validations") or ()
    if rules:
        names = {"self": _to_cel(schema, value)}
        if before is not _NOTHING:
            names["oldSelf"] = _to_cel(schema, before)
        for rule in rules:
            fault = _judged(rule, names, path)
            if fault is not None:
                found.append(fault)
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
            old = olds.get(step_of_item(schema, item), _NOTHING) if olds else _NOTHING
            found += faults(schema.items, item, old, f"{path}[{place}]")
    return found


def _judged(rule: dict[str, Any], names: dict[str, Any], path: str) -> Cause | None:
    text = rule["rule"]
    if "oldSelf" in text and "oldSelf" not in names:
        return None
    program = _program(text)
    if program is None:
        return None
    try:
        holds = program.evaluate(names)
    except CELEvalError as error:
        unevaluated[text] = str(error)
        return None
    if bool(holds):
        return None
    where = path + rule.get("fieldPath", "")
    reason = rule.get("reason", "FieldValueInvalid")
    message = rule.get("message") or f"failed rule: {text}"
    if "messageExpression" in rule:
        expression = _program(rule["messageExpression"])
        if expression is not None:
            try:
                message = str(expression.evaluate(names))
            except CELEvalError as error:
                unevaluated[rule["messageExpression"]] = str(error)
    kind = {"MapType": "object", "ListType": "array", "StringType": "string", "IntType": "integer"}.get(
        type(names["self"]).__name__, "object"
    )
    return Cause(reason, f'Invalid value: "{kind}": {message}', where or "<nil>")
