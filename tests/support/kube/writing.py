"""From what a client sent to what is stored: decoded, defaulted, checked, its owners of fields noted."""

from __future__ import annotations

from typing import Any

from tests.support.kube import cel, rules, ssa
from tests.support.kube.defaults import fill
from tests.support.kube.errors import ApiError, Cause, bad_request, invalid
from tests.support.kube.objects import Object, without
from tests.support.kube.registry import Known, check_crd, established_status
from tests.support.kube.resources import CRDS, SERVICES
from tests.support.kube.validation import faults, fill_defaults, pruned, type_faults, without_nulls

_KEPT_METADATA = (
    "name",
    "namespace",
    "uid",
    "creationTimestamp",
    "generation",
    "resourceVersion",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
)
"""What no update can change."""


def decoded(known: Known, body: Any, *, strict: bool = False) -> Object:
    """A copy without unknown fields (400 in strict mode) and, for built-in kinds, without nulls."""
    resource = known.resource
    if not isinstance(body, dict) or not isinstance(body.get("metadata", {}), dict):
        raise bad_request("the object provided is not an object with metadata")
    kind, api_version = body.get("kind", resource.kind), body.get("apiVersion", resource.api_version)
    if (kind, api_version) != (resource.kind, resource.api_version):
        raise bad_request(
            f"the API version and kind in the data ({api_version}, {kind}) do not match the expected "
            f"({resource.api_version}, {resource.kind})"
        )
    fields = body.get("metadata", {}).get("managedFields")
    body = body | {"metadata": without(body.get("metadata") or {}, "managedFields")}
    unknown: list[str] = []
    value: Object = pruned(known.schema, body, unknown)
    if strict and unknown:
        listed = ", ".join(f'unknown field "{path}"' for path in unknown)
        raise bad_request(
            f"{resource.kind} in version {resource.version!r} cannot be handled: strict decoding error: {listed}"
        )
    if not known.custom:
        value = without_nulls(value)
        wrong = type_faults(known.schema, value)
        if wrong:
            what = f'{resource.kind} in version "{resource.version}" cannot be handled as a {resource.kind}'
            raise bad_request(f"{what}: {wrong[0].message}")
    named: Object = {"apiVersion": resource.api_version, "kind": resource.kind}
    value = named | value
    value["metadata"] = {key: item for key, item in value["metadata"].items() if item is not None}
    if fields is not None:
        value["metadata"]["managedFields"] = fields
    return value


def typed_patch(known: Known, body: Any) -> Object:
    """The configuration of an apply, which has to fit the schema exactly. Raises 500 as a real server does."""
    resource = known.resource
    metadata = (body.get("metadata") or {}) if isinstance(body, dict) else {}
    if metadata.get("managedFields"):
        raise bad_request("metadata.managedFields must be nil")
    unknown: list[str] = []
    value = without_nulls(pruned(known.schema, body, unknown))
    what = f"{metadata.get('namespace', '')}/{metadata.get('name', '')}; {resource.api_version}, Kind={resource.kind}"
    problems = [f".{path}: field not declared in schema" for path in unknown]
    problems += [
        f".{cause.field}: {cause.message}"
        for cause in faults(known.schema, value)
        if cause.reason in ("FieldValueTypeInvalid", "FieldValueDuplicate")
    ]
    if problems:
        raise ApiError(500, "InternalError", f"failed to create typed patch object ({what}): {problems[0]}")
    return decoded(known, value)


def completed(known: Known, value: Object, before: Object | None) -> Object:
    """Defaults filled in, everything checked. `value` is changed in place. Raises 422 with all that is wrong."""
    resource = known.resource
    managed = value["metadata"].pop("managedFields", None)
    if known.custom:
        fill_defaults(known.schema, value)
    else:
        if resource == CRDS:
            check_crd(value)
        if resource == SERVICES and before is not None:
            _keep_address(value, before)
        fill(resource, value)
    causes: list[Cause] = [*rules.metadata_faults(value["metadata"]), *faults(known.schema, value)]
    if not known.custom:
        causes = [each for each in causes if not _is_left_out_of_status(each)]
    if known.custom and not causes:
        causes += cel.faults(known.schema, value, *((before,) if before is not None else ()))
    if not known.custom and not causes:
        causes += rules.workload_faults(resource, value)
        if before is not None:
            causes += rules.change_faults(resource, before, value)
    if before is not None:
        causes += _new_finalizers(before, value)
    if causes:
        raise invalid(resource, value["metadata"].get("name", ""), causes)
    if resource == CRDS:
        value["status"] = established_status(value, before)
    if managed is not None:
        value["metadata"]["managedFields"] = managed
    return value


def _is_left_out_of_status(cause: Cause) -> bool:
    """A number that a status leaves out is 0 to a built-in kind."""
    return cause.reason == "FieldValueRequired" and cause.field.startswith("status.")


def _keep_address(value: Object, before: Object) -> None:
    for field in ("clusterIP", "clusterIPs"):
        if not value["spec"].get(field) and before["spec"].get(field):
            value["spec"][field] = before["spec"][field]


def _new_finalizers(before: Object, value: Object) -> list[Cause]:
    if not before["metadata"].get("deletionTimestamp"):
        return []
    new = set(value["metadata"].get("finalizers") or ()) - set(before["metadata"].get("finalizers") or ())
    if not new:
        return []
    why = (
        f"Forbidden: no new finalizers can be added if the object is being deleted, found new finalizers {sorted(new)}"
    )
    return [Cause("FieldValueForbidden", why, "metadata.finalizers")]


def confined(known: Known, live: Object, wanted: Object, subresource: str) -> Object:
    """`wanted` as far as this endpoint may change the object: `/status` only the status, the object itself all else."""
    if subresource == "status":
        result = dict(live)
        if "status" in wanted:
            result["status"] = wanted["status"]
        else:
            result.pop("status", None)
        return result
    result = dict(wanted)
    if known.traits.status:
        result.pop("status", None)
        if "status" in live:
            result["status"] = live["status"]
    metadata = dict(result["metadata"])
    for field in _KEPT_METADATA:
        metadata.pop(field, None)
        if field in live["metadata"]:
            metadata[field] = live["metadata"][field]
    result["metadata"] = metadata
    return result


def spec_changed(known: Known, before: Object, after: Object) -> bool:
    ignored = ("metadata", "status") if known.traits.status else ("metadata",)
    return without(before, *ignored) != without(after, *ignored)


def is_same(before: Object, after: Object) -> bool:
    """Whether a write would change nothing: times in managedFields do not count."""
    first, second = before["metadata"], after["metadata"]
    ignored = ("resourceVersion", "managedFields")
    return (
        without(before, "metadata") == without(after, "metadata")
        and without(first, *ignored) == without(second, *ignored)
        and _fields(before) == _fields(after)
    )


def _fields(value: Object) -> list[Any]:
    return [(entry.id, entry.fields) for entry in ssa.entries(value)]
