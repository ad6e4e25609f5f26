"""kopf, set up to watch and to do nothing else.

Its handlers are the one that `feed` needs per kind, in a registry of its own: no decorators on globals. There is no
handler that would make kopf put a finalizer or an annotation on anything, and nothing that it could store its progress
in, so it never writes. Broken connections and servers in trouble are kopf's to wait out, for as long as it takes: if
the API server is away for longer than the Lease, the process ends anyway.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import aiohttp
import kopf

from antiphon_operator.kube.access import ClusterAccess
from antiphon_operator.names import GROUP
from antiphon_operator.runtime.feed import Feed
from antiphon_operator.runtime.kinds import Watched

_REQUEST_DEADLINE_S = 30.0
_CONNECT_DEADLINE_S = 5.0
_SILENT_WATCH_S = 70.0
"""API servers send a bookmark every minute."""
_LIST_PAGE = 500
_LAST_EVENTS_S = 0.2


class _Patience:
    """Seconds between tries, without an end."""

    def __iter__(self) -> Iterator[float]:
        yield from (0.2, 0.5, 1, 2, 3, 5)
        while True:
            yield 10


class _NothingStored(kopf.DiffBaseStorage):
    """kopf keeps no last-seen state in the objects, and so spends no time on making it."""

    def build(self, *, body: kopf.Body, extra_fields: Any = None) -> kopf.BodyEssence:
        return kopf.BodyEssence()

    def fetch(self, *, body: kopf.Body) -> kopf.BodyEssence | None:
        return None

    def store(self, *, body: kopf.Body, patch: kopf.Patch, essence: kopf.BodyEssence) -> None:
        raise AssertionError("kopf has no handler that would have it store anything")


def watch_settings(kinds: Sequence[Watched]) -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.scanning.disabled = True
    settings.persistence.finalizer = f"{GROUP}/unused"
    settings.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=GROUP)
    settings.persistence.diffbase_storage = _NothingStored()
    settings.networking.request_timeout = _REQUEST_DEADLINE_S
    settings.networking.connect_timeout = _CONNECT_DEADLINE_S
    settings.networking.error_backoffs = _Patience()
    settings.watching.inactivity_timeout = _SILENT_WATCH_S
    settings.watching.chunk_size = _LIST_PAGE
    settings.queueing.exit_timeout = _LAST_EVENTS_S
    settings.process.ultimate_exiting_timeout = None
    for watched in kinds:
        if watched.labels:
            settings.watching.label_selectors[_selector(watched)] = watched.labels
    return settings


def watch_registry(kinds: Sequence[Watched], feed: Feed, access: ClusterAccess) -> kopf.OperatorRegistry:
    registry = kopf.OperatorRegistry()

    async def login(**_: Any) -> kopf.AiohttpSession:
        return kopf.AiohttpSession(server=access.server, aiohttp_session=_session(access))

    kopf.on.login(registry=registry)(login)
    for watched in kinds:
        _register(registry, watched, feed)
    return registry


async def watch(
    registry: kopf.OperatorRegistry,
    settings: kopf.OperatorSettings,
    namespaces: Sequence[str],
    identity: str,
    spawned: Callable[[], None],
) -> None:
    """Run kopf until cancelled, or until it fails. `spawned`: kopf has just taken the process's signal handlers."""
    existing = asyncio.all_tasks()
    tasks = await kopf.spawn_tasks(
        registry=registry,
        settings=settings,
        # Given, because kopf would look for a passwd entry, which a container's user may not have.
        identity=cast(Any, identity),
        standalone=True,
        clusterwide=not namespaces,
        namespaces=tuple(namespaces),
    )
    spawned()
    await kopf.run_tasks(tasks, ignored=existing)


def _register(registry: kopf.OperatorRegistry, watched: Watched, feed: Feed) -> None:
    kind = watched.kind

    async def happened(type: str | None, body: Mapping[str, Any], **_: Any) -> None:
        feed.happened(kind, type, dict(body))

    group, version, plural = _selector(watched)
    kopf.on.event(group, version, plural, id=f"happened-{plural}", registry=registry)(happened)


def _selector(watched: Watched) -> tuple[str, str, str]:
    group, _, version = watched.resource.api_version.rpartition("/")
    return group, version, watched.resource.plural


def _session(access: ClusterAccess) -> aiohttp.ClientSession:
    """A session that bears the token of the moment. When it is refused, kopf asks for another session."""
    headers = {}
    if access.token is not None:
        access.token.forget()
        headers["Authorization"] = f"Bearer {access.token.value()}"
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ssl=access.tls or False),
        headers=headers,
        proxy=access.proxy_url,
        cookie_jar=aiohttp.DummyCookieJar(),
    )
