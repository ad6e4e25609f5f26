"""At rest nothing is written: Models of every sort, among them those that cannot start, and a long silence."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest

from tests.cluster.stage import OPERATOR_USER, device, unique
from tests.cluster.support import SHORT_DEADLINE, Desk
from tests.support.kube.cluster import FakeCluster
from tests.support.kube.kubelets.simulated import Script

QUIET_S = 35.0
"""With --exhaustive. Longer than any pause of an operator between two looks at the same thing, or two writes of the
same number (30 s)."""
SHORT_QUIET_S = 12.0
SETTLES_WITHIN_S = 60.0
A_WHILE_S = 3.0
"""Without a write: settled, so the silence may begin."""
WRITING_VERBS = ("apply", "create", "patch", "update", "delete")

Writes = Callable[[], Awaitable[list[str]]]


@pytest.mark.timeout(400)
async def test_a_settled_cluster_is_written_to_by_nobody_but_the_holder_of_the_lease(
    desk: Desk, pytestconfig: pytest.Config
) -> None:
    writes = _writes_of(desk)
    before = await writes()
    await _all_sorts(desk)
    assert await writes() != before, "or this test could not fail"
    await _nothing_new(writes, A_WHILE_S, SETTLES_WITHIN_S)
    told = await writes()
    until_s = time.monotonic() + (QUIET_S if pytestconfig.getoption("exhaustive") else SHORT_QUIET_S)
    while time.monotonic() < until_s:
        await asyncio.sleep(1.0)  # the silence is what is measured
        now = await writes()
        assert now == told, f"written while nothing happened: {[each for each in now if each not in told] or now}"
    assert (await desk.operator.status())["queue_depth"] == 0


async def _all_sorts(desk: Desk) -> None:
    """One Model of each sort that can be at rest."""
    gpu, missing_gpu, name = device(), device(), unique("taken")
    await desk.cluster.add_node(gpu.rpartition("/")[2], extended={gpu: 8})
    found = {"revision": "0" * 40, "size_bytes": 1, "path": f"/models/some--model-{'0' * 40}"}
    fetched = Script(end_s=0.02, ready_s=None, message=json.dumps(found))
    desk.script(lambda pod, container: fetched if container["name"] == "fetch" else None)
    short = {"progressDeadline": SHORT_DEADLINE}
    await desk.create("failed", decode={"replicas": 2}, rollout=short)
    await desk.until_serving("failed", decode=2)
    await desk.edit("failed", engine={"image": "missing:2"})
    await asyncio.gather(
        desk.create("ten-lines", prefill={}),
        desk.create("sets", prefill={"replicas": 2}, decode={"replicas": 4}, sla={"ttft": {"p95": "1s"}}),
        desk.create("external", decode={"replicas": 2}, autoscaling={"mode": "External"}),
        desk.create("asleep", prefill={"replicas": 0}, decode={"replicas": 0}),
        desk.create("gang", decode={"parallelism": {"tensor": 8}, "gpusPerPod": 2}, accelerator={"resource": gpu}),
        desk.create("waits", accelerator={"resource": missing_gpu}),
        desk.create("hub", source={"uri": "hf://some/model"}, accelerator={"resource": "none"}),
        desk.create("no-claim", source={"uri": "pvc://nowhere/model"}, accelerator={"resource": "none"}),
        desk.create("refused", engine={"name": "vllm"}),
        desk.create("a-winner", names=[name]),
        desk.create("paused", decode={"replicas": 2}),
    )
    await desk.create("b-loser", names=[name])
    await desk.until_serving("paused", decode=2)
    await desk.edit("paused", engine={"image": "worker:2"}, rollout={"paused": True})
    await asyncio.gather(
        desk.until_serving("ten-lines", prefill=1, decode=1),
        desk.until_serving("sets", prefill=2, decode=4),
        desk.until_serving("external", decode=2),
        desk.until("asleep", "Ready", "False", "ScaledToZero"),
        desk.until_serving("gang", decode=1),
        desk.until("waits", "Ready", "False", "InsufficientGpus"),
        desk.until_serving("hub", decode=1),
        desk.until("no-claim", "SourceReady", "False", "ClaimNotFound"),
        desk.until("refused", "Ready", "False", "SpecRefused"),
        desk.until("b-loser", "Ready", "False", "NameConflict"),
        desk.until("paused", "RolloutComplete", "False", "Paused"),
        desk.until("failed", "RolloutComplete", "False", "ImagePull"),
    )
    await desk.scale("external-decode", 3)
    await desk.until_serving("external", decode=3)


def _writes_of(desk: Desk) -> Writes:
    """All that the operator has written so far but the Lease: by the server's own record where there is one, else by
    the operator's count."""
    cluster = desk.cluster
    if isinstance(cluster, FakeCluster):
        seen: list[str] = []
        begun = [cluster.server.requests.total]

        async def recorded() -> list[str]:
            requests = cluster.server.requests
            fresh = requests.mutating(begun[0])
            begun[0] = requests.total
            seen.extend(
                f"{each.verb} {each.resource}/{each.subresource} {each.namespace}/{each.name}"
                for each in fresh
                if each.user == OPERATOR_USER
            )
            return list(seen)

        return recorded

    async def counted() -> list[str]:
        samples = await desk.operator.samples("antiphon_operator_api_requests_total")
        counts: Counter[str] = Counter()
        for labels, value in samples:
            if labels["verb"] in WRITING_VERBS and labels["kind"] != "Lease":
                counts[f"{labels['verb']} {labels['kind']}"] += int(value)
        return [f"{what}: {count}" for what, count in sorted(counts.items())]

    return counted


async def _nothing_new(writes: Writes, for_s: float, within_s: float) -> None:
    ends_at_s = time.monotonic() + within_s
    before, since_s = await writes(), time.monotonic()
    while time.monotonic() - since_s < for_s:
        await asyncio.sleep(0.2)
        now = await writes()
        if now != before:
            before, since_s = now, time.monotonic()
        assert time.monotonic() < ends_at_s, f"not at rest after {within_s} s; the last writes: {now[-20:]}"
