"""A Model from `kubectl apply` to its last answer, with real processes for pods and the real demo model.

The double of the API server runs each pod of the operator's StatefulSets as a local process with an address of its
own; gateway and Valkey are the chart's. Clients stream all the while, and no request may fail.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml
from redis.asyncio import Redis

from tests.cluster.history import MODELS, POOLS, condition
from tests.support import chart
from tests.support.clients import Clients
from tests.support.kube.resources import CONTROLLER_REVISIONS, JOBS, NETWORK_POLICIES, PODS, SERVICES, STATEFULSETS
from tests.support.served_cluster import NEXT_WORKER_IMAGE, ServedCluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NAMESPACE = "chat"
SAMPLE = chart.ROOT / "deploy" / "samples" / "demo.yaml"
DEADLINE_S = 180.0


@dataclass
class Truth:
    """What the Model said of itself, each second."""

    ready: list[tuple[float, bool]] = field(default_factory=list)

    def said_ready_within(self, before: float, after: float) -> bool:
        """Whether every sample between these times said Ready."""
        said = [ready for at, ready in self.ready if before <= at <= after]
        return bool(said) and all(said)


@asynccontextmanager
async def sampled(served: ServedCluster) -> AsyncIterator[Truth]:
    truth = Truth()

    async def sample() -> None:
        while True:
            model = await served.cluster.get(MODELS, NAMESPACE, "demo")
            if model is not None:
                found = condition(model, "Ready")
                truth.ready.append((time.monotonic(), bool(found) and found["status"] == "True"))
            await asyncio.sleep(1.0)

    task = asyncio.create_task(sample())
    try:
        yield truth
    finally:
        task.cancel()
        await asyncio.wait({task})


async def until(served: ServedCluster, what: str, true: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    async def found() -> dict[str, Any] | None:
        model = await served.cluster.get(MODELS, NAMESPACE, "demo")
        assert served.operator.is_running, served.operator.last_lines()
        return model if model is not None and true(model) else None

    try:
        model = await served.cluster.eventually(found, DEADLINE_S, what=what)
    except AssertionError as error:
        last = await served.cluster.get(MODELS, NAMESPACE, "demo")
        told = yaml.safe_dump((last or {}).get("status"))
        raise AssertionError(f"{error}\n{told}\n{served.operator.last_lines()}") from error
    assert model is not None
    return model


def is_true(name: str) -> Callable[[dict[str, Any]], bool]:
    def check(model: dict[str, Any]) -> bool:
        found = condition(model, name)
        return (
            bool(found)
            and found["status"] == "True"
            and model["status"].get("observedGeneration") == model["metadata"]["generation"]
        )

    return check


def both(*checks: Callable[[dict[str, Any]], bool]) -> Callable[[dict[str, Any]], bool]:
    return lambda model: all(check(model) for check in checks)


async def worker_pods(served: ServedCluster) -> dict[str, dict[str, Any]]:
    """By uid."""
    pods = await served.cluster.pods(NAMESPACE, "antiphon.dev/model=demo")
    return {pod["metadata"]["uid"]: pod for pod in pods}


async def edit(served: ServedCluster, **spec: Any) -> None:
    await served.cluster.client.merge_patch(MODELS, NAMESPACE, "demo", {"spec": spec})


async def test_a_model_is_applied_asked_edited_rolled_scaled_and_deleted(tmp_path: Path) -> None:
    processes_before = set(psutil.Process().children(recursive=True))
    async with ServedCluster(tmp_path) as served, httpx.AsyncClient(timeout=60, trust_env=False) as http:
        cluster = served.cluster
        await cluster.namespace(NAMESPACE)

        # A name that nobody has: 404.
        unknown = await http.post(f"{served.url}/v1/chat/completions", json=question("demo"))
        assert unknown.status_code == 404, unknown.text

        manifest = yaml.safe_load(SAMPLE.read_text())
        manifest["metadata"]["namespace"] = NAMESPACE
        # Twelve lines instead of ten: the machine that tests run on has few cores.
        manifest["spec"]["engine"] = {"args": ["--threads=1", "--kv-memory-gb=0.2"]}
        await cluster.create(MODELS, manifest)

        async with sampled(served) as truth:
            model = await until(served, "the Model is ready", is_true("Ready"))
            assert model["status"]["endpoint"]
            assert model["status"]["pools"]["prefill"]["ready"] == 1
            assert model["status"]["pools"]["decode"]["ready"] == 1
            answer = await http.post(f"{served.url}/v1/chat/completions", json=question("demo"))
            assert answer.status_code == 200, answer.text
            assert answer.json()["model"] == "demo"
            assert answer.json()["choices"][0]["message"]["content"]
            listed = (await http.get(f"{served.url}/v1/models")).json()["data"]
            assert [one["id"] for one in listed] == ["demo"]

            async with Clients(served.url, "demo", count=2) as clients:
                await clients.until_answered(4)

                # A promise is edited: no pod changes.
                pods = await worker_pods(served)
                await edit(served, sla={"ttft": {"p95": "750ms"}})
                await until(served, "the edit is seen", is_true("Ready"))
                assert set(await worker_pods(served)) == set(pods)

                # Another image: both pools are replaced, in a pair.
                await edit(served, engine={"image": NEXT_WORKER_IMAGE})
                await until(served, "rolled out", both(is_true("RolloutComplete"), is_true("Ready")))

                async def only_new() -> bool:
                    found = await worker_pods(served)
                    images = {pod["spec"]["containers"][0]["image"] for pod in found.values()}
                    return len(found) == 2 and images == {NEXT_WORKER_IMAGE}

                await cluster.eventually(only_new, DEADLINE_S, what="only pods of the new image are left")
                assert not set(await worker_pods(served)) & set(pods)
                await clients.until_answered(4)

                # Scaled up and down again.
                rolled = await worker_pods(served)
                await edit(served, decode={"replicas": 2})
                await until(
                    served, "two decode workers", lambda model: model["status"]["pools"]["decode"]["ready"] == 2
                )
                assert set(rolled) <= set(await worker_pods(served))
                await clients.until_answered(4)
                await edit(served, decode={"replicas": 1})
                await cluster.eventually(counted(served, 2), DEADLINE_S, what="one decode worker is left")
                await clients.until_answered(4)
                revisions = [
                    one
                    for one in await cluster.list(CONTROLLER_REVISIONS, NAMESPACE, "antiphon.dev/model=demo")
                    if one["metadata"]["ownerReferences"][0]["kind"] == "Model"
                ]
                assert len(revisions) == 2, "scaling or the promise made a revision"

                # Deleted while answers are under way: they end well.
                clients.stop_asking()
                await cluster.delete(MODELS, NAMESPACE, "demo")
                await clients.finish()
                assert clients.failures == []
                assert clients.answered >= 16
            assert_told_the_truth(truth)

        await cluster.eventually(nothing_of(served), DEADLINE_S, what="nothing of the Model is left")
        gone = await http.post(f"{served.url}/v1/chat/completions", json=question("demo"))
        assert gone.status_code in (404, 503), gone.text
        async with Redis.from_url(served.redis_url) as redis:

            async def none_is_left() -> bool:
                keys = [key async for key in redis.scan_iter("antiphon:*demo*")]
                return all(key.endswith((b":model", b":events")) for key in keys)

            await cluster.eventually(none_is_left, DEADLINE_S, what="nothing of the Model is left in Redis")
    left = set(psutil.Process().children(recursive=True)) - processes_before
    assert {process for process in left if process.is_running() and process.status() != psutil.STATUS_ZOMBIE} == set()


def question(model: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Why is the sky blue?"}]
    return {"model": model, "messages": messages, "max_tokens": 16, "temperature": 0}


def counted(served: ServedCluster, number: int) -> Callable[[], Awaitable[bool]]:
    async def check() -> bool:
        return len(await worker_pods(served)) == number

    return check


def nothing_of(served: ServedCluster) -> Callable[[], Awaitable[bool]]:
    kinds = (POOLS, CONTROLLER_REVISIONS, STATEFULSETS, PODS, SERVICES, NETWORK_POLICIES, JOBS)

    async def check() -> bool:
        return not [one for kind in kinds for one in await served.cluster.list(kind, NAMESPACE)]

    return check


def assert_told_the_truth(truth: Truth) -> None:
    """Once Ready, and with no request failing, it never said otherwise for longer than a moment."""
    first = next(index for index, (_, ready) in enumerate(truth.ready) if ready)
    not_ready = [at for at, ready in truth.ready[first:] if not ready]
    assert not not_ready, f"{len(not_ready)} of {len(truth.ready) - first} samples said that it is not ready"
