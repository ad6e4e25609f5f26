"""An operator that renders pods otherwise than the one before touches no pod, says so, and waits to be asked."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

from tests.cluster.history import MODELS
from tests.cluster.stage import Stage, another_operator
from tests.cluster.support import Desk, message

OLD_IMAGE, NEW_IMAGE = "antiphon-worker:old", "antiphon-worker:new"


async def test_an_upgrade_changes_no_pod_until_the_update_is_asked_for(
    stage: Stage, desk: Desk, tmp_path: Path
) -> None:
    async with another_operator(stage, tmp_path, "--worker-image", OLD_IMAGE, name="old") as old:
        desk.operator = old
        await desk.create("pairs", prefill={"replicas": 2}, decode={"replicas": 2})
        await desk.create("alone", decode={"replicas": 2})
        await desk.create("paused", decode={"replicas": 2})
        await desk.until_serving("pairs", prefill=2, decode=2)
        await desk.until_serving("alone", decode=2)
        await desk.until_serving("paused", decode=2)
        await desk.edit("paused", engine={"dtype": "float32"}, rollout={"paused": True})
        await desk.until("paused", "RolloutComplete", "False", "Paused")
        uids = {name: await desk.pod_uids(name) for name in ("pairs", "alone", "paused")}
        revisions = {name: await desk.revisions(name) for name in uids}
        sets = {name: [thing["metadata"]["uid"] for thing in await desk.replica_sets(name)] for name in uids}
    changed = ("--worker-image", NEW_IMAGE, "--otlp-endpoint", "http://otel.example:4317")
    async with another_operator(stage, tmp_path, *changed, name="new") as new:
        desk.operator = new
        for name in uids:
            told = await desk.until(name, "UpdateAvailable", "True", "NewTemplates")
            assert f"kubectl annotate -n {desk.namespace} model {name}" in message(told, "UpdateAvailable")
        # scaling takes the templates that are kept
        await desk.edit("alone", decode={"replicas": 3})
        await desk.until_serving("alone", decode=3)
        await desk.until("pairs", "Ready", "True")
        assert uids["alone"] < await desk.pod_uids("alone")
        assert {pod["spec"]["containers"][0]["image"] for pod in await desk.pods("alone")} == {OLD_IMAGE}
        for name in ("pairs", "paused"):
            assert await desk.pod_uids(name) == uids[name]
            assert [thing["metadata"]["uid"] for thing in await desk.replica_sets(name)] == sets[name]
        for name, before in revisions.items():
            assert await desk.revisions(name) == before
        # as the message says
        await desk.annotate(MODELS, "pairs", update=importlib.metadata.version("antiphon"))
        model = await desk.until("pairs", "UpdateAvailable", "False", "UpToDate")
        assert model["status"]["resolved"]["image"] == NEW_IMAGE
        await desk.until_serving("pairs", prefill=2, decode=2)
        await desk.until_replicas("pairs", "prefill", 2)
        await desk.until_replicas("pairs", "decode", 2)
        assert not uids["pairs"] & await desk.pod_uids("pairs")
        assert {pod["spec"]["containers"][0]["image"] for pod in await desk.pods("pairs")} == {NEW_IMAGE}
