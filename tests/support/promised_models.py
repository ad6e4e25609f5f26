"""Models with a promise in a cluster of real processes (`served_cluster`), and what tests of scaling ask of them.

Workers are of the timed engine: what they do takes as long as it says, and how many are needed can be counted on one's
fingers. A worker that computes prompts takes half a second for each.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from antiphon_operator import names
from antiphon_operator.names import Role

from tests.cluster.history import MODELS, POOLS, History, condition
from tests.support.kube.resources import EVENTS, PODS, STATEFULSETS
from tests.support.served_cluster import NAMESPACE as SYSTEM
from tests.support.served_cluster import ServedCluster
from tests.support.steady_load import SteadyLoad

NAMESPACE = "promises"
DEADLINE_S = 120.0
TTFT_MS = 2000.0
SLA = {"ttft": {"p95": f"{TTFT_MS:.0f}ms"}, "tpot": {"p95": "500ms"}}
PROMPT_TOKENS = 320
ENGINE = {"name": "timed", "args": ["--timed-base-ms=5", "--timed-per-new-token-ms=1.5", "--kv-blocks=512"]}
"""Half a second for a prompt."""
PER_S = 2.5
MOST = 3


class PromisedModels:
    """The cluster with its history."""

    def __init__(self, served: ServedCluster, history: History) -> None:
        self.served, self.history, self.cluster = served, history, served.cluster

    async def create(self, name: str, **spec: Any) -> dict[str, Any]:
        body = {
            "apiVersion": names.API_VERSION,
            "kind": "Model",
            "metadata": {"name": name, "namespace": NAMESPACE},
            "spec": {"source": {"uri": "demo"}, "engine": ENGINE, "decode": {}, "sla": SLA, **spec},
        }
        return await self.cluster.create(MODELS, body)

    async def edit(self, name: str, **spec: Any) -> None:
        await self.cluster.client.merge_patch(MODELS, NAMESPACE, name, {"spec": spec})

    async def model(self, name: str) -> dict[str, Any]:
        found = await self.cluster.get(MODELS, NAMESPACE, name)
        assert found is not None
        return found

    async def until(
        self, name: str, what: str, holds: Callable[[dict[str, Any]], object], deadline_s: float = DEADLINE_S
    ) -> dict[str, Any]:
        async def look() -> dict[str, Any] | None:
            model = await self.model(name)
            return model if holds(model) else None

        try:
            found: dict[str, Any] | None = await self.cluster.eventually(look, deadline_s, what=what)
        except AssertionError as error:
            told = json.dumps((await self.model(name)).get("status"), indent=1)
            raise AssertionError(f"{error}\n{told}\n{self.served.operator.last_lines()}") from error
        assert found is not None
        return found

    async def until_serving(self, name: str, deadline_s: float = DEADLINE_S, **pools: int) -> dict[str, Any]:
        """Ready, with exactly so many replicas, and none of it on its way out."""

        def holds(model: dict[str, Any]) -> bool:
            told = (model.get("status") or {}).get("pools") or {}
            found = {role: told.get(role, {}) for role in pools}
            numbers = {role: (one.get("desired"), one.get("ready"), one.get("draining")) for role, one in found.items()}
            return is_so(model, "Ready") and numbers == {role: (count, count, 0) for role, count in pools.items()}

        return await self.until(name, f"{name} serves with {pools}", holds, deadline_s)

    async def wanted(self, name: str, role: Role) -> int:
        pool = await self.cluster.get(POOLS, NAMESPACE, names.pool_name(name, role))
        assert pool is not None
        return int(pool["spec"]["replicas"])

    async def replica_sets(self, name: str) -> list[dict[str, Any]]:
        return await self.cluster.list(STATEFULSETS, NAMESPACE, f"{names.MODEL_LABEL}={name}")

    async def pods(self, name: str) -> set[str]:
        """Their uids."""
        found = await self.cluster.list(PODS, NAMESPACE, f"{names.MODEL_LABEL}={name}")
        return {pod["metadata"]["uid"] for pod in found}

    async def eventually(self, what: str, true: Callable[[], Awaitable[object]]) -> None:
        await self.cluster.eventually(true, DEADLINE_S, what=what)

    async def until_event(self, name: str, reason: str) -> dict[str, Any]:
        async def look() -> dict[str, Any] | None:
            told = await self.cluster.list(EVENTS, NAMESPACE)
            return next(
                (one for one in told if one["involvedObject"]["name"] == name and one["reason"] == reason), None
            )

        found: dict[str, Any] | None = await self.cluster.eventually(
            look, DEADLINE_S, what=f"an Event {reason} about {name}"
        )
        assert found is not None
        return found

    async def kill(self, labels: str) -> None:
        """kill -9 of what runs in the one pod with these labels."""
        (pod,) = await self.cluster.pods(SYSTEM, labels)
        for pid in self.cluster.processes.processes(SYSTEM, pod["metadata"]["name"]).values():
            process = await asyncio.create_subprocess_exec("kill", "-9", str(pid))
            await process.wait()

    async def never_more_than(self, name: str, role: str, most: int, since: int) -> None:
        """At each moment, counting those on their way out."""
        for found in await self.history.worlds(NAMESPACE, since):
            there = found.replicas(name, role)
            assert len(there) <= most, f"after {found.change}: {[replica.name for replica in there]}"

    def load(self, model: str) -> SteadyLoad:
        return SteadyLoad(self.served.url, model, per_s=PER_S, prompt_tokens=PROMPT_TOKENS, max_tokens=6)


def is_so(model: dict[str, Any], kind: str) -> bool:
    return condition(model, kind).get("status") == "True" and (
        model["status"].get("observedGeneration") == model["metadata"]["generation"]
    )


def recommended_decode(model: dict[str, Any]) -> int:
    return int((((model.get("status") or {}).get("autoscaler") or {}).get("recommendation") or {}).get("decode", 0))


def ready_replicas(model: dict[str, Any], role: str) -> int:
    return int((((model.get("status") or {}).get("pools") or {}).get(role) or {}).get("ready", 0))
