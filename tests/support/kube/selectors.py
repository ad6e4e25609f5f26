"""Label and field selectors: texts such as `app=x,tier in (a,b),!old` become tests on objects."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from tests.support.kube.errors import bad_request
from tests.support.kube.objects import Object

Test = Callable[[Object], bool]

_SET = re.compile(r"^\s*([^\s!=()]+)\s+(in|notin)\s+\(([^)]*)\)\s*$")
_EQUAL = re.compile(r"^\s*([^\s!=]+)\s*(==|=|!=)\s*([^\s]*)\s*$")
_EXISTS = re.compile(r"^\s*(!?)\s*([^\s!=()]+)\s*$")
_BEFORE_PARENTHESIS = re.compile(r",(?![^(]*\))")


def _label(requirement: str) -> Callable[[dict[str, str]], bool]:
    if match := _SET.match(requirement):
        key, operator, values = match[1], match[2], {value.strip() for value in match[3].split(",")}
        if operator == "in":
            return lambda labels: labels.get(key) in values
        return lambda labels: labels.get(key) not in values
    if match := _EQUAL.match(requirement):
        key, operator, value = match[1], match[2], match[3]
        if operator == "!=":
            return lambda labels: labels.get(key) != value
        return lambda labels: labels.get(key) == value
    if match := _EXISTS.match(requirement):
        absent, key = bool(match[1]), match[2]
        return lambda labels: (key not in labels) is absent
    raise bad_request(f"unable to parse requirement: {requirement!r}")


def label_test(selector: str) -> Test | None:
    """None for an empty selector: everything passes."""
    if not selector.strip():
        return None
    tests = [_label(part) for part in _BEFORE_PARENTHESIS.split(selector)]
    return lambda value: all(test(value["metadata"].get("labels") or {}) for test in tests)


def _at(value: Object, path: list[str]) -> Any:
    here: Any = value
    for step in path:
        here = here.get(step) if isinstance(here, dict) else None
    return here


_FIELDS = {"metadata.name", "metadata.namespace"}
_FIELDS_OF_KIND = {
    "Pod": {"spec.nodeName", "spec.restartPolicy", "spec.schedulerName", "spec.serviceAccountName", "status.phase"},
    "Event": {
        "involvedObject.kind", "involvedObject.namespace", "involvedObject.name", "involvedObject.uid",
        "involvedObject.apiVersion", "involvedObject.resourceVersion", "involvedObject.fieldPath",
        "reason", "reportingComponent", "source", "type",
    },
    "Namespace": {"status.phase"},
    "Secret": {"type"},
    "Node": {"spec.unschedulable"},
    "Job": {"status.successful"},
}  # fmt: skip


def field_test(selector: str, kind: str, selectable: frozenset[str] = frozenset()) -> Test | None:
    """Only the fields that the API can select by; others are refused, as a real server does."""
    if not selector.strip():
        return None
    wanted: list[tuple[list[str], bool, str]] = []
    for part in selector.split(","):
        match = _EQUAL.match(part)
        if match is None:
            raise bad_request(f"invalid selector: {part!r}; can't understand {part!r}")
        if match[1] not in _FIELDS | _FIELDS_OF_KIND.get(kind, set()) | selectable:
            raise bad_request(f"field label not supported: {match[1]}")
        wanted.append((match[1].split("."), match[2] != "!=", match[3]))

    def test(value: Object) -> bool:
        return all((str(_at(value, path) or "") == text) is equal for path, equal, text in wanted)

    return test


def both(first: Test | None, second: Test | None) -> Test | None:
    if first is None or second is None:
        return first or second
    return lambda value: first(value) and second(value)


def matches(selector: Object | None, labels: dict[str, str]) -> bool:
    """A LabelSelector object (`matchLabels`, `matchExpressions`); none selects nothing, an empty one everything."""
    if selector is None:
        return False
    if any(labels.get(key) != value for key, value in (selector.get("matchLabels") or {}).items()):
        return False
    for requirement in selector.get("matchExpressions") or ():
        key, values = requirement["key"], requirement.get("values") or []
        holds = {
            "In": labels.get(key) in values,
            "NotIn": labels.get(key) not in values,
            "Exists": key in labels,
            "DoesNotExist": key not in labels,
        }[requirement["operator"]]
        if not holds:
            return False
    return True
