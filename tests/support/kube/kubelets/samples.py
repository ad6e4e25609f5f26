"""Manifests for tests of the cluster itself: workloads of one container, as small as they can be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Object = dict[str, Any]
NAMESPACE = "test"


def container(image: str = "app:1", **fields: Any) -> Object:
    return {"name": "main", "image": image, **fields}


def pod_spec(*containers: Object, **fields: Any) -> Object:
    return {"containers": list(containers) or [container()], **fields}


def template(spec: Object | None = None, *, app: str = "app", annotations: Mapping[str, str] | None = None) -> Object:
    metadata = {"labels": {"app": app}, "annotations": dict(annotations or {})}
    return {"metadata": metadata, "spec": spec or pod_spec()}


def pod(name: str, spec: Object | None = None, *, annotations: Mapping[str, str] | None = None) -> Object:
    made = template(spec, app=name, annotations=annotations)
    made["metadata"] |= {"name": name, "namespace": NAMESPACE}
    return {"apiVersion": "v1", "kind": "Pod", **made}


def stateful_set(name: str, replicas: int, made_of: Object | None = None, **fields: Any) -> Object:
    return _workload("apps/v1", "StatefulSet", name, replicas, made_of, {"serviceName": f"{name}-pods", **fields})


def deployment(name: str, replicas: int, made_of: Object | None = None, **fields: Any) -> Object:
    return _workload("apps/v1", "Deployment", name, replicas, made_of, fields)


def job(name: str, made_of: Object | None = None, **fields: Any) -> Object:
    body = made_of or template(app=name)
    body["spec"].setdefault("restartPolicy", "Never")
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {"template": body, **fields},
    }


def _workload(
    api_version: str, kind: str, name: str, replicas: int, made_of: Object | None, fields: Mapping[str, Any]
) -> Object:
    body = made_of or template(app=name)
    return {
        "apiVersion": api_version,
        "kind": kind,
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": {"app": body["metadata"]["labels"]["app"]}},
            "template": body,
            **fields,
        },
    }
