"""What may not be: bad names and labels, and changes of fields that cannot be changed."""

from __future__ import annotations

import json
import re

from tests.support.kube.errors import Cause
from tests.support.kube.objects import Object, clone, without
from tests.support.kube.resources import (
    CONTROLLER_REVISIONS,
    DEPLOYMENTS,
    JOBS,
    NAMESPACES,
    PODS,
    SECRETS,
    SERVICES,
    STATEFULSETS,
    Resource,
)
from tests.support.kube.selectors import matches

_SUBDOMAIN = re.compile(r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$")
_LABEL = re.compile(r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")
_SERVICE = re.compile(r"^[a-z]([-a-z0-9]*[a-z0-9])?$")
_VALUE = re.compile(r"^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$")
_ANNOTATIONS_BYTES = 256 * 1024
_ANY_NAME = re.compile(r"^[^/%]+$")

_SUBDOMAIN_WORDS = (
    "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', "
    "and must start and end with an alphanumeric character"
)


def name_faults(resource: Resource, name: str) -> list[Cause]:
    shape, longest = _SUBDOMAIN, 253
    if resource == SERVICES:
        shape, longest = _SERVICE, 63
    elif resource == NAMESPACES:
        shape, longest = _LABEL, 63
    elif resource.group == "rbac.authorization.k8s.io":
        shape = _ANY_NAME
    if len(name) > longest:
        why = f'Invalid value: "{name}": must be no more than {longest} characters'
        return [Cause("FieldValueInvalid", why, "metadata.name")]
    if not shape.match(name):
        return [Cause("FieldValueInvalid", f'Invalid value: "{name}": {_SUBDOMAIN_WORDS}', "metadata.name")]
    return []


def metadata_faults(metadata: Object, path: str = "metadata") -> list[Cause]:
    causes: list[Cause] = []
    for key, value in (metadata.get("labels") or {}).items():
        prefix, _, name = key.rpartition("/")
        if not name or len(name) > 63 or not _VALUE.match(name) or (prefix and not _SUBDOMAIN.match(prefix)):
            why = f"Invalid value: \"{key}\": name part must consist of alphanumeric characters, '-', '_' or '.'"
            causes.append(Cause("FieldValueInvalid", why, f"{path}.labels"))
        if len(value) > 63:
            why = f'Invalid value: "{value}": must be no more than 63 characters'
            causes.append(Cause("FieldValueInvalid", why, f"{path}.labels"))
        elif not _VALUE.match(value):
            why = (
                f'Invalid value: "{value}": a valid label must be an empty string or consist of alphanumeric '
                "characters, '-', '_' or '.', and must start and end with an alphanumeric character"
            )
            causes.append(Cause("FieldValueInvalid", why, f"{path}.labels"))
    size = sum(len(key) + len(value) for key, value in (metadata.get("annotations") or {}).items())
    if size > _ANNOTATIONS_BYTES:
        why = f"Too long: may not be more than {_ANNOTATIONS_BYTES} bytes"
        causes.append(Cause("FieldValueTooLong", why, f"{path}.annotations"))
    for place, owner in enumerate(metadata.get("ownerReferences") or ()):
        for field in ("apiVersion", "kind", "name", "uid"):
            if not owner.get(field):
                where = f"{path}.ownerReferences[{place}].{field}"
                causes.append(Cause("FieldValueInvalid", f'Invalid value: "": {field} must not be empty', where))
    if sum(owner.get("controller") is True for owner in metadata.get("ownerReferences") or ()) > 1:
        why = "Invalid value: only one reference can have Controller set to true"
        causes.append(Cause("FieldValueInvalid", why, f"{path}.ownerReferences"))
    return causes


def workload_faults(resource: Resource, value: Object) -> list[Cause]:
    """What a schema does not say of built-in kinds."""
    causes: list[Cause] = []
    spec = value.get("spec") or {}
    if resource in (STATEFULSETS, DEPLOYMENTS):
        labels = spec["template"]["metadata"].get("labels") or {}
        if not spec.get("selector"):
            causes.append(Cause("FieldValueRequired", "Required value", "spec.selector"))
        elif not matches(spec["selector"], labels):
            why = f"Invalid value: {json.dumps(labels)}: `selector` does not match template `labels`"
            causes.append(Cause("FieldValueInvalid", why, "spec.template.metadata.labels"))
        causes += metadata_faults(spec["template"]["metadata"], "spec.template.metadata")
    if resource == JOBS:
        policy = spec["template"]["spec"].get("restartPolicy")
        if policy not in ("OnFailure", "Never"):
            why = f'Unsupported value: "{policy}": supported values: "OnFailure", "Never"'
            causes.append(Cause("FieldValueNotSupported", why, "spec.template.spec.restartPolicy"))
    pod_spec = spec if resource == PODS else (spec.get("template") or {}).get("spec")
    if pod_spec is not None and resource in (PODS, STATEFULSETS, DEPLOYMENTS, JOBS):
        where = "spec" if resource == PODS else "spec.template.spec"
        causes += _pod_spec_faults(pod_spec, where)
    return causes


def _pod_spec_faults(spec: Object, where: str) -> list[Cause]:
    causes: list[Cause] = []
    volumes = {volume["name"] for volume in spec.get("volumes") or ()}
    if not spec.get("containers"):
        causes.append(Cause("FieldValueRequired", "Required value", f"{where}.containers"))
    for group in ("initContainers", "containers"):
        for place, container in enumerate(spec.get(group) or ()):
            path = f"{where}.{group}[{place}]"
            if not container.get("image"):
                causes.append(Cause("FieldValueRequired", "Required value", f"{path}.image"))
            for number, mount in enumerate(container.get("volumeMounts") or ()):
                if mount["name"] not in volumes:
                    why = f'Not found: "{mount["name"]}"'
                    causes.append(Cause("FieldValueNotFound", why, f"{path}.volumeMounts[{number}].name"))
            resources = container.get("resources") or {}
            for name, limit in (resources.get("limits") or {}).items():
                request = (resources.get("requests") or {}).get(name, limit)
                if "/" in name and str(request) != str(limit):
                    why = f'Invalid value: "{request}": must be equal to {name} limit of {limit}'
                    causes.append(Cause("FieldValueInvalid", why, f"{path}.resources.requests"))
    return causes


_STATEFUL_SET_MUTABLE = (
    "replicas", "ordinals", "template", "updateStrategy", "persistentVolumeClaimRetentionPolicy", "minReadySeconds",
)  # fmt: skip
_POD_MUTABLE = ("activeDeadlineSeconds", "terminationGracePeriodSeconds", "tolerations", "schedulingGates")


def change_faults(resource: Resource, before: Object, after: Object) -> list[Cause]:
    """Changes that are refused."""
    old, new = before.get("spec") or {}, after.get("spec") or {}
    if resource == STATEFULSETS and without(old, *_STATEFUL_SET_MUTABLE) != without(new, *_STATEFUL_SET_MUTABLE):
        why = (
            "Forbidden: updates to statefulset spec for fields other than 'replicas', 'ordinals', 'template', "
            "'updateStrategy', 'persistentVolumeClaimRetentionPolicy' and 'minReadySeconds' are forbidden"
        )
        return [Cause("FieldValueForbidden", why, "spec")]
    if resource == DEPLOYMENTS and old.get("selector") != new.get("selector"):
        why = f"Invalid value: {json.dumps(new.get('selector'))}: field is immutable"
        return [Cause("FieldValueInvalid", why, "spec.selector")]
    if resource == JOBS:
        fields = ("selector", "completionMode", *(() if old.get("suspend") else ("template",)))
        return [
            Cause("FieldValueInvalid", "Invalid value: field is immutable", f"spec.{field}")
            for field in fields
            if old.get(field) != new.get(field)
        ]
    if resource == SERVICES and old.get("clusterIP") and old.get("clusterIP") != new.get("clusterIP"):
        why = f'Invalid value: "{new.get("clusterIP", "")}": field is immutable'
        return [Cause("FieldValueInvalid", why, "spec.clusterIPs[0]")]
    if resource == CONTROLLER_REVISIONS and before.get("data") != after.get("data"):
        return [Cause("FieldValueInvalid", "Invalid value: field is immutable", "data")]
    if resource == SECRETS and before.get("type") != after.get("type"):
        return [Cause("FieldValueInvalid", f'Invalid value: "{after.get("type")}": field is immutable', "type")]
    if resource == SECRETS and before.get("immutable") and before.get("data") != after.get("data"):
        return [Cause("FieldValueForbidden", "Forbidden: field is immutable when `immutable` is set", "data")]
    if resource == PODS and _fixed_part(old) != _fixed_part(new | ({} if old.get("nodeName") else {"nodeName": ""})):
        why = (
            "Forbidden: pod updates may not change fields other than `spec.containers[*].image`,"
            "`spec.initContainers[*].image`,`spec.activeDeadlineSeconds`,`spec.tolerations` (only additions to "
            "existing tolerations),`spec.terminationGracePeriodSeconds` (allow it to be set to 1 if it was "
            "previously negative)"
        )
        return [Cause("FieldValueForbidden", why, "spec")]
    return []


def _fixed_part(spec: Object) -> Object:
    fixed: Object = clone(without(spec, *_POD_MUTABLE))
    fixed.setdefault("nodeName", "")
    for container in [*fixed.get("containers", ()), *(fixed.get("initContainers") or ())]:
        container.pop("image", None)
    return fixed
