"""The double answers as an API server does, by its documentation: conversations from `fixtures/conversations.yaml`.

With ANTIPHON_TEST_KUBECONFIG set they are held with that server as well, unchanged: that holds the double to it.
Each has a namespace of its own.
"""

from __future__ import annotations

import asyncio
import os
import re
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.kube.server import KubeServer
from tests.support.kube.wire import Answer, Wire

FIXTURES = Path(__file__).parent / "fixtures"
CONVERSATIONS: dict[str, list[dict[str, Any]]] = yaml.safe_load((FIXTURES / "conversations.yaml").read_text())
WIDGETS = yaml.safe_load((FIXTURES / "widgets.yaml").read_text())
REAL = os.environ.get("ANTIPHON_TEST_KUBECONFIG", "")
DEADLINE_S = 20


@pytest.fixture(params=["double", "cluster"])
async def wire(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Wire]:
    if request.param == "cluster":
        if not REAL:
            pytest.skip("set ANTIPHON_TEST_KUBECONFIG to hold the same conversations with a real server")
        async with Wire(Path(REAL)) as real:
            await install_widgets(real)
            yield real
        return
    async with KubeServer() as server, Wire(server.write_kubeconfig(tmp_path / "config")) as double:
        await install_widgets(double)
        yield double
    assert server.failures == []


async def install_widgets(wire: Wire) -> None:
    made = await wire.ask("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", WIDGETS)
    assert made.code in (201, 409), made
    await until(wire, "/apis/conformance.antiphon.dev/v1/widgets", lambda answer: answer.code == 200)


async def until(wire: Wire, path: str, holds: Any) -> Answer:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            answer = await wire.ask("GET", path)
            if holds(answer):
                return answer
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("name", CONVERSATIONS)
async def test_conversation(wire: Wire, name: str) -> None:
    namespace = f"conformance-{uuid.uuid4().hex[:8]}"
    assert (await wire.ask("POST", "/api/v1/namespaces", {"metadata": {"name": namespace}})).code == 201
    try:
        await until(wire, f"/api/v1/namespaces/{namespace}/serviceaccounts/default", lambda each: each.code == 200)
        known = {"ns": namespace}
        for step in CONVERSATIONS[name]:
            await hold(wire, step, known)
    finally:
        await wire.ask("DELETE", f"/api/v1/namespaces/{namespace}")


async def hold(wire: Wire, step: dict[str, Any], known: dict[str, str]) -> None:
    asked, expected = filled(step["ask"], known), filled(step, known)
    method, path = asked.split(" ", 1)
    wanted = expected.get("until")
    if wanted == "gone":
        answer = await until(wire, path, lambda each: each.code == 404)
    elif wanted:
        answer = await until(wire, path, lambda each: each.code == 200 and differences(wanted, each.body) == [])
    else:
        answer = await wire.ask(method, path, expected.get("body"), kind=expected.get("type", ""))
    where = f"{asked}\n{answer}"
    assert answer.code == expected["code"], where
    if "reason" in expected:
        assert answer.body["kind"] == "Status", where
        assert answer.body["reason"] == expected["reason"], where
        assert answer.body["code"] == expected["code"], where
    if "message" in expected:
        assert re.search(expected["message"], answer.body["message"]), where
    assert differences(expected.get("has", {}), answer.body) == [], where
    for gone in expected.get("lacks", ()):
        assert at(answer.body, gone) is None, f"{gone} in {where}"
    if "names" in expected:
        assert [item["metadata"]["name"] for item in answer.body["items"]] == expected["names"], where
    for key, kept in expected.get("keep", {}).items():
        value = at(answer.body, kept)
        assert value, f"no {kept} in {where}"
        known[key] = value


def filled(value: Any, known: dict[str, str]) -> Any:
    if isinstance(value, str):
        return re.sub(r"\{(\w+)\}", lambda found: known.get(found[1], found[0]), value)
    if isinstance(value, dict):
        return {key: filled(item, known) for key, item in value.items()}
    if isinstance(value, list):
        return [filled(item, known) for item in value]
    return value


def at(value: Any, path: str) -> Any:
    for step in path.split("."):
        value = value.get(step) if isinstance(value, dict) else None
    return value


def differences(wanted: Any, found: Any, path: str = "") -> list[str]:
    """What `found` lacks of `wanted`: maps may have more, lists not."""
    if isinstance(wanted, dict) and isinstance(found, dict):
        return [each for key in wanted for each in differences(wanted[key], found.get(key), f"{path}.{key}")]
    if isinstance(wanted, list) and isinstance(found, list) and len(wanted) == len(found):
        pairs = enumerate(zip(wanted, found, strict=True))
        return [each for place, (one, other) in pairs for each in differences(one, other, f"{path}[{place}]")]
    return [] if wanted == found else [f"{path}: {found!r} is not {wanted!r}"]
