"""Fetches what the planner wants to see beside the caches, off the work queue, and wakes the Model when it changed.

Warning events, last lines of logs, workers' pages and gateways' pages each cost a request. The planner names what it
wants (`Wants`); as long as it does, one task per Model asks again and again, each source at its own pace and each
request with a deadline. What came last stays shown while the next is under way; what is no longer wanted is dropped.
A source that does not answer leaves the last answer, with its time, as it is: it is for the planner to say how old an
answer may be.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Protocol

from antiphon_operator.kube.errors import KubeError
from antiphon_operator.plan.observed import GatewayViews, Object, WorkerView
from antiphon_operator.plan.planned import Wants
from antiphon_operator.runtime.objects import uid_of

log = logging.getLogger("antiphon.operator.wants")

DEADLINE_S = 5.0
_NO_TIME = datetime.min.replace(tzinfo=UTC)


class Sources(Protocol):
    """Where answers come from. Each may raise KubeError, OSError, TimeoutError or ValueError, which are logged once."""

    async def warning_events(self, namespace: str, uid: str) -> tuple[Object, ...]: ...

    async def crash_line(self, pod: Object) -> str: ...

    async def worker(self, pod: Object) -> WorkerView | None: ...

    async def gateways(self, key: str) -> GatewayViews | None: ...


@dataclass(frozen=True, slots=True)
class Paces:
    """Seconds between two requests for the same thing."""

    events_s: float = 5.0
    logs_s: float = 15.0
    workers_s: float = 1.0
    gateways_s: float = 2.0


@dataclass(frozen=True, slots=True)
class Shown:
    """The newest answers, for `Observed`."""

    events: Mapping[str, tuple[Object, ...]] = field(default_factory=dict)
    log_lines: Mapping[str, str] = field(default_factory=dict)
    workers: Mapping[str, WorkerView] = field(default_factory=dict)
    gateways: GatewayViews | None = None


_Item = tuple[str, str]
"""(kind of source, subject): `("worker", pod name)`, `("gateways", "")`, ..."""


@dataclass(slots=True)
class _Desk:
    """What one Model's task works from."""

    wants: Wants
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    answers: dict[_Item, Any] = field(default_factory=dict)
    due_at: dict[_Item, float] = field(default_factory=dict)
    silent: set[_Item] = field(default_factory=set)
    """Whose last answer was an error that has been logged."""
    task: asyncio.Task[None] | None = None


class Looks:
    """See the module's docstring. Owns one task per Model that wants something; `close` ends them."""

    def __init__(
        self,
        sources: Sources,
        pods: Callable[[str], Mapping[str, Object]],
        wake: Callable[[str], None],
        *,
        paces: Paces = Paces(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`pods`: the pods of a Model (by its key), by name, as they are known now."""
        self._sources = sources
        self._pods = pods
        self._wake = wake
        self._pace = {
            "events": paces.events_s,
            "log": paces.logs_s,
            "worker": paces.workers_s,
            "gateways": paces.gateways_s,
        }
        self._clock = clock
        self._desks: dict[str, _Desk] = {}

    def want(self, key: str, wants: Wants) -> None:
        """From now on, this is wanted for the Model."""
        desk = self._desks.get(key)
        if desk is not None and desk.wants == wants:
            return
        if not _items(wants):
            self.forget(key)
            return
        if desk is None:
            desk = self._desks[key] = _Desk(wants)
            desk.task = asyncio.create_task(self._serve(key, desk), name=f"wants of {key}")
        desk.wants = wants
        for item in desk.answers.keys() - _items(wants):
            del desk.answers[item]
        for item in desk.due_at.keys() - _items(wants):
            del desk.due_at[item]
        desk.silent &= _items(wants)
        desk.changed.set()

    def shown(self, key: str) -> Shown:
        desk = self._desks.get(key)
        if desk is None:
            return Shown()
        uids = {name: uid_of(pod) for name, pod in self._pods(key).items()}
        events: dict[str, tuple[Object, ...]] = {}
        log_lines: dict[str, str] = {}
        workers: dict[str, WorkerView] = {}
        for (kind, subject), answer in desk.answers.items():
            if kind == "events":
                events[subject] = answer
            elif kind == "log" and subject in uids:
                log_lines[uids[subject]] = answer
            elif kind == "worker":
                workers[subject] = answer
        return Shown(events, log_lines, workers, desk.answers.get(("gateways", "")))

    def forget(self, key: str) -> None:
        desk = self._desks.pop(key, None)
        if desk is not None and desk.task is not None:
            desk.task.cancel()

    async def close(self) -> None:
        tasks = [desk.task for desk in self._desks.values() if desk.task is not None]
        self._desks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, key: str, desk: _Desk) -> None:
        while True:
            desk.changed.clear()
            now = self._clock()
            due = [item for item in sorted(_items(desk.wants)) if desk.due_at.get(item, now) <= now]
            news = await asyncio.gather(*(self._refresh(key, desk, item) for item in due))
            if any(news):
                self._wake(key)
            now = self._clock()
            next_s = min((desk.due_at.get(item, now) for item in _items(desk.wants)), default=now + 1.0) - now
            try:
                async with asyncio.timeout(max(next_s, 0.01)):
                    await desk.changed.wait()
            except TimeoutError:
                pass

    async def _refresh(self, key: str, desk: _Desk, item: _Item) -> bool:
        """Ask for one thing. True if its answer is another than before."""
        before = desk.answers.get(item)
        try:
            async with asyncio.timeout(DEADLINE_S):
                answer = await self._ask(key, item)
            desk.silent.discard(item)
        except (KubeError, OSError, TimeoutError, ValueError) as error:
            # The planner goes on with what it has.
            level = logging.DEBUG if item in desk.silent else logging.WARNING
            log.log(level, "%s: cannot get %s: %s", key, " ".join(item), error or "no answer in time")
            desk.silent.add(item)
            answer = None
        except Exception:
            log.exception("%s: this should not have happened while getting %s", key, " ".join(item))
            answer = None
        if item not in _items(desk.wants):
            return False
        desk.due_at[item] = self._clock() + self._pace[item[0]]
        if answer is None:
            return False
        desk.answers[item] = answer
        return before is None or _timeless(answer) != _timeless(before)

    def _ask(self, key: str, item: _Item) -> Awaitable[Any]:
        kind, subject = item
        if kind == "gateways":
            return self._sources.gateways(key)
        if kind == "events":
            return self._sources.warning_events(key.partition("/")[0], subject)
        pod = self._pods(key).get(subject)
        if pod is None:
            return _nothing()
        return self._sources.crash_line(pod) if kind == "log" else self._sources.worker(pod)


async def _nothing() -> None:
    """The pod is gone."""


def _items(wants: Wants) -> frozenset[_Item]:
    return frozenset(
        [("events", uid) for uid in wants.events_of]
        + [("log", name) for name in wants.log_of]
        + [("worker", name) for name in wants.workers]
        + ([("gateways", "")] if wants.gateways else [])
    )


def _timeless(answer: Any) -> Any:
    """What an answer says, without when it was given."""
    if isinstance(answer, WorkerView | GatewayViews):
        return dataclasses.replace(answer, asked_at=_NO_TIME)
    return answer
