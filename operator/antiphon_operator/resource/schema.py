"""From a type to a structural OpenAPI schema, with everything in line: what a CRD may contain and no more.

The types are read with `msgspec.inspect`, so bounds are those that the operator itself parses by. What may be absent
(`X | None`) is just not required: a CRD without `nullable` drops an explicit null. A text with a form becomes a rule
with the form's sentence; see `base`.
"""

from __future__ import annotations

from typing import Any

from msgspec import NODEFAULT, inspect

from antiphon_operator.resource.base import NO_DEFAULT, SAYS, Resource, Rule

OPEN_ENUMS = frozenset({"Reason", "ConditionType", "Phase"})
"""Enums of the status: the CRD shows a text, so that an older CRD takes what a newer operator writes."""
_ENUM_CHARACTERS = 128
_INT32_MAX = 2**31 - 1


class SchemaError(TypeError):
    """A type that cannot be said in a CRD. The message names the field and what it lacks."""


def object_schema(resource: type[Resource], description: str) -> dict[str, Any]:
    """The schema of a type and all that is in it. Raises SchemaError."""
    described = inspect.type_info(resource)
    assert isinstance(described, inspect.StructType)
    return {"description": description, **_struct(described, resource.__name__)}


def without_defaults(schema: Any) -> Any:
    """For a status: nobody types it, so what is not there is not known rather than at its default."""
    if isinstance(schema, dict):
        return {key: without_defaults(inner) for key, inner in schema.items() if key != "default"}
    return schema


def rule_schema(rule: Rule) -> dict[str, Any]:
    """An entry of `x-kubernetes-validations`."""
    return {"rule": rule.cel, "message": rule.message}


def _struct(described: inspect.StructType, where: str) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    required = [field.encode_name for field in described.fields if field.required]
    if required:
        schema["required"] = required
    schema["properties"] = {field.encode_name: _field(field, where) for field in described.fields}
    if issubclass(described.cls, Resource) and described.cls.RULES:
        schema["x-kubernetes-validations"] = [rule_schema(rule) for rule in described.cls.RULES]
    return schema


def _field(field: inspect.Field, where: str) -> dict[str, Any]:
    where = f"{where}.{field.encode_name}"
    extra = _extra(field.type)
    if not extra.get("description"):
        raise SchemaError(f"{where} has no description: give it one with about(...), kubectl explain shows it")
    schema = {"description": extra["description"], **_type(field.type, where)}
    default = None if extra.get(NO_DEFAULT) else _default(field, schema)
    if default is not None:
        schema["default"] = default
    return schema


def _default(field: inspect.Field, schema: dict[str, Any]) -> Any:
    """None: the CRD gives none.

    An object's default is written out, with the defaults of its own fields: the API server tries the object's rules
    on it as it stands, before it fills in anything.
    """
    default = field.default
    if default in (NODEFAULT, None, "", ()):
        return None
    if isinstance(default, Resource):
        properties: dict[str, dict[str, Any]] = schema["properties"]
        return {name: inner["default"] for name, inner in properties.items() if "default" in inner} or None
    return default


def _extra(described: inspect.Type) -> dict[str, Any]:
    return dict(described.extra_json_schema or {}) if isinstance(described, inspect.Metadata) else {}


def _type(described: inspect.Type, where: str) -> dict[str, Any]:
    says = _extra(described).get(SAYS)
    if isinstance(described, inspect.Metadata):
        described = described.type
    match described:
        case inspect.StrType():
            return _text(described, says, where)
        case inspect.IntType():
            return _integer(described, where)
        case inspect.BoolType():
            return {"type": "boolean"}
        case inspect.LiteralType(values=values):
            return {"type": "string", "enum": list(values)}
        case inspect.EnumType(cls=enum):
            if enum.__name__ not in OPEN_ENUMS:
                raise SchemaError(f"{where}: write the values of {enum.__name__} as a Literal")
            return {"type": "string", "maxLength": _ENUM_CHARACTERS}
        case inspect.StructType():
            return _struct(described, where)
        case inspect.VarTupleType():
            return _list(described, where)
        case inspect.DictType():
            return _map(described, where)
        case inspect.UnionType(types=types):
            return _union(types, where)
    raise SchemaError(f"{where}: a CRD has no {type(described).__name__}")


def _text(described: inspect.StrType, says: str | None, where: str) -> dict[str, Any]:
    if described.max_length is None:
        raise SchemaError(f"{where} has no max_length: a rule over it could cost without limit")
    schema: dict[str, Any] = {"type": "string", "maxLength": described.max_length}
    if described.min_length is not None:
        schema["minLength"] = described.min_length
    if described.pattern is not None and says is None:
        schema["pattern"] = described.pattern
    elif described.pattern is not None:
        cel = described.pattern.replace("\\", "\\\\")
        schema["x-kubernetes-validations"] = [{"rule": f"self.matches('{cel}')", "message": says}]
    return schema


def _integer(described: inspect.IntType, where: str) -> dict[str, Any]:
    if described.ge is None:
        raise SchemaError(f"{where} has no ge: say where it starts")
    small = described.le is not None and described.le <= _INT32_MAX
    schema: dict[str, Any] = {"type": "integer", "format": "int32" if small else "int64", "minimum": described.ge}
    if described.le is not None:
        schema["maximum"] = described.le
    return schema


def _list(described: inspect.VarTupleType, where: str) -> dict[str, Any]:
    if described.max_length is None:
        raise SchemaError(f"{where} has no max_length: a rule over it could cost without limit")
    items = _type(described.item_type, f"{where}[]")
    schema: dict[str, Any] = {"type": "array", "maxItems": described.max_length, "items": items}
    if "lastTransitionTime" in items.get("properties", {}):
        return {**schema, "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}
    return {**schema, "x-kubernetes-list-type": "atomic"}


def _map(described: inspect.DictType, where: str) -> dict[str, Any]:
    if isinstance(described.value_type, inspect.AnyType):
        return {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    if described.max_length is None:
        raise SchemaError(f"{where} has no max_length: a rule over it could cost without limit")
    values = _type(described.value_type, f"{where}{{}}")
    return {"type": "object", "maxProperties": described.max_length, "additionalProperties": values}


def _union(types: tuple[inspect.Type, ...], where: str) -> dict[str, Any]:
    present = [one for one in types if not isinstance(one, inspect.NoneType)]
    if len(present) == 1:
        return _type(present[0], where)
    texts = [one.type if isinstance(one, inspect.Metadata) else one for one in present]
    for one in texts:
        if isinstance(one, inspect.StrType) and len(texts) == 2:
            text = {key: value for key, value in _text(one, None, where).items() if key != "type"}
            return {"anyOf": [{"type": "integer"}, {"type": "string"}], "x-kubernetes-int-or-string": True, **text}
    raise SchemaError(f"{where}: a CRD has no union but that of a number and a text")
