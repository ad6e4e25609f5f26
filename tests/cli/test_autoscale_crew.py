"""Places of workers: roles that are told sooner or later, starts that fail, ends that are waited for."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from antiphon.autoscale.crew import FIRST_REST_S, Crew
from antiphon.children import Child, ChildSpec
from antiphon.console import Console
from antiphon.deployment import ProcessPlan, WorkerPlanner
from antiphon.options import ServeOptions
from antiphon_policy.route_records import WorkerRole
from antiphon_proto import worker_pb2 as wire
from antiphon_proto.worker_pb2_grpc import WorkerServicer, add_WorkerServicer_to_server

PREFILL, DECODE = WorkerRole.PREFILL, WorkerRole.DECODE
SLEEPS = "import time; time.sleep(60)"


class Told(WorkerServicer):
    """The control surface of a worker that does as it is told, or says why not."""

    def __init__(self) -> None:
        self.roles: list[int] = []
        self.refuses = ""

    async def SetRole(self, request: Any, context: Any) -> wire.SetRoleReply:  # noqa: N802
        if self.refuses:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, self.refuses)
        self.roles.append(request.role)
        return wire.SetRoleReply(role=request.role, role_version=2)


class Lines(Console):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)


class Scene:
    """A crew, whose workers are what `program` says; `now`: its clock."""

    def __init__(self, folder: Path) -> None:
        self.now = 0.0
        self.program = SLEEPS
        self.console = Lines()
        self.stage: list[Child] = []
        planner = WorkerPlanner(ServeOptions(), {}, "", folder, 1, {})
        self.crew = Crew(planner, self._spec, self.stage, self.console, end_s=5.0, clock=lambda: self.now)

    def _spec(self, plan: ProcessPlan) -> ChildSpec:
        async def is_ready() -> bool:
            return self.program == SLEEPS

        command = (sys.executable, "-S", "-c", self.program)
        return ChildSpec(plan.name, command, {"ROLE": plan.role}, is_ready=is_ready)

    async def until(self, said: str) -> None:
        async with asyncio.timeout(10):
            while not any(said in line for line in self.console.lines):  # noqa: ASYNC110 - a console has no events
                await asyncio.sleep(0.01)


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    made = Scene(tmp_path)
    try:
        yield made
    finally:
        await made.crew.close()
        for child in list(made.stage):
            child.kill()
        await made.crew.ended()


@pytest.fixture
async def told(tmp_path: Path) -> AsyncIterator[tuple[Told, str]]:
    """A worker's control surface, and where it is."""
    servicer, server = Told(), grpc.aio.server()
    add_WorkerServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield servicer, f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def test_a_role_that_cannot_be_told_yet_is_told_later_and_a_new_process_has_it_anyway(
    scene: Scene, told: tuple[Told, str]
) -> None:
    servicer, address = told
    place = scene.crew.start(DECODE)
    await place.child.ready.wait()
    await scene.crew.switch(place, PREFILL)  # it has no ready file
    assert "cannot be told yet" in scene.console.lines[-1]
    assert (scene.crew.of(PREFILL), scene.crew.of(DECODE)) == ([place], [])
    assert place.child.spec.environment["ROLE"] == "prefill"
    place.plan.ready_file.write_text(json.dumps({"address": address}))
    await scene.crew.tell_all()
    await scene.crew.tell_all()
    assert servicer.roles == [wire.Role.ROLE_PREFILL]


async def test_a_worker_that_refuses_keeps_its_role_and_is_not_asked_again(
    scene: Scene, told: tuple[Told, str]
) -> None:
    servicer, address = told
    servicer.refuses = "it has 2 ranks"
    place = scene.crew.start(DECODE)
    await place.child.ready.wait()
    place.plan.ready_file.write_text(json.dumps({"address": address}))
    await scene.crew.switch(place, PREFILL)
    assert scene.console.lines[-1] == "decode-0 keeps its role: it has 2 ranks"
    assert place.role is DECODE
    assert place.keeps_role
    assert place.child.spec.environment["ROLE"] == "decode"
    assert place.name == "decode-0"


async def test_names_are_not_given_twice_and_who_leaves_counts_no_more(scene: Scene) -> None:
    first, second = scene.crew.start(PREFILL), scene.crew.start(PREFILL)
    assert [first.name, second.name] == ["prefill-0", "prefill-1"]
    await first.child.ready.wait()
    scene.crew.retire(first)
    assert scene.crew.of(PREFILL) == [second]
    assert scene.crew.leaving(PREFILL) == 1
    assert scene.crew.start(PREFILL).name == "prefill-2"  # the first one still has its name
    async with asyncio.timeout(10):
        while scene.crew.leaving(PREFILL):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert first.child not in scene.stage
    assert [role for role, _ in scene.crew.take_times().drained] == [PREFILL]
    assert not scene.crew.take_times().drained


async def test_a_worker_that_cannot_be_started_is_given_up_and_none_is_started_for_a_while(scene: Scene) -> None:
    scene.program = "import sys; print('no room'); sys.exit(2)"
    scene.crew.start(DECODE)
    await scene.until("no worker is added for 30 s")
    assert "decode-0 cannot be started, it ended with exit code 2: no room" in scene.console.lines[-1]
    assert not scene.crew.places
    assert not scene.stage
    assert scene.crew.resting
    scene.now += FIRST_REST_S
    assert not scene.crew.resting
    scene.crew.start(DECODE)
    await scene.until("no worker is added for 60 s")
