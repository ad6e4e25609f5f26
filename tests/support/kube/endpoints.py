"""The verbs over HTTP: what a request asks, done by the Api, and the answer's bytes."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from itertools import islice
from typing import Any

import msgspec
import yaml
from aiohttp import web

from tests.support.kube import subresources
from tests.support.kube.api import Api
from tests.support.kube.discovery import ORPHANS_BY_DEFAULT
from tests.support.kube.errors import ApiError, bad_request, expired, method_not_allowed, no_such_path
from tests.support.kube.objects import Object, without
from tests.support.kube.paths import Target
from tests.support.kube.resources import PODS
from tests.support.kube.selectors import both, field_test, label_test
from tests.support.kube.tables import table_of, wants_table
from tests.support.kube.watch import Watch, WatchOptions

_APPLY_TYPES = ("application/apply-patch+yaml", "application/apply-patch+json")


@dataclass(frozen=True)
class Asked:
    """One request about objects."""

    method: str
    target: Target
    query: dict[str, str]
    content: str
    body: bytes
    accept: str
    user_agent: str

    @property
    def verb(self) -> str:
        target = self.target
        match self.method:
            case "GET" if self.is_watch:
                return "watch"
            case "GET":
                return "get" if target.name else "list"
            case "DELETE":
                return "delete" if target.name else "deletecollection"
        return {"POST": "create", "PUT": "update", "PATCH": "patch"}.get(self.method, self.method.lower())

    @property
    def is_watch(self) -> bool:
        return self.query.get("watch", "").lower() in ("true", "1")

    @property
    def manager(self) -> str:
        return self.query.get("fieldManager") or self.user_agent.split("/", 1)[0] or "unknown"

    @property
    def dry_run(self) -> bool:
        return self.query.get("dryRun") == "All"

    @property
    def strict(self) -> bool:
        return self.query.get("fieldValidation") == "Strict"

    def parsed(self) -> Any:
        """The body. Raises 400."""
        if not self.body:
            return {}
        if self.content == "application/vnd.kubernetes.protobuf":
            raise ApiError(
                415,
                "UnsupportedMediaType",
                "this server speaks JSON and YAML only: `kubectl apply -f` works, `kubectl create deployment` does not",
            )
        try:
            return msgspec.json.decode(self.body)
        except msgspec.DecodeError:
            pass
        try:
            return yaml.safe_load(self.body)
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise bad_request(f"the body of the request cannot be decoded: {error}") from error


def answer(status: int, value: Any) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(value), content_type="application/json")


def handle(api: Api, asked: Asked) -> web.Response:
    """Anything but a watch. Raises ApiError."""
    target = asked.target
    api.known(target.resource)
    if target.subresource not in ("", "status"):
        return _subresource(api, asked)
    if target.subresource == "status" and not api.known(target.resource).traits.status:
        raise no_such_path()
    match asked.verb:
        case "list":
            return _list(api, asked)
        case "get":
            return _one(api, asked, 200, api.peek(target.resource, target.namespace, target.name))
        case "create":
            return _create(api, asked)
        case "update":
            value = api.replace(
                target.resource,
                target.namespace,
                target.name,
                asked.parsed(),
                subresource=target.subresource,
                manager=asked.manager,
                dry_run=asked.dry_run,
                strict=asked.strict,
            )
            return _one(api, asked, 200, value)
        case "patch":
            return _patch(api, asked)
        case "delete":
            return _delete(api, asked)
        case "deletecollection":
            return _delete_all(api, asked)
    raise method_not_allowed()


def watch_of(api: Api, asked: Asked) -> Watch:
    """Raises ApiError."""
    target, query = asked.target, asked.query
    known = api.known(target.resource)
    test = both(
        label_test(query.get("labelSelector", "")),
        field_test(query.get("fieldSelector", ""), target.resource.kind, known.selectable),
    )
    if target.name:
        test = both(test, field_test(f"metadata.name={target.name}", target.resource.kind))
    options = WatchOptions(
        since=query.get("resourceVersion", ""),
        initial_events=query.get("sendInitialEvents", "").lower() == "true",
        bookmarks=query.get("allowWatchBookmarks", "").lower() in ("true", "1"),
        timeout_s=float(query["timeoutSeconds"]) if query.get("timeoutSeconds") else None,
    )
    if options.since and not options.since.isdigit():
        raise bad_request(f"invalid resource version: {options.since!r}")
    shape = None
    if wants_table(asked.accept):

        def shape(value: Object) -> Object:
            return table_of(known, [value], with_columns=True)

    return Watch(api, target.resource, target.namespace, test, options, shape)


def _one(api: Api, asked: Asked, status: int, value: Object) -> web.Response:
    if wants_table(asked.accept):
        return answer(status, table_of(api.known(asked.target.resource), [value], with_columns=True))
    return answer(status, value)


def _list(api: Api, asked: Asked) -> web.Response:
    target, query = asked.target, asked.query
    known = api.known(target.resource)
    selectors = {"labels": query.get("labelSelector", ""), "fields": query.get("fieldSelector", "")}
    found = api.select(target.resource, target.namespace, **selectors)
    version, after = _continued(api, asked)
    if after is not None:
        found = (value for value in found if _place(value) > after)
    limit = int(query.get("limit") or 0)
    page = list(islice(found, limit + 1)) if limit else list(found)
    metadata: Object = {"resourceVersion": str(version)}
    if limit and len(page) > limit:
        page = page[:limit]
        metadata["continue"] = _token(version, _place(page[-1]))
    if wants_table(asked.accept):
        table = table_of(known, page, with_columns=True)
        return answer(200, table | {"metadata": metadata})
    items = page if known.custom else [without(value, "apiVersion", "kind") for value in page]
    resource = target.resource
    return answer(
        200,
        {
            "kind": f"{resource.kind}List",
            "apiVersion": resource.api_version,
            "metadata": metadata,
            "items": items,
        },
    )


def _place(value: Object) -> tuple[str, str]:
    return (value["metadata"].get("namespace", ""), value["metadata"]["name"])


def _token(version: int, place: tuple[str, str]) -> str:
    return base64.urlsafe_b64encode(json.dumps([version, *place]).encode()).decode()


def _continued(api: Api, asked: Asked) -> tuple[int, tuple[str, str] | None]:
    """The version that the list is of, and after which object it goes on. Raises 410 for a token that is too old."""
    token = asked.query.get("continue")
    if not token:
        return api.store.version, None
    try:
        version, namespace, name = json.loads(base64.urlsafe_b64decode(token))
    except ValueError as error:
        raise bad_request("continue key is not valid") from error
    oldest = api.store.oldest(asked.target.resource)
    if version < oldest:
        raise expired(version, oldest)
    return version, (namespace, name)


def _create(api: Api, asked: Asked) -> web.Response:
    target = asked.target
    if target.name:
        raise method_not_allowed()
    body = asked.parsed()
    value = api.create(
        target.resource,
        target.namespace,
        body,
        manager=asked.manager,
        dry_run=asked.dry_run,
        strict=asked.strict,
    )
    return _one(api, asked, 201, value)


def _patch(api: Api, asked: Asked) -> web.Response:
    target = asked.target
    place = (target.resource, target.namespace, target.name)
    if asked.content in _APPLY_TYPES:
        if "fieldManager" not in asked.query:
            raise bad_request(
                'PatchOptions.meta.k8s.io "" is invalid: fieldManager: Required value: is required for apply patch'
            )
        is_new = api.store.get(target.resource, (target.namespace or "", target.name)) is None
        value = api.apply(
            *place,
            asked.parsed(),
            manager=asked.manager,
            force=asked.query.get("force") == "true",
            subresource=target.subresource,
            dry_run=asked.dry_run,
        )
        return _one(api, asked, 201 if is_new else 200, value)
    patches = {
        "application/merge-patch+json": api.merge_patch,
        "application/json-patch+json": api.json_patch,
        "application/strategic-merge-patch+json": api.strategic_patch,
    }
    if asked.content not in patches:
        raise ApiError(
            415, "UnsupportedMediaType", f"the body of the request was in an unknown format: {asked.content}"
        )
    value = patches[asked.content](
        *place,
        asked.parsed(),
        subresource=target.subresource,
        manager=asked.manager,
        dry_run=asked.dry_run,
        strict=asked.strict,
    )
    return _one(api, asked, 200, value)


@dataclass(frozen=True)
class _DeleteOptions:
    grace_s: int | None
    propagation: str
    uid: str
    version: str
    dry_run: bool


def _delete_options(asked: Asked) -> _DeleteOptions:
    body = asked.parsed()
    body = body if isinstance(body, dict) else {}
    grace = body.get("gracePeriodSeconds", asked.query.get("gracePeriodSeconds"))
    propagation = body.get("propagationPolicy") or asked.query.get("propagationPolicy")
    orphan = body.get("orphanDependents")
    if not propagation and orphan is not None:
        propagation = "Orphan" if orphan else "Background"
    if not propagation:
        propagation = "Orphan" if asked.target.resource in ORPHANS_BY_DEFAULT else "Background"
    preconditions = body.get("preconditions") or {}
    return _DeleteOptions(
        None if grace is None else int(grace),
        propagation,
        preconditions.get("uid") or "",
        preconditions.get("resourceVersion") or "",
        asked.dry_run or body.get("dryRun") == ["All"],
    )


def _delete(api: Api, asked: Asked) -> web.Response:
    target, options = asked.target, _delete_options(asked)
    value = api.delete(
        target.resource,
        target.namespace,
        target.name,
        grace_s=options.grace_s,
        propagation=options.propagation,
        uid=options.uid,
        version=options.version,
        dry_run=options.dry_run,
    )
    still = api.store.get(target.resource, (target.namespace or "", target.name))
    if still is not None and still["metadata"]["uid"] == value["metadata"]["uid"]:
        return answer(200, value)
    if target.resource == PODS:
        return answer(200, value)
    details = {"name": target.name, "kind": target.resource.plural, "uid": value["metadata"]["uid"]}
    if target.resource.group:
        details["group"] = target.resource.group
    return answer(200, {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details})


def _delete_all(api: Api, asked: Asked) -> web.Response:
    target, query, options = asked.target, asked.query, _delete_options(asked)
    if target.resource.namespaced and target.namespace is None:
        raise method_not_allowed()
    selectors = {"labels": query.get("labelSelector", ""), "fields": query.get("fieldSelector", "")}
    for value in list(api.select(target.resource, target.namespace, **selectors)):
        api.delete(
            target.resource,
            target.namespace,
            value["metadata"]["name"],
            grace_s=options.grace_s,
            propagation=options.propagation,
            dry_run=options.dry_run,
        )
    return answer(200, {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": {}})


def _subresource(api: Api, asked: Asked) -> web.Response:
    target = asked.target
    resource, namespace, name = target.resource, target.namespace, target.name
    known = api.known(resource)
    if target.subresource == "scale" and known.scale is not None:
        return _scale(api, asked)
    if resource == PODS and namespace is not None:
        match target.subresource, asked.method:
            case "eviction", "POST":
                subresources.evict(api, namespace, name, asked.parsed())
                return answer(
                    201, {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201}
                )
            case "binding", "POST":
                subresources.bind(api, namespace, name, asked.parsed())
                return answer(
                    201, {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201}
                )
            case "log", "GET":
                query = asked.query
                text = subresources.log(
                    api,
                    namespace,
                    name,
                    query.get("container", ""),
                    previous=query.get("previous") == "true",
                    tail=int(query["tailLines"]) if "tailLines" in query else None,
                    most=int(query["limitBytes"]) if "limitBytes" in query else None,
                )
                return web.Response(text=text, content_type="text/plain")
    raise no_such_path()


def _scale(api: Api, asked: Asked) -> web.Response:
    target = asked.target
    place = (target.resource, target.namespace, target.name)
    match asked.verb:
        case "get":
            return answer(200, subresources.scale_of(api.known(target.resource), api.peek(*place)))
        case "patch" if asked.content in _APPLY_TYPES:
            force = asked.query.get("force") == "true"
            return answer(
                200, subresources.apply_scale(api, *place, asked.parsed(), manager=asked.manager, force=force)
            )
        case "patch":
            scale = subresources.patched_scale(api, *place, asked.content, asked.parsed())
        case "update":
            scale = asked.parsed()
        case _:
            raise method_not_allowed()
    return answer(200, subresources.write_scale(api, *place, scale, manager=asked.manager, dry_run=asked.dry_run))
