"""What concerns a Model as a whole: names, weights, refused specs, transfer, deletion."""

from __future__ import annotations

import json
from typing import Any

import pytest
from antiphon_operator import names
from antiphon_operator.plan.clock import moment, stamp
from antiphon_operator.resource.reasons import Reason

from tests.operator.plan.cluster import STARTING, Cluster


def test_the_loser_of_a_name_starts_nothing_and_says_who_has_it() -> None:
    cluster = Cluster()
    cluster.name_owners = {"qwen": "team-a/first"}
    cluster.run(3)
    assert not cluster.objects
    assert cluster.reason("Ready") == ("False", "NameConflict")
    assert "qwen belongs to Model team-a/first" in cluster.condition("Ready")["message"]
    assert cluster.last is not None
    assert cluster.last.record is None
    assert len(cluster.events) == 1
    cluster.name_owners = {}
    cluster.settle()
    assert cluster.reason("Ready") == ("True", "Serving")


def test_workers_that_run_keep_their_other_names() -> None:
    cluster = Cluster({"names": ["one"]})
    cluster.settle()
    cluster.edit(names=["one", "two"])
    cluster.name_owners = {"two": "team-a/first"}
    cluster.settle()
    assert cluster.reason("Ready") == ("True", "Serving")
    assert cluster.reason("GatewayReady") == ("False", "NameConflict")
    assert cluster.last is not None
    assert cluster.last.record is not None
    assert cluster.last.record.names == ("one",)


HUB = {"source": {"uri": "hf://Qwen/Qwen3-32B", "revision": "main"}, "accelerator": {"resource": "none"}}
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def job_of(cluster: Cluster) -> Any:
    (job,) = [thing for (kind, _), thing in cluster.objects.items() if kind == "Job"]
    return job


def finish_job(cluster: Cluster, message: str, *, kind: str = "Complete") -> None:
    job = job_of(cluster)
    job["status"] = {"conditions": [{"type": kind, "status": "True", "lastTransitionTime": stamp(cluster.now)}]}
    cluster.pods["job-pod"] = {
        "kind": "Pod",
        "metadata": {
            "name": "job-pod",
            "uid": "job-pod-uid",
            "labels": {},
            "ownerReferences": [{"kind": "Job", "uid": job["metadata"]["uid"], "controller": True}],
        },
        "spec": {"nodeName": "node-of-the-job"},
        "status": {"containerStatuses": [{"name": "fetch", "state": {"terminated": {"message": message}}}]},
    }
    cluster.lost_nodes = {"node-of-the-job"}  # its pod stays as it is


def test_weights_are_resolved_once_and_the_job_may_go() -> None:
    cluster = Cluster(HUB)
    cluster.run(2)
    assert cluster.reason("SourceReady") == ("False", "Resolving")
    assert not cluster.sets()
    finish_job(cluster, json.dumps({"revision": COMMIT, "size_bytes": 10**9, "path": f"/models/{COMMIT}"}))
    cluster.settle()
    assert cluster.reason("Ready") == ("True", "Serving")
    assert cluster.model["status"]["resolved"]["modelRevision"] == COMMIT
    revision = cluster.revision()
    del cluster.objects["Job", job_of(cluster)["metadata"]["name"]]
    del cluster.pods["job-pod"]
    cluster.settle()
    assert not any(kind == "Job" for kind, _ in cluster.objects)
    assert cluster.revision() == revision


def test_a_new_source_is_looked_up_while_the_old_one_serves() -> None:
    cluster = Cluster()
    cluster.settle()
    old = cluster.revisions()
    cluster.edit(**HUB)
    cluster.run(5)
    assert cluster.revisions() == old
    assert cluster.reason("Ready") == ("True", "Serving")
    assert cluster.reason("RolloutComplete") == ("False", "Waiting")


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("401 Client Error: the repository is gated", "SourceForbidden"),
        ("404: no such repository", "SourceNotFound"),
        ("connection reset by peer", "SourceFailed"),
    ],
)
def test_a_job_that_failed_says_why_and_is_made_again(message: str, reason: str) -> None:
    cluster = Cluster(HUB)
    cluster.run(2)
    first = job_of(cluster)["metadata"]["uid"]
    finish_job(cluster, message, kind="Failed")
    cluster.run(2)
    assert cluster.reason("SourceReady") == ("False", reason)
    assert message in cluster.condition("Ready")["message"]
    cluster.run(150, step_s=10)
    assert job_of(cluster)["metadata"]["uid"] != first


def test_a_claim_must_be_there_and_shareable() -> None:
    cluster = Cluster({"source": {"uri": "pvc://weights/qwen"}})
    cluster.run(1)
    assert cluster.reason("Ready") == ("False", "ClaimNotFound")
    cluster.claims = {"weights": {"spec": {"accessModes": ["ReadWriteOnce"]}}}
    cluster.run(1)
    assert cluster.reason("Ready") == ("False", "ClaimNotShareable")
    assert not cluster.sets()
    cluster.claims = {"weights": {"spec": {"accessModes": ["ReadWriteMany"]}}}
    cluster.settle()
    assert cluster.reason("Ready") == ("True", "Serving")


