"""A small HTTP client of any API server, as the kubelets need it: list, watch, get, patch a status, delete, create.

It knows nothing of the double. Every request has a deadline; a watch is made anew for as long as somebody reads it.
"""

from __future__ import annotations

import base64
import json
import ssl
import tempfile
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

import aiohttp
import yaml

from tests.support.kube.resources import PODS, Resource

Object = dict[str, Any]
DEADLINE_S = 60.0
WATCH_S = 60


class Refused(Exception):
    """The API server said no. `status` is the HTTP status, the text its message."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status


class Event(NamedTuple):
    """`type`: ADDED, MODIFIED, DELETED."""

    type: str
    value: Object


class KubeHttp:
    """`async with KubeHttp(kubeconfig) as client:`"""

    def __init__(self, kubeconfig: Path) -> None:
        self.server, self.token, self.tls = _read(kubeconfig)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        connector = aiohttp.TCPConnector(limit=0, ssl=self.tls or True)
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        self._session = aiohttp.ClientSession(connector=connector, headers=headers, trust_env=False)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._session is not None
        await self._session.close()

    async def get(self, resource: Resource, namespace: str, name: str) -> Object | None:
        """None where there is none."""
        try:
            return await self._json("GET", path_of(resource, namespace, name))
        except Refused as refusal:
            if refusal.status == 404:
                return None
            raise

    async def list(self, resource: Resource, namespace: str = "", **parameters: str) -> Object:
        return await self._json("GET", path_of(resource, namespace), parameters=parameters)

    async def create(self, resource: Resource, namespace: str, body: Mapping[str, Any]) -> Object:
        return await self._json("POST", path_of(resource, namespace), body=body)

    async def merge_patch(
        self, resource: Resource, namespace: str, name: str, body: Mapping[str, Any], *, subresource: str = ""
    ) -> Object:
        path = path_of(resource, namespace, name) + (f"/{subresource}" if subresource else "")
        return await self._json("PATCH", path, body=body, content_type="application/merge-patch+json")

    async def apply(self, resource: Resource, namespace: str, body: Mapping[str, Any], *, manager: str) -> Object:
        """Server-side apply of `body`, without force: raises Refused where another manager has a field with another
        value."""
        return await self._json(
            "PATCH",
            path_of(resource, namespace, body["metadata"]["name"]),
            body=body,
            parameters={"fieldManager": manager},
            content_type="application/apply-patch+yaml",
        )

    async def delete(self, resource: Resource, namespace: str, name: str, *, uid: str = "", grace_s: int = -1) -> None:
        """A missing one, and one with another uid, count as deleted. `grace_s` -1: the object's own."""
        options: Object = {"kind": "DeleteOptions", "apiVersion": "v1"}
        if uid:
            options["preconditions"] = {"uid": uid}
        if grace_s >= 0:
            options["gracePeriodSeconds"] = grace_s
        try:
            await self._json("DELETE", path_of(resource, namespace, name), body=options)
        except Refused as refusal:
            if refusal.status not in (404, 409):
                raise

    async def log(self, namespace: str, pod: str, container: str, *, previous: bool = False) -> str:
        """Raises Refused where there is none."""
        parameters = {"container": container, "previous": str(previous).lower()}
        return await self._text("GET", f"{path_of(PODS, namespace, pod)}/log", parameters=parameters)

    async def changes(self, resource: Resource, **parameters: str) -> AsyncIterator[Event]:
        """All there is as ADDED, then every change, for ever: a lost or expired watch is followed by a new list, whose
        differences come as events."""
        known: dict[str, Object] = {}
        while True:
            listed = await self.list(resource, **parameters)
            present = {item["metadata"]["uid"]: item for item in listed.get("items") or ()}
            for uid in [uid for uid in known if uid not in present]:
                yield Event("DELETED", known.pop(uid))
            for uid, item in present.items():
                yield Event("MODIFIED" if uid in known else "ADDED", item)
            known = present
            version = listed["metadata"]["resourceVersion"]
            async for event in self._watch(resource, version, parameters):
                uid = event.value["metadata"]["uid"]
                if event.type == "DELETED":
                    known.pop(uid, None)
                else:
                    known[uid] = event.value
                yield event

    async def _watch(self, resource: Resource, version: str, parameters: Mapping[str, str]) -> AsyncIterator[Event]:
        """Until the server ends it, it expires, or the connection is lost."""
        asked = {"watch": "true", "resourceVersion": version, "timeoutSeconds": str(WATCH_S), **parameters}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=DEADLINE_S, sock_read=WATCH_S + DEADLINE_S)
        assert self._session is not None
        try:
            url = self.server + path_of(resource)
            async with self._session.get(url, params=asked, timeout=timeout, read_bufsize=2**22) as answer:
                if answer.status != 200:
                    return
                async for line in answer.content:
                    event = json.loads(line)
                    if event["type"] == "ERROR":
                        return
                    if event["type"] != "BOOKMARK":
                        yield Event(event["type"], event["object"])
        except (aiohttp.ClientError, TimeoutError, ValueError):
            return

    async def _json(self, verb: str, path: str, **request: Any) -> Object:
        parsed: Object = json.loads(await self._text(verb, path, **request))
        return parsed

    async def _text(
        self,
        verb: str,
        path: str,
        *,
        body: Mapping[str, Any] | None = None,
        parameters: Mapping[str, str] | None = None,
        content_type: str = "application/json",
    ) -> str:
        assert self._session is not None
        data = None if body is None else json.dumps(body).encode()
        headers = {} if body is None else {"Content-Type": content_type}
        timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
        async with self._session.request(
            verb, self.server + path, data=data, headers=headers, params=dict(parameters or {}), timeout=timeout
        ) as answer:
            text = await answer.text()
            if answer.status >= 400:
                raise Refused(answer.status, _message(text))
            return text


