"""An operator process with a plan small enough to be read at one glance, and the process as tests handle it.

The plan: a Service, a Pool and `spec.decode.replicas` StatefulSets without pods, a status that counts them, one Event.
It raises on a Model with the label `raises`. Everything else is the real operator.

    async with OperatorProcess(cluster.kubeconfig, tmp_path) as operator:
        await operator.until_role("acting")
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Self

import aiohttp
from antiphon_operator.names import (
    API_VERSION,
    MANAGED_BY,
    MANAGED_BY_LABEL,
    MODEL_LABEL,
    headless_service_name,
    pool_name,
    replica_name,
)
from antiphon_operator.options import OperatorContext
from antiphon_operator.plan.observed import Object, Observed
from antiphon_operator.plan.planned import Announce, Apply, Delete, Plan

START_DEADLINE_S = 60.0
REVISION = "a1b2c3"


def small_plan(observed: Observed, context: OperatorContext, now: datetime) -> Plan:
    model = observed.model
    about = model["metadata"]
    if "raises" in (about.get("labels") or {}):
        raise ZeroDivisionError("a fault of the planner")
    wanted = int(model["spec"].get("decode", {}).get("replicas", 1))
    replicas = [_stateful_set(model, number) for number in range(wanted)]
    names = {replica["metadata"]["name"] for replica in replicas}
    there = [child for child in observed.children if child["kind"] == "StatefulSet"]
    extra = [child for child in there if child["metadata"]["name"] not in names]
    ready = len([child for child in there if child["metadata"]["name"] in names])
    return Plan(
        applies=(
            Apply(_service(model)),
            Apply(_pool(model, wanted)),
            *(Apply(replica, create_only=True) for replica in replicas),
        ),
        deletes=tuple(
            Delete("apps/v1", "StatefulSet", child["metadata"]["name"], child["metadata"]["uid"]) for child in extra
        ),
        status=_status(model, ready, wanted, now),
        pool_status={pool_name(about["name"], "decode"): {"replicas": ready, "observedGeneration": 1}},
        record=None,
        redis=None,
        events=(Announce("Normal", "Planned", f"{wanted} replicas"),),
    )


def _metadata(model: Object, name: str) -> dict[str, Any]:
    about = model["metadata"]
    return {
        "name": name,
        "namespace": about["namespace"],
        "labels": {MANAGED_BY_LABEL: MANAGED_BY, MODEL_LABEL: about["name"]},
        "ownerReferences": [
            {
                "apiVersion": API_VERSION,
                "kind": "Model",
                "name": about["name"],
                "uid": about["uid"],
                "controller": True,
                "blockOwnerDeletion": False,
            }
        ],
    }


def _service(model: Object) -> dict[str, Any]:
    name = headless_service_name(model["metadata"]["name"])
    spec = {"clusterIP": "None", "selector": {MODEL_LABEL: model["metadata"]["name"]}, "ports": [{"port": 9000}]}
    return {"apiVersion": "v1", "kind": "Service", "metadata": _metadata(model, name), "spec": spec}


def _pool(model: Object, replicas: int) -> dict[str, Any]:
    name = model["metadata"]["name"]
    metadata = _metadata(model, pool_name(name, "decode"))
    spec = {"role": "decode", "replicas": replicas}
    return {"apiVersion": API_VERSION, "kind": "Pool", "metadata": metadata, "spec": spec}


def _stateful_set(model: Object, number: int) -> dict[str, Any]:
    name = replica_name(model["metadata"]["name"], "decode", REVISION, f"r{number:03d}")
    metadata = _metadata(model, name)
    template = {
        "metadata": {"labels": {**metadata["labels"], "replica": name}},
        "spec": {"containers": [{"name": "worker", "image": "worker:1"}]},
    }
    spec = {
        "serviceName": headless_service_name(model["metadata"]["name"]),
        "replicas": 0,
        "selector": {"matchLabels": {"replica": name}},
        "template": template,
    }
    return {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": metadata, "spec": spec}


def _status(model: Object, ready: int, wanted: int, now: datetime) -> dict[str, Any]:
    said = "True" if ready == wanted else "False"
    before: Mapping[str, Any] = next(iter((model.get("status") or {}).get("conditions") or ()), {})
    stamp = before["lastTransitionTime"] if before.get("status") == said else now.strftime("%Y-%m-%dT%H:%M:%SZ")
    condition = {
        "type": "Ready",
        "status": said,
        "reason": "Serving" if said == "True" else "Starting",
        "message": f"{ready} of {wanted} replicas",
        "lastTransitionTime": stamp,
        "observedGeneration": model["metadata"]["generation"],
    }
    return {"observedGeneration": model["metadata"]["generation"], "conditions": [condition]}


class OperatorProcess:
    """`options` are the words of `antiphon operator`; its log is in `log`."""

    def __init__(self, kubeconfig: Path, folder: Path, *options: str, name: str = "operator") -> None:
        self._ready_file = folder / f"{name}.json"
        self.log = folder / f"{name}.log"
        self._arguments = [
            *("--kubeconfig", str(kubeconfig), "--ready-file", str(self._ready_file)),
            *("--host", "127.0.0.1", "--status-port", "0", "--identity", name, "--lease-namespace", "default"),
            *options,
        ]
        self.process: asyncio.subprocess.Process | None = None
        self._url = ""

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            await self.process.wait()

    async def start(self) -> None:
        self._ready_file.unlink(missing_ok=True)
        await self._spawn()
        assert self.process is not None
        async with asyncio.timeout(START_DEADLINE_S):
            while not self._ready_file.exists():
                assert self.process.returncode is None, self.log.read_text()
                await asyncio.sleep(0.02)
        self._url = f"http://{json.loads(self._ready_file.read_text())['status_address']}"

    async def refused(self) -> int:
        """Start it and wait for its end."""
        await self._spawn()
        return await self.ended()

    async def _spawn(self) -> None:
        with self.log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "tests.support.small_operator", *self._arguments),
                stderr=log,
                env={**os.environ, "PYTHONUNBUFFERED": "1", "USER": ""},
            )

    async def page(self, path: str) -> tuple[int, str]:
        async with aiohttp.ClientSession() as session, session.get(self._url + path) as answer:
            return answer.status, await answer.text()

    async def role(self) -> str:
        return str(json.loads((await self.page("/status"))[1])["role"])

    async def until_role(self, role: str) -> None:
        async with asyncio.timeout(START_DEADLINE_S):
            while await self.role() != role:  # noqa: ASYNC110 - another process has no event of ours
                await asyncio.sleep(0.02)

    async def metric(self, name: str) -> float:
        """The value of a metric without labels."""
        lines = (await self.page("/metrics"))[1].splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith(f"{name} "))

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    async def ended(self) -> int:
        assert self.process is not None
        async with asyncio.timeout(START_DEADLINE_S):
            return await self.process.wait()


def main() -> None:
    """`antiphon operator`, with the small plan."""
    import argparse

    from antiphon.configuration import add_arguments, load, specs
    from antiphon_operator.options import OperatorOptions
    from antiphon_operator.runtime.main import run_operator
    from antiphon_telemetry import logs
    from antiphon_telemetry.exit import leave

    parser = argparse.ArgumentParser()
    add_arguments(parser, specs(OperatorOptions))
    options = load(OperatorOptions, parser.parse_args(), {})
    logs.configure("operator", level="info")
    with contextlib.suppress(KeyboardInterrupt):
        leave(run_operator(options, planner=small_plan))


if __name__ == "__main__":
    main()
