"""From a Model object as the API server gives it to an effective Model, or to sentences that say what is wrong.

The API server has judged the object by the same rules already, but the operator may run beside an older CRD, and
`antiphon render` has no API server. So the rules are judged here once more, in Python.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from msgspec import inspect

from antiphon_operator.names import API_VERSION
from antiphon_operator.resource.base import SAYS, Resource, fields_of
from antiphon_operator.resource.effective import EffectiveModel, effective_model
from antiphon_operator.resource.model import NAME_RULES, ModelSpec, parse_spec
from antiphon_operator.resource.problems import Problem, ResourceError
from antiphon_operator.resource.reasons import Reason

_MESSAGE = re.compile(r"^(?P<text>.*?)(?: - at `\$(?P<path>[^`]*)`)?$", re.DOTALL)


def parse_model(obj: Mapping[str, Any]) -> EffectiveModel:
    """Raises ResourceError with every broken rule, or with the first field whose type or form is wrong.

    What rules cannot say is checked by `checks.check`.
    """
    if obj.get("apiVersion") != API_VERSION or obj.get("kind") != "Model":
        raise ResourceError([_problem("kind", f"write apiVersion: {API_VERSION} and kind: Model")])
    metadata = obj.get("metadata") or {}
    name = str(metadata.get("name") or "")
    if not name:
        raise ResourceError([_problem("metadata.name", "write a name: the Model's pools are named after it")])
    try:
        spec = parse_spec(obj.get("spec") or {})
    except msgspec.ValidationError as error:
        raise ResourceError([_form_problem(str(error))]) from error
    problems = [
        *(_problem("metadata.name", rule.message) for rule in NAME_RULES if rule.holds and not rule.holds(name)),
        *broken_rules(spec, "spec"),
    ]
    if problems:
        raise ResourceError(problems)
    return effective_model(
        namespace=str(metadata.get("namespace") or "default"),
        name=name,
        uid=str(metadata.get("uid") or ""),
        generation=int(metadata.get("generation") or 0),
        spec=spec,
    )


def broken_rules(value: Any, path: str) -> Iterator[Problem]:
    """All rules in a resource, and in what it holds, that do not hold."""
    if isinstance(value, tuple):
        for index, item in enumerate(value):
            yield from broken_rules(item, f"{path}[{index}]")
    if not isinstance(value, Resource):
        return
    for rule in value.RULES:
        if rule.holds is not None and not rule.holds(value):
            yield _problem(path, rule.message)
    for field in fields_of(type(value)):
        yield from broken_rules(getattr(value, field.name), f"{path}.{field.encode_name}")


def _problem(path: str, message: str) -> Problem:
    return Problem(path, Reason.SPEC_REFUSED, message)


def _form_problem(text: str) -> Problem:
    """What msgspec says of a field, with the field's own sentence where it has one."""
    parts = _MESSAGE.match(text)
    assert parts is not None
    path, message = parts["path"] or "", parts["text"]
    if "matching regex" in message:
        message = _sentence_at(path) or message
    return _problem(f"spec{path}", message[:1].lower() + message[1:])


def _sentence_at(path: str) -> str | None:
    """The sentence of the text at a path such as `.source.uri` or `.names[0]`."""
    described: inspect.Type = inspect.type_info(ModelSpec)
    for key in re.findall(r"\.(\w+)|(\[[^]]*\])", path):
        described = _inside(described, key[0])
    while isinstance(described, inspect.Metadata | inspect.UnionType):
        if isinstance(described, inspect.Metadata):
            if SAYS in (described.extra_json_schema or {}):
                return str((described.extra_json_schema or {})[SAYS])
            described = described.type
        else:
            described = _present(described)
    return None


def _inside(described: inspect.Type, key: str) -> inspect.Type:
    """One step down: into a field, or (for an empty key) into an item of a list or a map."""
    while isinstance(described, inspect.Metadata | inspect.UnionType):
        described = described.type if isinstance(described, inspect.Metadata) else _present(described)
    if isinstance(described, inspect.StructType):
        return next(field.type for field in described.fields if field.encode_name == key)
    if isinstance(described, inspect.VarTupleType):
        return described.item_type
    assert isinstance(described, inspect.DictType)
    return described.value_type


def _present(union: inspect.UnionType) -> inspect.Type:
    return next(one for one in union.types if not isinstance(one, inspect.NoneType))
