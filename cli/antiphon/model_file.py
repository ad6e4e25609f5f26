"""Model resources in a YAML file, checked as an API server with our CRD and then the operator would check them.

All problems are told at once, each with its line: first what the schema says (unknown fields too, which an API
server would drop in silence), then the rules, then what only the operator checks.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml
from antiphon_operator.names import API_VERSION
from antiphon_operator.resource.checks import check
from antiphon_operator.resource.crd import model_crd
from antiphon_operator.resource.effective import EffectiveModel
from antiphon_operator.resource.parse import parse_model
from antiphon_operator.resource.problems import ResourceError

_MATCHES = re.compile(r"self\.matches\('(.*)'\)")
_TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "boolean": bool,
}


class ModelFileError(Exception):
    """A file that cannot be rendered. `problems` are lines for a person: where, and what to change."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


@dataclass(frozen=True, slots=True)
class ModelDocument:
    """One Model of a file: as it was written, and with its defaults."""

    written: Mapping[str, Any]
    model: EffectiveModel


@dataclass(frozen=True, slots=True)
class ModelFile:
    """What is in one file."""

    models: tuple[ModelDocument, ...]
    others: tuple[str, ...]
    """Objects of other kinds, as lines for a person."""


def read_models(text: str, source: str, namespace: str) -> ModelFile:
    """The Models in `text`; those that name no namespace are in `namespace`. Raises ModelFileError."""
    try:
        nodes = [node for node in yaml.compose_all(text, Loader=yaml.SafeLoader) if node is not None]
        documents = [document for document in yaml.safe_load_all(text) if document is not None]
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{source}:{mark.line + 1}" if mark else source
        raise ModelFileError([f"{where}: this is not YAML: {getattr(error, 'problem', None) or error}"]) from error
    problems: list[str] = []
    others: list[str] = []
    found: list[ModelDocument] = []
    for node, document in zip(nodes, documents, strict=True):
        if isinstance(document, dict) and document.get("kind") not in (None, "Model"):
            others.append(f"{source}:{node.start_mark.line + 1}: a {document['kind']} is passed over")
            continue
        try:
            found.append(_document(document, namespace))
        except ModelFileError as error:
            paths = (problem.partition(": ")[::2] for problem in error.problems)
            problems += [f"{source}:{_line_of(node, path)}: {path or 'document'}: {said}" for path, said in paths]
    if problems:
        raise ModelFileError(problems)
    if not found:
        raise ModelFileError([f"{source}: there is no Model in it"])
    return ModelFile(tuple(found), tuple(others))


def _document(document: Any, namespace: str) -> ModelDocument:
    """Raises ModelFileError with problems that begin with the path."""
    if not isinstance(document, dict) or (document.get("apiVersion"), document.get("kind")) != (API_VERSION, "Model"):
        raise ModelFileError([f"kind: this is no Model: write apiVersion: {API_VERSION} and kind: Model"])
    schema = model_crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    broken = list(_schema_problems({key: document.get(key) for key in ("spec",)}, schema, ""))
    if broken:
        raise ModelFileError(broken)
    written = {**document, "metadata": {"namespace": namespace, **(document.get("metadata") or {})}}
    try:
        model = parse_model(written)
    except ResourceError as error:
        raise ModelFileError([str(problem) for problem in error.problems]) from error
    refused = check(model)
    if refused:
        raise ModelFileError([str(problem) for problem in refused])
    return ModelDocument(written=written, model=model)


def _schema_problems(value: Any, schema: Mapping[str, Any], path: str) -> Iterator[str]:
    """What a structural schema says of `value`, in an API server's strict mode."""
    if schema.get("x-kubernetes-int-or-string"):
        if isinstance(value, bool) or not isinstance(value, int | str):
            yield f"{path}: {value!r} is neither a number nor a text"
        return
    expected = _TYPES[schema["type"]]
    if not isinstance(value, expected) or (isinstance(value, bool) and schema["type"] != "boolean"):
        hint = "; quote it" if schema["type"] == "string" and value is not None else ""
        yield f"{path}: {value!r} is not of type {schema['type']}{hint}"
        return
    match value:
        case dict():
            yield from _object_problems(value, schema, path)
        case list():
            if len(value) > schema.get("maxItems", len(value)):
                yield f"{path}: it has {len(value)} entries, at most {schema['maxItems']} are allowed"
            for index, item in enumerate(value):
                yield from _schema_problems(item, schema["items"], f"{path}[{index}]")
        case str():
            yield from _text_problems(value, schema, path)
        case int():
            low, high = schema.get("minimum", value), schema.get("maximum", value)
            if not low <= value <= high:
                yield f"{path}: {value} is not between {low} and {high}"


def _object_problems(value: dict[str, Any], schema: Mapping[str, Any], path: str) -> Iterator[str]:
    properties: Mapping[str, Any] = schema.get("properties", {})
    inner_of_any = schema.get("additionalProperties")
    for name in schema.get("required", ()):
        if value.get(name) is None:
            yield f"{path}: it has no {name}: add it" if path else f"{name}: it is missing: add it"
    for name, inner in value.items():
        where = f"{path}.{name}" if path else str(name)
        if name in properties or inner_of_any:
            if inner is not None:  # an API server drops it
                yield from _schema_problems(inner, properties.get(name, inner_of_any), where)
        elif not schema.get("x-kubernetes-preserve-unknown-fields"):
            close = difflib.get_close_matches(str(name), properties, n=1)
            yield f"{where}: there is no such field" + (f"; did you mean {close[0]}?" if close else "")


def _text_problems(value: str, schema: Mapping[str, Any], path: str) -> Iterator[str]:
    if "enum" in schema and value not in schema["enum"]:
        yield f"{path}: {value!r} is not one of {', '.join(schema['enum'])}"
    if not schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value)):
        yield f"{path}: it has to have {schema.get('minLength', 0)} to {schema.get('maxLength')} characters"
    for rule in schema.get("x-kubernetes-validations", ()):
        form = _MATCHES.fullmatch(rule["rule"])
        if form is not None and (value.endswith("\n") or not re.search(form[1].replace("\\\\", "\\"), value)):
            yield f"{path}: {rule['message']}"


def _line_of(node: yaml.Node, path: str) -> int:
    """The line of the field at `path`, or of the innermost one around it that is there."""
    line: int = node.start_mark.line + 1
    while path:
        step = _step(node, path)
        if step is None:
            break
        line, node, path = step
    return line


def _step(node: yaml.Node, path: str) -> tuple[int, yaml.Node, str] | None:
    """One key or index down: its line, its node, and the rest of the path. Keys may have dots in them."""
    if isinstance(node, yaml.MappingNode):
        for key, inner in sorted(node.value, key=lambda pair: -len(str(pair[0].value))):
            rest = path.removeprefix(str(key.value))
            if rest != path and rest[:1] in ("", ".", "["):
                return key.start_mark.line + 1, inner, rest.removeprefix(".")
    index = re.match(r"\[(\d+)\]\.?", path)
    if index and isinstance(node, yaml.SequenceNode) and int(index[1]) < len(node.value):
        inner = node.value[int(index[1])]
        return inner.start_mark.line + 1, inner, path[index.end() :]
    return None
