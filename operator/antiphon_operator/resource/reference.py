"""The pages `docs/model-reference.md` and `docs/model-changes.md`, made from the CRDs and the table of changes.

`python -m antiphon_operator.resource.reference` writes them; `--check` only says whether they are current.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from antiphon_operator.resource import generated
from antiphon_operator.resource.changes import CHANGES, Change
from antiphon_operator.resource.crd import model_crd, pool_crd
from antiphon_operator.resource.pod_template import OWNED_PATHS, OWNED_VOLUMES
from antiphon_operator.resource.reasons import CONDITION_MEANINGS, REASON_MEANINGS
from antiphon_operator.resource.worker_flags import OWNED_FLAGS

FOLDER = Path("docs")
_MADE = "<!-- Made by `python -m antiphon_operator.resource.reference` from the types: do not edit. -->\n"

CEL_FUNCTIONS: Mapping[str, str] = {
    "has": "macro: whether a field was written",
    "all": "macro over a list",
    "exists_one": "macro over a list",
    "size": "of a text or list",
    "matches": "regular expression (RE2)",
    "startsWith": "of a text",
    "contains": "of a text",
    "duration": "a time from text; each rule looks at the text's form first",
}
"""All that the rules call. Each is part of CEL's standard library, which CRD rules have had since they became stable
in Kubernetes 1.29; none is from a library that came later."""
_CALL = re.compile(r"([A-Za-z_]+)\(")
_QUOTED = re.compile(r"'[^']*'")


def all_rules(schema: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, str, str]]:
    """(path, rule, message) of every rule in a schema."""
    for rule in schema.get("x-kubernetes-validations", ()):
        yield path, rule["rule"], rule["message"]
    for name, inner in schema.get("properties", {}).items():
        yield from all_rules(inner, f"{path}.{name}" if path else name)
    if "items" in schema:
        yield from all_rules(schema["items"], f"{path}[]")
    if isinstance(schema.get("additionalProperties"), dict):
        yield from all_rules(schema["additionalProperties"], f"{path}{{}}")


def called_functions(schema: Mapping[str, Any]) -> set[str]:
    """Names of the CEL functions and macros that the rules of a schema call."""
    return {name for _, rule, _ in all_rules(schema) for name in _CALL.findall(_QUOTED.sub("''", rule))}


def schema_of(crd: Mapping[str, Any]) -> dict[str, Any]:
    """The OpenAPI schema of a CRD's one version."""
    schema: dict[str, Any] = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return schema


def reference_page() -> str:
    model, pool = schema_of(model_crd()), schema_of(pool_crd())
    used = called_functions(model) | called_functions(pool)
    parts = [
        _MADE,
        _OPENING,
        "\n## Spec\n",
        *_objects(model["properties"]["spec"], "spec"),
        "\n## The Model's name\n\n",
        *(f"- {message}\n" for path, _, message in all_rules(model) if not path),
        _POD_TEMPLATE,
        *_argument_section(),
        "\n## Status\n\nWritten by the operator. `status.effective` has the shape of the spec.\n",
        *_objects(model["properties"]["status"], "status"),
        "\n### Conditions\n\n| condition | true means |\n|---|---|\n",
        *(f"| {condition} | {meaning} |\n" for condition, meaning in CONDITION_MEANINGS.items()),
        "\n### Reasons\n\n| reason | meaning |\n|---|---|\n",
        *(f"| {reason} | {meaning} |\n" for reason, meaning in REASON_MEANINGS.items()),
        f"\n## The Pool resource\n\n`pools.antiphon.dev`, `kubectl get mpool`. {pool['description']}\n",
        *_objects(pool["properties"]["spec"], "spec"),
        *_objects(pool["properties"]["status"], "status"),
        "\n## What the rules use of CEL\n\n",
        "Nothing that Kubernetes 1.30 lacks: operators, and these functions and macros.\n\n",
        "| name | what |\n|---|---|\n",
        *(f"| `{name}` | {CEL_FUNCTIONS[name]} |\n" for name in CEL_FUNCTIONS if name in used),
    ]
    return "".join(parts)


_OPENING = """# The Model resource: reference

`models.antiphon.dev`, version `v1alpha1`, namespaced; `kubectl get mdl`, or `kubectl get antiphon` with its pools.
The same words are in the cluster: `kubectl explain model.spec.decode`. Only `spec.source` is required; what is in
force for everything else stands in `status.effective`. What a change of each field does:
[model-changes.md](model-changes.md). Samples: `deploy/samples/`.

A number behind a type is its bound: `text (253)` has at most 253 characters.
"""


def _listed(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in sorted(words))


