"""The real kopf, as it is, runs its operators against the double: handlers, statuses, finalizers, faults in between."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.eventually import eventually
from tests.support.kube.api import ApiError
from tests.support.kube.fault_proxy import FaultProxy
from tests.support.kube.faults import Fault, Match
from tests.support.kube.resources import CRDS, Resource
from tests.support.kube.server import KubeServer

WIDGETS = Resource("conformance.antiphon.dev", "v1", "widgets", "Widget", True)
WIDGETS_CRD = yaml.safe_load((Path(__file__).parent / "fixtures" / "widgets.yaml").read_text())
DEADLINE_S = 30

OPERATOR = """
    import kopf

    @kopf.on.startup()
    def configure(settings, **_):
        settings.networking.error_backoffs = [0.1, 0.2, 0.5, 1]
        settings.watching.reconnect_backoff = 0.05
        settings.persistence.finalizer = "conformance.antiphon.dev/finalizer"
        settings.posting.enabled = False

    @kopf.on.create("widgets.conformance.antiphon.dev")
    async def created(spec, patch, **_):
        patch.status["replicas"] = spec["replicas"]

    @kopf.on.event("widgets.conformance.antiphon.dev")
    async def seen(event, name, **_):
        print("event", event["type"], name, flush=True)

    @kopf.on.delete("widgets.conformance.antiphon.dev")
    async def deleted(name, **_):
        print("deleted", name, flush=True)
"""


@pytest.fixture
async def server() -> AsyncIterator[KubeServer]:
    async with KubeServer() as running:
        running.api.create(CRDS, None, WIDGETS_CRD)
        yield running
    assert running.failures == []


@asynccontextmanager
async def kopf_operator(folder: Path, kubeconfig: Path) -> AsyncIterator[list[str]]:
    """The lines that the operator prints."""
    script = folder / "operator_of_the_test.py"
    script.write_text(textwrap.dedent(OPERATOR))
    command = [sys.executable, "-m", "kopf", "run", "--standalone", "-n", "default", "--quiet", str(script)]
    environment = {"KUBECONFIG": str(kubeconfig), "PATH": "/usr/bin:/bin", "USER": "test", "HOME": str(folder)}
    process = await asyncio.create_subprocess_exec(
        *command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    lines: list[str] = []

    async def read() -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            lines.append(line.decode().strip())

    reader = asyncio.create_task(read())
    try:
        yield lines
    finally:
        process.terminate()
        async with asyncio.timeout(DEADLINE_S):
            await process.wait()
        await reader


async def until(holds: Callable[[], bool], lines: list[str]) -> None:
    try:
        await eventually(holds)
    except TimeoutError:
        raise AssertionError("\n".join(lines)) from None


def widget(server: KubeServer, name: str) -> dict[str, Any]:
    return server.api.create(WIDGETS, "default", {"metadata": {"name": name}, "spec": {"size": "small"}})


def is_handled(server: KubeServer, name: str) -> bool:
    return "replicas" in server.api.get(WIDGETS, "default", name).get("status", {})


async def test_kopf_creates_watches_and_deletes(server: KubeServer, tmp_path: Path) -> None:
    widget(server, "early")
    async with kopf_operator(tmp_path, server.write_kubeconfig(tmp_path / "config", user="kopf")) as lines:
        await until(lambda: is_handled(server, "early"), lines)
        widget(server, "late")
        await until(lambda: is_handled(server, "late") and "event ADDED late" in lines, lines)
        assert server.api.get(WIDGETS, "default", "late")["metadata"]["finalizers"]
        server.api.delete(WIDGETS, "default", "late")
        await until(lambda: "deleted late" in lines and not is_there(server, "late"), lines)
    assert {each.user for each in server.requests.recent} == {"kopf"}
    assert server.requests.mutating()


async def test_kopf_comes_back_when_its_watches_are_dropped(server: KubeServer, tmp_path: Path) -> None:
    async with FaultProxy(server.url) as proxy:
        kubeconfig = server.write_kubeconfig(tmp_path / "config", url=proxy.url)
        async with kopf_operator(tmp_path, kubeconfig) as lines:
            widget(server, "before")
            await until(lambda: is_handled(server, "before"), lines)
            proxy.faults.script(Fault(status=410), when=Match(verb="watch", resource="widgets"))
            proxy.faults.script(Fault(status=500), when=Match(verb="patch"), times=2)
            assert proxy.drop_watches() > 0
            widget(server, "after")
            await until(lambda: is_handled(server, "after"), lines)
            assert proxy.faults.unused == 0
            assert proxy.counts["410"] == 1


def is_there(server: KubeServer, name: str) -> bool:
    try:
        server.api.peek(WIDGETS, "default", name)
    except ApiError:
        return False
    return True
