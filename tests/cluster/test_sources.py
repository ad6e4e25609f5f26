"""Where the weights come from, before any worker is made."""

from __future__ import annotations

import json
from typing import Any

import pytest
from antiphon_operator import names

from tests.cluster.support import Desk, message
from tests.support.kube.kubelets.simulated import Script
from tests.support.kube.resources import JOBS, PERSISTENT_VOLUME_CLAIMS, STATEFULSETS

HUB = {"uri": "hf://some/model"}
COMMITS = ("0123456789abcdef0123456789abcdef01234567", "89abcdef0123456789abcdef0123456789abcdef")


class Hub:
    """What containers that fetch find, as `antiphon fetch` says it at its end."""

    def __init__(self, desk: Desk) -> None:
        self.commit = COMMITS[0]
        self.refusal = ""
        desk.script(self._script)

    def _script(self, pod: dict[str, Any], container: dict[str, Any]) -> Script | None:
        if container["name"] != "fetch":
            return None
        if self.refusal:
            return Script(end_s=0.02, ready_s=None, exit_code=2, message=self.refusal, log=(self.refusal,))
        found = {"revision": self.commit, "size_bytes": 1 << 30, "path": f"/models/some--model-{self.commit}"}
        return Script(end_s=0.02, ready_s=None, message=json.dumps(found))


async def test_a_name_on_the_hub_becomes_a_commit_and_all_pods_get_that_commit(desk: Desk) -> None:
    hub = Hub(desk)
    await desk.create("qwen", source=HUB, accelerator={"resource": "none"}, prefill={}, decode={"replicas": 2})
    model = await desk.until_serving("qwen", prefill=1, decode=2)
    assert model["status"]["resolved"]["modelRevision"] == COMMITS[0]
    for pod in await desk.pods("qwen"):
        (fetch,) = pod["spec"]["initContainers"]
        assert COMMITS[0] in fetch["args"]
    # the branch moves on: nothing changes by itself, and a new replica gets what the others have
    hub.commit = COMMITS[1]
    await desk.edit("qwen", decode={"replicas": 3})
    await desk.until_serving("qwen", prefill=1, decode=3)
    for pod in await desk.pods("qwen"):
        assert COMMITS[0] in pod["spec"]["initContainers"][0]["args"]
    # another revision of the same repository is looked up anew, and rolls out
    await desk.edit("qwen", source={"revision": "v2"})
    await desk.until("qwen", "RolloutComplete", "True", "Complete")
    model = await desk.until_serving("qwen", prefill=1, decode=3)
    assert model["status"]["resolved"]["modelRevision"] == COMMITS[1]


async def test_while_the_job_looks_the_status_says_so_and_no_worker_is_there(desk: Desk) -> None:
    desk.script(lambda pod, container: Script(ready_s=None) if container["name"] == "fetch" else None)
    await desk.create("qwen", source=HUB, accelerator={"resource": "none"})
    model = await desk.until("qwen", "SourceReady", "False", "Resolving", says="kubectl logs")
    assert model["status"]["phase"] == "Pending"
    assert await desk.all(STATEFULSETS) == []
    (job,) = await desk.all(JOBS)
    assert job["metadata"]["name"].startswith("qwen-source-")


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("404: there is no repository some/model", "SourceNotFound"),
        ("401: some/model is gated", "SourceForbidden"),
    ],
)
async def test_what_the_hub_refuses_stands_in_the_status_and_another_source_is_tried_at_once(
    desk: Desk, answer: str, reason: str
) -> None:
    hub = Hub(desk)
    hub.refusal = answer
    await desk.create("qwen", source=HUB, accelerator={"resource": "none"})
    model = await desk.until("qwen", "SourceReady", "False", reason, says=answer)
    assert answer in message(model, "Ready")
    assert await desk.all(STATEFULSETS) == []
    hub.refusal = ""
    await desk.edit("qwen", source={"uri": "hf://some/other"})
    await desk.until_serving("qwen", decode=1)


@pytest.mark.double  # its claim needs no volume behind it
async def test_a_claim_is_filled_once_and_read_by_all(desk: Desk) -> None:
    Hub(desk)
    await _claim(desk, "weights", "ReadWriteMany")
    source = HUB | {"cache": {"type": "Claim", "claimName": "weights"}}
    await desk.create("qwen", source=source, accelerator={"resource": "none"}, prefill={}, decode={})
    await desk.until_serving("qwen", prefill=1, decode=1)
    for pod in await desk.pods("qwen"):
        assert "initContainers" not in pod["spec"]
        claims = [
            volume["persistentVolumeClaim"]["claimName"]
            for volume in pod["spec"]["volumes"]
            if "persistentVolumeClaim" in volume
        ]
        assert claims == ["weights"]


@pytest.mark.double  # as above
async def test_a_claim_has_to_be_there_and_shareable(desk: Desk) -> None:
    Hub(desk)
    await _claim(desk, "mine", "ReadWriteOnce")
    source = HUB | {"cache": {"type": "Claim", "claimName": "mine"}}
    await desk.create("qwen", source=source, accelerator={"resource": "none"})
    await desk.until("qwen", "SourceReady", "False", "ClaimNotShareable", says="ReadWriteMany")
    await desk.edit("qwen", source={"cache": {"claimName": "later"}})
    await desk.until("qwen", "SourceReady", "False", "ClaimNotFound", says="later")
    assert await desk.all(JOBS) == []
    assert await desk.all(STATEFULSETS) == []
    await _claim(desk, "later", "ReadWriteMany")
    await desk.until_serving("qwen", decode=1)


async def _claim(desk: Desk, name: str, mode: str) -> None:
    await desk.cluster.create(
        PERSISTENT_VOLUME_CLAIMS,
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": name, "namespace": desk.namespace, "labels": {names.NAME_LABEL: "weights"}},
            "spec": {"accessModes": [mode], "resources": {"requests": {"storage": "1Gi"}}},
        },
    )
