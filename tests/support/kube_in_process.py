"""The operator's API client over the test API server in the same process: no sockets, and refusals at will.

For tests of the runtime's parts. The whole process is tested over HTTP.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import yaml
from antiphon_operator.kube import errors
from antiphon_operator.kube.client import KubeClient
from antiphon_operator.kube.resources import Object, Resource, resource_of

from tests.support.kube.api import Api, ApiError
from tests.support.kube.resources import CRDS
from tests.support.kube.resources import Resource as Served

CRD_FOLDER = Path(__file__).parents[2] / "charts" / "antiphon" / "templates" / "crds"


def served(resource: Resource) -> Served:
    group, _, version = resource.api_version.rpartition("/")
    return Served(group, version, resource.plural, resource.kind, resource.namespaced)


def api_with_models() -> Api:
    """A server that knows Models and Pools."""
    api = Api()
    for file in sorted(CRD_FOLDER.glob("*.yaml")):
        api.create(CRDS, None, yaml.safe_load(file.read_text()))
    return api


class InProcessClient:
    """`refuse[kind]` is raised instead of writing an object of that kind. `writes` tells what was written."""

    def __init__(self, api: Api) -> None:
        self.api = api
        self.refuse: dict[str, Exception] = {}
        self.writes: list[str] = []

    def as_client(self) -> KubeClient:
        return cast(KubeClient, cast(Any, self))

    async def list(
        self, resource: Resource, namespace: str | None = None, *, labels: str = "", fields: str = ""
    ) -> list[Object]:
        named = {"apiVersion": resource.api_version, "kind": resource.kind}
        return [named | found for found in self.api.list(served(resource), namespace, labels=labels, fields=fields)]

    async def apply(self, manifest: Object) -> Object:
        resource, about = resource_of(manifest["apiVersion"], manifest["kind"]), manifest["metadata"]
        return self._write(
            "apply",
            resource,
            about["name"],
            lambda: self.api.apply(
                served(resource),
                about.get("namespace"),
                about["name"],
                dict(manifest),
                manager="antiphon-operator",
                force=True,
            ),
        )

    async def create(self, resource: Resource, namespace: str | None, body: Object) -> Object:
        name = body["metadata"]["name"]
        return self._write("create", resource, name, lambda: self.api.create(served(resource), namespace, dict(body)))

    async def merge_patch(self, resource: Resource, namespace: str | None, name: str, patch: Object) -> Object:
        return self._write(
            "patch", resource, name, lambda: self.api.merge_patch(served(resource), namespace, name, dict(patch))
        )

    async def patch_status(
        self, resource: Resource, namespace: str | None, name: str, status: Mapping[str, Any]
    ) -> Object:
        body = {"status": dict(status)}
        return self._write(
            "status",
            resource,
            name,
            lambda: self.api.merge_patch(served(resource), namespace, name, body, subresource="status"),
        )

    async def delete(
        self, resource: Resource, namespace: str | None, name: str, *, uid: str, propagation: str = "Background"
    ) -> None:
        try:
            self._write(
                "delete",
                resource,
                name,
                lambda: self.api.delete(served(resource), namespace, name, uid=uid, propagation=propagation),
            )
        except (errors.NotFound, errors.Conflict):
            return

    async def post_event(self, about: Object, kind: str, reason: str, message: str, *, count: int = 1) -> None:
        self.writes.append(f"event {reason}: {message}")

    def _write(self, verb: str, resource: Resource, name: str, write: Any) -> Object:
        if resource.kind in self.refuse:
            raise self.refuse[resource.kind]
        self.writes.append(f"{verb} {resource.kind} {name}")
        try:
            answer: Object = {"apiVersion": resource.api_version, "kind": resource.kind} | write()
        except ApiError as error:
            raise errors.refusal(f"{verb} {resource.kind} {name}", error.status, {}, _json(error)) from error
        return answer


def _json(error: ApiError) -> bytes:
    return json.dumps(error.body()).encode()
