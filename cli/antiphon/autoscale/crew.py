"""The workers of a machine: who there should be, in which role, and what becomes of them.

A *place* is one worker that is wanted: it has a name, a role, and a process that is kept running in it. A process that
dies comes back in its place, with the role that the place has by then. A place that is given up drains and ends in its
own time; it counts no more from the moment that this was asked.

Owned by the supervisor, and touched by its event loop alone. What may fail: a new worker that cannot be started. That
ends neither the house nor the loop: the place is given up, and no other is made for a while (`resting`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from antiphon_policy.route_records import WorkerRole

from antiphon.autoscale.control import RoleRefused, WorkerUnreachable, set_role
from antiphon.children import Child, ChildSpec, StartFailed
from antiphon.console import Console
from antiphon.deployment import ProcessPlan, WorkerPlanner, free_name

FIRST_REST_S = 30.0
"""After a worker that could not be started no other is, for so long; twice as long after each further one."""
LONGEST_REST_S = 960.0


class _Ready(msgspec.Struct, frozen=True):
    """What of a worker's ready file is read here."""

    address: str


@dataclass(slots=True, eq=False)
class Place:
    """See the module."""

    name: str
    role: WorkerRole
    plan: ProcessPlan
    child: Child
    born: int
    """A later one has a larger number."""
    asked_at: float
    """Monotonic."""
    leaving: bool = False
    told: bool = True
    """Its process has the place's role, or will have it when it starts."""
    keeps_role: bool = False
    """It was asked to change, and said that it never will."""
    measuring: asyncio.Task[None] | None = None
    """Waits for its first being ready."""

    @property
    def ready(self) -> bool:
        return self.child.ready.is_set() and not self.leaving


@dataclass(slots=True)
class Times:
    """What was measured since it was last asked for, in milliseconds."""

    started: list[tuple[WorkerRole, float]] = field(default_factory=list)
    drained: list[tuple[WorkerRole, float]] = field(default_factory=list)


class Crew:
    """See the module."""

    def __init__(
        self,
        planner: WorkerPlanner,
        spec_of: Callable[[ProcessPlan], ChildSpec],
        stage: list[Child],
        console: Console,
        *,
        end_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`stage`: where the supervisor finds what it has to end, in its order; kept true. `end_s`: what a worker that
        is told to end gets before it is killed."""
        self._planner = planner
        self._spec_of = spec_of
        self._stage = stage
        self._console = console
        self._end_s = end_s
        self._clock = clock
        self._places: list[Place] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._keepers: set[asyncio.Task[None]] = set()
        self._born = 0
        self._failures = 0
        self._rests_until = float("-inf")
        self.times = Times()

    # -- who there is

    @property
    def places(self) -> Sequence[Place]:
        """Those that leave too."""
        return tuple(self._places)

    def of(self, role: WorkerRole) -> list[Place]:
        """That are wanted in this role."""
        return [place for place in self._places if place.role is role and not place.leaving]

    def leaving(self, role: WorkerRole) -> int:
        return sum(1 for place in self._places if place.role is role and place.leaving)

    @property
    def resting(self) -> bool:
        """No worker is started now, as the last one could not be."""
        return self._clock() < self._rests_until

    def take_times(self) -> Times:
        times, self.times = self.times, Times()
        return times

    # -- what is done

    def adopt(self, plan: ProcessPlan, child: Child, asked_at: float) -> None:
        """A worker of the supervisor's start, which keeps it itself."""
        place = self._place(plan, child, WorkerRole(plan.role), asked_at)
        place.measuring = self._own(self._measured(place), f"{plan.name} starting")

    def start(self, role: WorkerRole) -> Place:
        """A new place, with a process that is kept running in it."""
        name = free_name(role.value, [place.name for place in self._places])
        plan = self._planner.plan(name, role.value)
        child = Child(self._spec_of(plan), self._console)
        place = self._place(plan, child, role, self._clock())
        self._stage.append(child)
        keeper = asyncio.get_running_loop().create_task(self._kept(place), name=name)
        self._keepers.add(keeper)
        keeper.add_done_callback(self._keepers.discard)
        place.measuring = self._own(self._measured(place), f"{name} starting")
        return place

    def retire(self, place: Place) -> None:
        """Drain its worker and end it."""
        if not place.leaving:
            place.leaving = True
            self._own(self._retired(place), f"{place.name} leaving")

    async def switch(self, place: Place, role: WorkerRole) -> None:
        """The place has another role from now on; its worker is told at once, or as soon as it can be."""
        before = place.role
        self._set(place, role)
        try:
            await self._tell(place)
        except RoleRefused as refused:
            place.keeps_role = True
            self._set(place, before)
            self._console.say(f"{place.name} keeps its role: {refused}")

    async def tell_all(self) -> None:
        """Those that could not be told their role when it changed."""
        for place in list(self._places):
            if not place.told and place.ready:
                try:
                    await self._tell(place)
                except RoleRefused as refused:
                    # It came back in the meantime, or drains: what it is started with is the place's role anyway.
                    self._console.say(f"{place.name}: {refused}")
                    place.told = True

    async def close(self) -> None:
        """Nothing is measured or waited for any more. The supervisor ends the processes, by its stage."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def ended(self) -> None:
        """Once the processes have been ended: nothing of them is left here."""
        await asyncio.gather(*self._keepers, return_exceptions=True)

    # -- inside

    def _place(self, plan: ProcessPlan, child: Child, role: WorkerRole, asked_at: float) -> Place:
        self._born += 1
        place = Place(plan.name, role, plan, child, self._born, asked_at)
        self._places.append(place)
        return place

    def _set(self, place: Place, role: WorkerRole) -> None:
        """Before the worker is told: one that dies in between comes back with it."""
        place.role = role
        place.told = False
        place.plan = self._planner.plan(place.name, role.value)
        place.child.spec = self._spec_of(place.plan)

    async def _tell(self, place: Place) -> None:
        """Raises RoleRefused. One that does not answer is asked again later: to ask twice changes nothing."""
        try:
            raw = await asyncio.to_thread(place.plan.ready_file.read_bytes)
            await set_role(msgspec.json.decode(raw, type=_Ready).address, place.role)
            place.told = True
        except (OSError, msgspec.MsgspecError, WorkerUnreachable) as error:
            self._console.say(f"{place.name} is to be a {place.role.value} worker and cannot be told yet: {error}")

    def _own(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _kept(self, place: Place) -> None:
        try:
            await place.child.keep()
        except StartFailed as failed:
            self._failures += 1
            rest_s = min(LONGEST_REST_S, FIRST_REST_S * 2.0 ** (self._failures - 1))
            self._rests_until = self._clock() + rest_s
            self._console.say(f"{failed}; it is given up, and no worker is added for {rest_s:.0f} s")
            self._forget(place)

    async def _measured(self, place: Place) -> None:
        role = place.role
        await place.child.ready.wait()
        self._failures = 0
        self.times.started.append((role, (self._clock() - place.asked_at) * 1e3))

    async def _retired(self, place: Place) -> None:
        asked_at, was_ready = self._clock(), place.child.ready.is_set()
        await place.child.stop(self._end_s)
        if was_ready:
            self.times.drained.append((place.role, (self._clock() - asked_at) * 1e3))
        self._forget(place)

    def _forget(self, place: Place) -> None:
        if place.measuring is not None:
            place.measuring.cancel()
        if place in self._places:
            self._places.remove(place)
        if place.child in self._stage:
            self._stage.remove(place.child)
