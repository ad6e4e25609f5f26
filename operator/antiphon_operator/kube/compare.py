"""Where a live object does not say what a manifest says. Pure.

A manifest is a subset of the live object: the API server adds defaults, others own fields of their own. So only what
the manifest names is looked at, with four allowances for how the API server writes things down:

* quantities are equal by amount (`1Gi`, `1024Mi`), under the fields that hold quantities;
* a number and its decimal text are one value (int-or-string);
* lists that the API merges by a key (containers by name, mounts by path, ...) are matched by that key, and may have
  more elements; all other lists are owned whole: as long, and element by element;
* empty lists, empty maps, and the few false, 0 and "" that the API does not store, are equal to nothing at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from antiphon_operator.resource.quantities import QuantityError, parse_quantity

_KEYS: Mapping[str, tuple[str, ...]] = {
    "containers": ("name",),
    "initContainers": ("name",),
    "env": ("name",),
    "volumes": ("name",),
    "imagePullSecrets": ("name",),
    "secrets": ("name",),
    "volumeMounts": ("mountPath",),
    "volumeDevices": ("devicePath",),
    "hostAliases": ("ip",),
    "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"),
    "conditions": ("type",),
    "ownerReferences": ("uid",),
}
"""Of lists of maps: the fields that tell elements apart (`x-kubernetes-list-map-keys` of the built-in kinds)."""
_MERGED_PORTS = ("containerPort", "protocol")
_SERVICE_PORTS = ("port", "protocol")
_QUANTITY_MAPS = frozenset({"limits", "requests", "capacity", "hard", "overhead"})
_QUANTITY_FIELDS = frozenset({"sizeLimit", "divisor"})
_UNSTORED_MAPS = frozenset(
    {"annotations", "labels", "nodeSelector", "matchLabels", "data", "binaryData", "status"} | _QUANTITY_MAPS
)
"""Maps that the API leaves out when they are empty. Other empty maps mean something: `emptyDir: {}`."""
_UNSTORED_ZEROES = frozenset(
    {
        "value",
        "readOnly",
        "subPath",
        "hostNetwork",
        "hostPID",
        "hostIPC",
        "stdin",
        "stdinOnce",
        "tty",
        "initialDelaySeconds",
        "publishNotReadyAddresses",
        "minReadySeconds",
    }
)
"""Fields whose false, 0 or "" the API leaves out. Elsewhere these values mean something: `replicas: 0`."""


def differences(wanted: Mapping[str, Any], live: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Paths such as `spec.template.spec.containers[worker].image` where `live` is not as `wanted`. In order."""
    for key, value in wanted.items():
        yield from _field(key, value, live, f"{path}.{key}" if path else key, quantities=path_end(path))


def path_end(path: str) -> str:
    return path.rpartition(".")[2]


def _field(key: str, wanted: Any, parent: Mapping[str, Any], path: str, *, quantities: str) -> Iterator[str]:
    live = parent.get(key)
    if live is None:
        if not _unstored(key, wanted):
            yield path
    elif isinstance(wanted, Mapping):
        if isinstance(live, Mapping):
            yield from differences(wanted, live, path)
        else:
            yield path
    elif isinstance(wanted, list | tuple):
        if isinstance(live, list | tuple):
            yield from _lists(key, wanted, live, path)
        else:
            yield path
    elif not _same(wanted, live, quantity=quantities in _QUANTITY_MAPS or key in _QUANTITY_FIELDS):
        yield path


def _unstored(key: str, wanted: Any) -> bool:
    """The API writes this value down by leaving the field out."""
    if wanted is None or (isinstance(wanted, list | tuple) and not wanted):
        return True
    if isinstance(wanted, Mapping):
        return not wanted and key in _UNSTORED_MAPS
    return not wanted and key in _UNSTORED_ZEROES


def _lists(key: str, wanted: Sequence[Any], live: Sequence[Any], path: str) -> Iterator[str]:
    keys = _list_keys(key, wanted, path)
    if not keys:
        if len(wanted) != len(live):
            yield path
            return
        for number, (mine, theirs) in enumerate(zip(wanted, live, strict=True)):
            yield from _element(mine, theirs, f"{path}[{number}]")
        return
    by_key = {_identity(element, keys): element for element in live if isinstance(element, Mapping)}
    for element in wanted:
        identity = _identity(element, keys)
        shown = f"{path}[{','.join(identity)}]"
        if identity in by_key:
            yield from _element(element, by_key[identity], shown)
        else:
            yield shown


def _list_keys(key: str, wanted: Sequence[Any], path: str) -> tuple[str, ...]:
    if not all(isinstance(element, Mapping) for element in wanted):
        return ()
    if key == "ports":
        if path == "spec.ports":
            return _SERVICE_PORTS
        return _MERGED_PORTS if any("containerPort" in element for element in wanted) else ()
    return _KEYS.get(key, ())


def _identity(element: Mapping[str, Any], keys: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(str(element.get(key, "TCP" if key == "protocol" else "")) for key in keys)


def _element(wanted: Any, live: Any, path: str) -> Iterator[str]:
    if isinstance(wanted, Mapping) and isinstance(live, Mapping):
        yield from differences(wanted, live, path)
    elif not _same(wanted, live, quantity=False):
        yield path


def _same(wanted: Any, live: Any, *, quantity: bool) -> bool:
    if isinstance(wanted, bool) or isinstance(live, bool):
        return wanted is live
    if wanted == live:
        return True
    if quantity:
        try:
            return parse_quantity(wanted) == parse_quantity(live)
        except QuantityError:
            return False
    return isinstance(wanted, int | str) and isinstance(live, int | str) and str(wanted) == str(live)