def test_a_refused_spec_starts_nothing() -> None:
    cluster = Cluster({"engine": {"name": "vllm"}})
    cluster.run(2)
    assert not cluster.objects
    assert cluster.reason("Ready") == ("False", "SpecRefused")
    assert "write torch" in cluster.condition("Ready")["message"]


@pytest.mark.parametrize("bad", [{"name": "vllm"}, {"name": "no such engine"}, {"dtype": 7}])
def test_a_refused_spec_leaves_what_runs_as_it_is(bad: dict[str, Any]) -> None:
    cluster = Cluster()
    cluster.settle()
    uids = set(cluster.pods)
    cluster.edit(engine=bad, decode={"replicas": 5})
    cluster.run(30)
    assert set(cluster.pods) == uids
    assert cluster.reason("Ready") == ("True", "Serving")
    assert cluster.reason("RolloutComplete") == ("False", "SpecRefused")
    assert sum(event.reason == "SpecRefused" for event in cluster.events) == 1
    assert cluster.last is not None
    assert cluster.last.record is not None
    assert cluster.last.record.names == ("qwen",)
    created = cluster.model["metadata"]["creationTimestamp"]
    made_at = moment(created)
    assert made_at is not None
    assert cluster.last.record.created_at_ms == int(made_at.timestamp() * 1000)


def test_a_spec_that_cannot_be_read_at_all_is_said() -> None:
    cluster = Cluster({"source": {"uri": "ftp://x"}})
    cluster.run(2)
    assert cluster.reason("Ready") == ("False", "SpecRefused")
    since = cluster.condition("Ready")["lastTransitionTime"]
    cluster.run(10)
    assert cluster.condition("Ready")["lastTransitionTime"] == since


def test_a_model_that_is_being_deleted_gets_nothing_new() -> None:
    cluster = Cluster()
    cluster.settle()
    cluster.model["metadata"]["deletionTimestamp"] = stamp(cluster.now)
    found = cluster.tick()
    assert not found.applies
    assert not found.deletes


def test_links_over_tcp_are_told_and_stop_nothing_unless_rdma_is_required() -> None:
    cluster = Cluster({"kvCache": {"transfer": {"transport": "ucx"}}})
    cluster.links = ("tcp",)
    cluster.run(70)
    assert cluster.reason("TransferReady") == ("True", "TcpFallback")
    cluster.edit(kvCache={"transfer": {"require": "rdma", "rdma": {"resource": "rdma/hca"}}})
    cluster.run(140)
    assert cluster.reason("TransferReady") == ("False", "TcpFallback")
    assert cluster.reason("Ready") == ("True", "Serving")
    cluster.links = ("ucx",)
    cluster.run(70)
    assert cluster.reason("TransferReady") == ("True", "Connected")


def test_rdma_in_a_namespace_that_refuses_it_is_said() -> None:
    cluster = Cluster({"kvCache": {"transfer": {"rdma": {"resource": "rdma/hca"}}}})
    cluster.namespace_labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    cluster.run(2)
    assert cluster.reason("TransferReady") == ("False", "NeedsPrivilegedNamespace")
    assert "kubectl label namespace chat" in cluster.condition("TransferReady")["message"]


def test_requests_wait_for_a_model_that_starts() -> None:
    cluster = Cluster()
    cluster.health = lambda pod: STARTING
    cluster.run(2)
    assert cluster.last is not None
    assert cluster.last.record is not None
    assert cluster.last.record.waking
    assert set(cluster.last.record.revisions.values()) == {0}


def test_redis_access_follows_the_rotation_annotation() -> None:
    cluster = Cluster()
    first = cluster.tick().redis
    cluster.annotate(names.ROTATE_ANNOTATION, "2")
    second = cluster.tick().redis
    assert first is not None
    assert second is not None
    assert (first.rotation, second.rotation) == ("", "2")
    assert Cluster(redis_configured=False).tick().redis is None


def test_optional_children_come_and_go_with_the_operators_options() -> None:
    cluster = Cluster(pod_monitors=True)
    cluster.settle()
    assert ("PodMonitor", "qwen-workers") in cluster.objects
    pods = set(cluster.pods)
    cluster.context = Cluster(network_policies=False).context
    cluster.settle()
    assert ("PodMonitor", "qwen-workers") not in cluster.objects
    assert ("NetworkPolicy", "qwen-workers") not in cluster.objects
    assert set(cluster.pods) == pods


def test_every_reason_in_a_status_is_of_the_enum() -> None:
    cluster = Cluster()
    cluster.settle()
    for condition in cluster.model["status"]["conditions"]:
        assert condition["reason"] in set(Reason)
