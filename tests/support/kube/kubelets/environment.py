"""A container's variables as the kubelet makes them: values, references to fields and keys, whole ConfigMaps and
Secrets, and `$(NAME)` expanded. Pure but for `Keys`, which looks ConfigMaps and Secrets up."""

from __future__ import annotations

import base64
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal

from tests.support.kube.kubelets.runtime import NotYet, TestFault

Object = Mapping[str, Any]
KeyedKind = Literal["Secret", "ConfigMap"]
Keys = Callable[[KeyedKind, str], Awaitable[Mapping[str, bytes] | None]]
"""(kind, name) -> what it holds; None: there is none."""
_REFERENCE = re.compile(r"\$\$|\$\(([A-Za-z_.-][A-Za-z0-9_.-]*)\)")
_ITEM = re.compile(r"^metadata\.(labels|annotations)\['([^']+)'\]$")


def held(thing: Object) -> dict[str, bytes]:
    """The keys of a Secret or ConfigMap."""
    if thing["kind"] == "Secret":
        return {key: base64.b64decode(value) for key, value in (thing.get("data") or {}).items()}
    texts = {key: value.encode() for key, value in (thing.get("data") or {}).items()}
    return texts | {key: base64.b64decode(value) for key, value in (thing.get("binaryData") or {}).items()}


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """`$(NAME)` replaced where NAME is known, `$$` by `$`; an unknown one stays, as the kubelet leaves it."""

    def one(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        return variables.get(match[1], match[0])

    return _REFERENCE.sub(one, text)


def field(pod: Object, path: str, *, address: str, host_address: str) -> str:
    """A `fieldRef`. Raises TestFault for one that is not played."""
    metadata, spec = pod["metadata"], pod["spec"]
    simple = {
        "metadata.name": metadata["name"],
        "metadata.namespace": metadata["namespace"],
        "metadata.uid": metadata["uid"],
        "spec.nodeName": spec.get("nodeName", ""),
        "spec.serviceAccountName": spec.get("serviceAccountName", "default"),
        "status.podIP": address,
        "status.podIPs": address,
        "status.hostIP": host_address,
        "status.hostIPs": host_address,
    }
    if path in simple:
        return str(simple[path])
    if match := _ITEM.match(path):
        return str((metadata.get(match[1]) or {}).get(match[2], ""))
    if path in ("metadata.labels", "metadata.annotations"):
        lines = sorted((metadata.get(path.rpartition(".")[2]) or {}).items())
        return "".join(f'{key}="{value}"\n' for key, value in lines)
    raise TestFault(f"the process kubelet plays no fieldRef {path!r}; it knows {sorted(simple)} and metadata's items")


async def environment(container: Object, fields: Callable[[str], str], keys: Keys) -> dict[str, str]:
    """In the order of the spec, so that later ones may use earlier ones. Raises NotYet where a key is missing."""
    variables: dict[str, str] = {}
    for source in container.get("envFrom") or ():
        prefix = source.get("prefix", "")
        kind, reference = _keyed(source, "Ref")
        found = await keys(kind, reference["name"])
        if found is None and not reference.get("optional"):
            raise _missing(kind, reference["name"])
        variables |= {f"{prefix}{key}": value.decode() for key, value in (found or {}).items()}
    for each in container.get("env") or ():
        value = await _value(each, fields, keys, variables)
        if value is not None:
            variables[each["name"]] = value
    return variables


async def _value(each: Object, fields: Callable[[str], str], keys: Keys, known: Mapping[str, str]) -> str | None:
    source = each.get("valueFrom")
    if source is None:
        return expanded(each.get("value") or "", known)
    if reference := source.get("fieldRef"):
        return fields(reference["fieldPath"])
    if "resourceFieldRef" in source:
        raise TestFault(f"variable {each['name']}: the process kubelet plays no resources, so no resourceFieldRef")
    kind, reference = _keyed(source, "KeyRef")
    found = await keys(kind, reference["name"])
    if found is not None and reference["key"] in found:
        return found[reference["key"]].decode()
    if reference.get("optional"):
        return None
    if found is None:
        raise _missing(kind, reference["name"])
    raise NotYet("CreateContainerConfigError", f"couldn't find key {reference['key']} in {kind} {reference['name']}")


def _keyed(source: Object, ending: str) -> tuple[KeyedKind, Object]:
    if (reference := source.get(f"secret{ending}")) is not None:
        return "Secret", reference
    return "ConfigMap", source[f"configMap{ending}"]


def _missing(kind: KeyedKind, name: str) -> NotYet:
    return NotYet("CreateContainerConfigError", f'{kind.lower()} "{name}" not found')