_POD_TEMPLATE = f"""
## podTemplate

Laid over the rendered pods of the pool. Containers, init containers and volumes are merged by name, environment
variables by name, volume mounts by `mountPath`, labels and annotations by key; any other field replaces the rendered
one. The worker is the container `worker`. The operator refuses, with the condition Ready=False/SpecRefused:

- what has a typed field; the message names it
- what it lives by: the worker's command, ports and probes, labels and annotations under `antiphon.dev/`, the volumes
  {_listed(OWNED_VOLUMES)}, mounts under {_listed(OWNED_PATHS)}
- more than 64 KiB
"""


def _argument_section() -> Iterator[str]:
    yield "\n## engine.args\n\n"
    yield "Any option of `antiphon worker` but these, which may not be set as `ANTIPHON_*` variables either.\n\n"
    yield "| option | instead |\n|---|---|\n"
    for flag, instead in OWNED_FLAGS.items():
        if flag != "model":
            yield f"| `--{flag}` | {instead} |\n"


def _objects(schema: Mapping[str, Any], path: str) -> Iterator[str]:
    """A section for an object, then one for each object in it. `decode` is like `prefill`: one section for both."""
    title = "spec.prefill` and `spec.decode" if path == "spec.prefill" else path.replace("spec.prefill", "spec.<pool>")
    description = "Both pools have the same fields." if path == "spec.prefill" else schema["description"]
    yield f"\n### `{title}`\n\n{description}\n\n"
    yield "| field | type | default | what it is |\n|---|---|---|---|\n"
    for name, inner in schema["properties"].items():
        required = name in schema.get("required", ())
        yield f"| `{name}` | {_type(inner)} | {_default(inner, required=required)} | {_cell(inner['description'])} |\n"
    sentences = [f"- {rule['message']}\n" for rule in schema.get("x-kubernetes-validations", ())]
    for name, inner in schema["properties"].items():
        sentences += [
            f"- `{name}`: {rule['message']}\n"
            for rule in inner.get("items", inner).get("x-kubernetes-validations", ())
            if inner.get("items", inner)["type"] == "string"
        ]
    if sentences:
        yield "\nRules:\n\n"
        yield from sentences
    for name, inner in schema["properties"].items():
        below = inner.get("items", inner)
        if "properties" in below and not (path == "spec" and name == "decode"):
            described = {"description": inner["description"], **below}
            yield from _objects(described, f"{path}.{name}{'[]' if below is not inner else ''}")


def _type(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return " \\| ".join(f"`{value}`" for value in schema["enum"])
    if schema.get("x-kubernetes-int-or-string"):
        return "quantity"
    match schema["type"]:
        case "array":
            return f"list ({schema['maxItems']}) of {_type(schema['items'])}"
        case "object" if "additionalProperties" in schema:
            return f"map ({schema['maxProperties']}) to {_type(schema['additionalProperties'])}"
        case "integer":
            high = f" to {schema['maximum']}" if "maximum" in schema else " and up"
            return f"integer, {schema['minimum']}{high}"
        case "string":
            return f"text ({schema['maxLength']})"
        case other:
            return str(other)


def _default(schema: Mapping[str, Any], *, required: bool) -> str:
    if required:
        return "**required**"
    default = schema.get("default")
    if default is None or isinstance(default, dict):
        return ""
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


_CHANGES_OPENING = """# What a change of a Model does

- **new revision**: pods are replaced, in pairs; both revisions serve meanwhile (see [operator.md](operator.md)).
- **in place**: taken over without touching a pod.
- **refused**: with a sentence; what runs goes on running.

A revision is named by the fields of the first kind, compared by what they mean: writing a default out, or `1024Mi`
for `1Gi`, changes nothing. Adding or removing `prefill` as a whole is a new revision. `metadata.name` and
`metadata.namespace`, and `spec.role` of a Pool, cannot change: the API server refuses it. Two annotations make
something happen without a change of the spec: `antiphon.dev/update` (a new revision from the operator's current
templates) and `antiphon.dev/rotate-credentials` (in place).

v1alpha1 grows by addition only: no field is renamed or removed, no default changes.

| field of `spec` | a change is | why |
|---|---|---|
"""


def changes_page() -> str:
    lines = [_MADE, _CHANGES_OPENING]
    for path, rule in CHANGES.items():
        kind = rule.change.value if rule.change is Change.IN_PLACE else f"**{rule.change.value}**"
        lines.append(f"| `{path}` | {kind} | {rule.why} |\n")
    return "".join(lines)


def pages() -> dict[str, str]:
    """File name -> contents."""
    return {"model-reference.md": reference_page(), "model-changes.md": changes_page()}


def main(arguments: Sequence[str] | None = None) -> int:
    return generated.run("antiphon_operator.resource.reference", __doc__, FOLDER, pages(), arguments)


if __name__ == "__main__":
    sys.exit(main())