def path_of(resource: Resource, namespace: str = "", name: str = "") -> str:
    root = f"/apis/{resource.group}/{resource.version}" if resource.group else f"/api/{resource.version}"
    inside = f"/namespaces/{namespace}" if namespace and resource.namespaced else ""
    return f"{root}{inside}/{resource.plural}" + (f"/{name}" if name else "")


def _message(text: str) -> str:
    try:
        return str(json.loads(text)["message"])
    except (ValueError, KeyError, TypeError):
        return text[:300]


def _read(kubeconfig: Path) -> tuple[str, str, ssl.SSLContext | None]:
    """Server address, token, TLS. Tokens, client certificates, and no login at all are understood."""
    config = yaml.safe_load(kubeconfig.read_text())
    context = _named(config["contexts"], config["current-context"])["context"]
    cluster = _named(config["clusters"], context["cluster"])["cluster"]
    user = _named(config.get("users") or [], context.get("user", "")).get("user") or {}
    token = str(user.get("token") or "")
    server = str(cluster["server"]).rstrip("/")
    if not server.startswith("https"):
        return server, token, None
    tls = ssl.create_default_context()
    if cluster.get("insecure-skip-tls-verify"):
        tls.check_hostname = False
        tls.verify_mode = ssl.CERT_NONE
    elif authority := _pem(cluster, "certificate-authority", kubeconfig.parent):
        tls.load_verify_locations(cadata=authority)
    certificate, key = (_pem(user, f"client-{what}", kubeconfig.parent) for what in ("certificate", "key"))
    if certificate and key:
        with tempfile.NamedTemporaryFile("w", suffix=".pem") as both:
            both.write(f"{certificate}\n{key}\n")
            both.flush()
            tls.load_cert_chain(both.name)
    return server, token, tls


def _named(entries: list[Object], name: str) -> Object:
    return next((entry for entry in entries if entry["name"] == name), {})


def _pem(section: Object, field: str, folder: Path) -> str:
    if data := section.get(f"{field}-data"):
        return base64.b64decode(data).decode()
    return (folder / section[field]).read_text() if section.get(field) else ""
