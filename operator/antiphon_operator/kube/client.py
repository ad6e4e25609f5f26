"""The API client: the verbs that the operator needs, on parsed JSON.

Server-side apply with one field manager is how everything is written that the operator owns. Refusals are types (see
`errors`). The client belongs to one event loop; its owner closes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

from antiphon_operator.kube import events
from antiphon_operator.kube.access import ClusterAccess
from antiphon_operator.kube.errors import AlreadyExists, ApiError, ApiUnavailable, Conflict, Gone, NotFound
from antiphon_operator.kube.kubeconfig import find_access
from antiphon_operator.kube.resources import EVENTS, PODS, Object, Resource, resource_of
from antiphon_operator.kube.transport import CONCURRENCY, DEADLINE_S, Call, RetryPolicy, Transport
from antiphon_operator.names import FIELD_MANAGER

PAGE_OBJECTS = 500
LIST_DEADLINE_S = 30.0
_LISTINGS = 3
"""So often a list that became too old between two pages is begun anew."""
LOG_LINE_CHARACTERS = 300
_LOG_TAIL_LINES = 20
_LOG_BYTES = 65_536

_APPLY = "application/apply-patch+yaml"
"""JSON is YAML; there is no other name for this type in Kubernetes 1.30."""
_MERGE = "application/merge-patch+json"

_MANAGER = {"fieldManager": FIELD_MANAGER}

Objects = list[Object]
Propagation = Literal["Background", "Foreground", "Orphan"]


def _always() -> bool:
    return True


class KubeClient:
    """See the module's docstring."""

    def __init__(
        self,
        access: ClusterAccess,
        *,
        may_write: Callable[[], bool] = _always,
        retries: RetryPolicy | None = None,
        deadline_s: float = DEADLINE_S,
        concurrency: int = CONCURRENCY,
    ) -> None:
        self._transport = Transport(
            access, may_write=may_write, retries=retries or RetryPolicy(), concurrency=concurrency
        )
        self._deadline_s = deadline_s

    @classmethod
    def connect(cls, kubeconfig: str = "", *, may_write: Callable[[], bool] = _always) -> KubeClient:
        """By the file given, else KUBECONFIG, else the pod's service account. Nothing is sent. Raises AccessError."""
        return cls(find_access(kubeconfig), may_write=may_write)

    async def close(self) -> None:
        await self._transport.close()

    # -- reading

    async def get(self, resource: Resource, namespace: str | None, name: str) -> Object:
        """Raises NotFound."""
        return await self._object("get", "GET", resource, namespace, name)

    async def list(
        self, resource: Resource, namespace: str | None = None, *, labels: str = "", fields: str = ""
    ) -> Objects:
        """All pages. `labels` and `fields` are selectors. Items have apiVersion and kind, which the API leaves out."""
        for listing in range(1, _LISTINGS + 1):
            try:
                return await self._pages(resource, namespace, labels, fields)
            except Gone:
                if listing == _LISTINGS:
                    raise
        raise AssertionError("unreachable")

    async def _pages(self, resource: Resource, namespace: str | None, labels: str, fields: str) -> Objects:
        query = {"limit": str(PAGE_OBJECTS)}
        if labels:
            query["labelSelector"] = labels
        if fields:
            query["fieldSelector"] = fields
        objects: Objects = []
        named = {"apiVersion": resource.api_version, "kind": resource.kind}
        while True:
            page = await self._send(
                Call(
                    "list",
                    resource.kind,
                    namespace or "",
                    "GET",
                    resource.path(namespace),
                    query,
                    deadline_s=LIST_DEADLINE_S,
                )
            )
            objects += [named | item for item in page.get("items") or []]
            following = (page.get("metadata") or {}).get("continue")
            if not following:
                return objects
            query = query | {"continue": str(following)}

    async def pod_log_tail(self, namespace: str, pod: str, container: str, *, previous: bool) -> str:
        """The last line of a container's log that is not empty, shortened; empty if there is none. Raises NotFound.

        `previous`: of the container's last run rather than this one.
        """
        query = {"container": container, "tailLines": str(_LOG_TAIL_LINES), "limitBytes": str(_LOG_BYTES)}
        if previous:
            query["previous"] = "true"
        path = PODS.path(namespace, pod, "log")
        call = Call("log", "Pod", f"{namespace}/{pod}", "GET", path, query, deadline_s=self._deadline_s)
        text = (await self._transport.send(call)).decode("utf-8", "replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return lines[-1][:LOG_LINE_CHARACTERS] if lines else ""

    # -- writing

    async def apply(self, manifest: Object) -> Object:
        """Server-side apply, forced: the fields in the manifest are ours. Raises Invalid, Forbidden, Conflict, ..."""
        resource = resource_of(manifest["apiVersion"], manifest["kind"])
        metadata = manifest["metadata"]
        return await self._object(
            "apply",
            "PATCH",
            resource,
            metadata.get("namespace"),
            metadata["name"],
            body=manifest,
            content_type=_APPLY,
            query={"fieldManager": FIELD_MANAGER, "force": "true"},
        )

    async def create(self, resource: Resource, namespace: str | None, body: Object) -> Object:
        """Raises AlreadyExists."""
        return await self._object("create", "POST", resource, namespace, "", body=body, query=_MANAGER)

    async def replace(self, resource: Resource, namespace: str | None, name: str, body: Object) -> Object:
        """With `metadata.resourceVersion` in the body: Conflict if the object is another by now."""
        return await self._object("update", "PUT", resource, namespace, name, body=body, query=_MANAGER)

    async def merge_patch(self, resource: Resource, namespace: str | None, name: str, patch: Object) -> Object:
        """JSON merge patch: a null removes."""
        return await self._object(
            "patch", "PATCH", resource, namespace, name, body=patch, content_type=_MERGE, query=_MANAGER
        )

    async def patch_status(
        self, resource: Resource, namespace: str | None, name: str, status: Mapping[str, Any]
    ) -> Object:
        """Merge patch of the status subresource: what is not named stays, a null removes (see `drift.status_patch`)."""
        return await self._object(
            "patch",
            "PATCH",
            resource,
            namespace,
            name,
            subresource="status",
            body={"status": status},
            content_type=_MERGE,
            query=_MANAGER,
        )

    async def delete(
        self, resource: Resource, namespace: str | None, name: str, *, uid: str, propagation: Propagation = "Background"
    ) -> None:
        """The object with this uid is to go. That it is gone already, or that its name is another's now, is success."""
        body = {
            "kind": "DeleteOptions",
            "apiVersion": "v1",
            "preconditions": {"uid": uid},
            "propagationPolicy": propagation,
        }
        try:
            await self._object("delete", "DELETE", resource, namespace, name, body=body)
        except NotFound:
            return
        except Conflict as error:
            if "precondition" not in error.message.lower():
                raise

    async def post_event(
        self, about: Object, kind: Literal["Normal", "Warning"], reason: str, message: str, *, count: int = 1
    ) -> None:
        """An Event about an object. An equal one is counted up, by `count`, rather than repeated."""
        event = events.event(about, kind, reason, message, now=datetime.now(UTC), count=count)
        namespace, name = event["metadata"]["namespace"], event["metadata"]["name"]
        try:
            await self.create(EVENTS, namespace, event)
        except AlreadyExists:
            try:
                live = await self.get(EVENTS, namespace, name)
                await self.merge_patch(EVENTS, namespace, name, events.counted_up(live, event))
            except NotFound:
                # It ran out between the two: events live for an hour or so.
                await self.create(EVENTS, namespace, event)

    # -- one request

    async def _object(
        self,
        verb: str,
        method: str,
        resource: Resource,
        namespace: str | None,
        name: str,
        *,
        subresource: str = "",
        body: Object | None = None,
        content_type: str = "application/json",
        query: Mapping[str, str] | None = None,
    ) -> Object:
        return await self._send(
            Call(
                verb,
                f"{resource.kind}/{subresource}" if subresource else resource.kind,
                f"{namespace}/{name}" if namespace else name,
                method,
                resource.path(namespace, name, subresource),
                query or {},
                None if body is None else msgspec.json.encode(body),
                content_type,
                self._deadline_s,
            )
        )

    async def _send(self, call: Call) -> dict[str, Any]:
        body = await self._transport.send(call)
        try:
            parsed = msgspec.json.decode(body)
        except msgspec.DecodeError as error:
            raise ApiUnavailable(str(call), 200, "NotJson", f"the answer is not JSON: {error}") from error
        if not isinstance(parsed, dict):
            raise ApiError(str(call), 200, "NotAnObject", "the answer is not an object: is this an API server?")
        return parsed
