"""How one revision takes over from another."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from antiphon_operator import names

from tests.operator.plan.cluster import CRASHED, NO_GPU, NO_IMAGE, READY, STARTING, Cluster


def running(spec: dict[str, Any] | None = None, **of_context: Any) -> Cluster:
    """A Model of two sets (1 prefill and 2 decode replicas each) that serves."""
    base = {"prefill": {"replicas": 2}, "decode": {"replicas": 4}}
    cluster = Cluster({**base, **(spec or {})}, **of_context)
    cluster.settle()
    cluster.run(70, step_s=2)
    assert cluster.reason("Ready") == ("True", "Serving")
    return cluster


def of_image(cluster: Cluster, image: str, state: str, otherwise: str = READY) -> None:
    """From now on, pods of this image do `state`."""

    def health(pod: dict[str, Any]) -> str:
        own = pod["spec"]["containers"][0].get("image")
        return state if own == image else otherwise

    cluster.health = health


def test_a_change_rolls_out_in_sets_and_ends_with_the_new_revision_alone() -> None:
    cluster = running()
    old = cluster.revision()
    seen: list[tuple[int, int, int]] = []

    def watch() -> None:
        new = cluster.revision()
        assert new != old
        for role, unit in (("prefill", 1), ("decode", 2)):
            assert len(cluster.sets(role)) <= 3 * unit, "no more than one set beside the two"
            live = [s for s in cluster.sets(role, draining=False) if cluster.is_ready(s)]
            assert len(live) >= 2 * unit, "capacity never falls"
        seen.append((len(cluster.sets("prefill", new)), len(cluster.sets("decode", new)), len(cluster.sets())))

    cluster.edit(engine={"image": "worker:2"})
    cluster.run(40, each=watch)
    assert (1, 2, 9) in seen, "the first step is one set"
    assert cluster.revisions() == {cluster.revision()}
    assert len(cluster.sets()) == 6
    assert cluster.reason("RolloutComplete") == ("True", "Complete")
    cluster.settle()


def test_the_old_set_drains_only_when_every_gateway_knows_the_new_one() -> None:
    cluster = running()
    old = cluster.revision()
    cluster.blind = {"gateway-b"}
    cluster.edit(engine={"image": "worker:2"})
    cluster.run(10)
    assert not cluster.sets(draining=True)
    assert len(cluster.sets(revision=old)) == 6
    assert cluster.last is not None
    assert cluster.last.record is not None
    assert cluster.last.record.revisions[cluster.revision()] == 0
    cluster.blind = set()
    cluster.run(1)
    assert cluster.last.record.revisions[cluster.revision()] == 500
    assert len(cluster.sets(revision=old, draining=True)) == 3


def test_the_record_gives_requests_by_ready_capacity_and_names_who_drains() -> None:
    cluster = running()
    old = cluster.revision()
    cluster.edit(engine={"image": "worker:2"})
    cluster.busy = {f"{thing['metadata']['name']}-0" for thing in cluster.sets()}
    cluster.run(5)
    assert cluster.last is not None
    assert cluster.last.record is not None
    record = cluster.last.record
    assert record.revisions == {old: 500, cluster.revision(): 500}
    draining = {f"{thing['metadata']['name']}-0" for thing in cluster.sets(draining=True)}
    assert set(record.draining) == draining
    assert len(draining) == 3
    assert cluster.last.wants.workers >= draining


def test_a_draining_replica_goes_when_it_is_idle_but_not_before_gateways_heard() -> None:
    cluster = running()
    cluster.edit(engine={"image": "worker:2"})
    while not cluster.sets(draining=True):
        cluster.run(0)
    name = cluster.sets(draining=True)[0]["metadata"]["name"]
    cluster.now = cluster.now.replace(second=cluster.now.second)
    since = cluster.now
    while ("StatefulSet", name) in cluster.objects:
        cluster.run(1)
    assert (cluster.now - since).total_seconds() >= 3


def test_a_draining_replica_with_requests_goes_at_the_drain_timeout() -> None:
    cluster = running({"rollout": {"drainTimeout": "60s"}})
    cluster.busy = {f"{thing['metadata']['name']}-0" for thing in cluster.sets()}
    cluster.edit(engine={"image": "worker:2"})
    cluster.run(50)
    assert len(cluster.sets(draining=True)) == 3
    cluster.run(20)
    assert len({s["metadata"]["name"] for s in cluster.sets(draining=True)}) <= 3
    assert not any(f"{s['metadata']['name']}-0" not in cluster.busy for s in cluster.sets(draining=True))
    cluster.run(150)
    assert cluster.revisions() == {cluster.revision()}


@pytest.mark.parametrize(
    ("state", "reason"), [(NO_GPU, "InsufficientGpus"), (NO_IMAGE, "ImagePull"), (CRASHED, "EngineCrash")]
)
def test_a_step_that_is_not_ready_in_time_is_taken_down_whole(state: str, reason: str) -> None:
    cluster = running({"accelerator": {"resource": "nvidia.com/gpu"}})
    old = {thing["metadata"]["uid"] for thing in cluster.sets()}
    of_image(cluster, "worker:bad", state)
    cluster.edit(engine={"image": "worker:bad"})
    cluster.run(890, step_s=10)
    assert cluster.reason("RolloutComplete") == ("False", "InProgress")
    assert len(cluster.sets()) == 9
    cluster.run(60, step_s=5)
    assert cluster.reason("RolloutComplete") == ("False", reason)
    assert "try again" in cluster.condition("RolloutComplete")["message"]
    assert {thing["metadata"]["uid"] for thing in cluster.sets()} == old, "the old pair is untouched"
    assert cluster.reason("Ready") == ("True", "Serving")
    assert sum(event.reason == "RolloutFailed" for event in cluster.events) == 1
    cluster.run(3000, step_s=30)
    assert {thing["metadata"]["uid"] for thing in cluster.sets()} == old, "it is not tried again"
    cluster.settle()


def test_a_failed_revision_is_tried_again_when_the_note_is_taken_off_or_the_spec_has_changed() -> None:
    cluster = running({"rollout": {"progressDeadline": "60s"}})
    of_image(cluster, "worker:bad", CRASHED)
    cluster.edit(engine={"image": "worker:bad"})
    cluster.run(100, step_s=5)
    bad = cluster.revision()
    stored = cluster.object("ControllerRevision", names.revision_name("qwen", bad))
    assert stored["metadata"]["annotations"][names.FAILED_ANNOTATION].startswith("EngineCrash: ")
    del stored["metadata"]["annotations"][names.FAILED_ANNOTATION]
    cluster.run(1)
    assert cluster.sets(revision=bad)
    cluster.run(100, step_s=5)
    assert not cluster.sets(revision=bad)

    cluster.edit(engine={"image": "worker:good"})
    cluster.settle()
    assert cluster.reason("RolloutComplete") == ("True", "Complete")
    cluster.health = lambda pod: READY
    cluster.edit(engine={"image": "worker:bad"})
    cluster.settle()
    assert cluster.revisions() == {bad}


def test_a_failure_in_a_later_step_keeps_the_sets_that_work_and_fills_up_with_the_old() -> None:
    cluster = running({"rollout": {"progressDeadline": "60s"}})
    old = cluster.revision()
    cluster.edit(engine={"image": "worker:2"})
    cluster.run(3)
    new = cluster.revision()
    assert len(cluster.sets(revision=new)) == 3
    first = {thing["metadata"]["name"] for thing in cluster.sets(revision=new)}

    def health(pod: dict[str, Any]) -> str:
        labels = pod["metadata"]["labels"]
        name = pod["metadata"].get("name", "")
        late = labels[names.REVISION_LABEL] == new and name.rsplit("-", 1)[0] not in first
        return NO_GPU if late else READY

    cluster.health = health
    cluster.run(200, step_s=2)
    assert len(cluster.sets(revision=new)) == 3
    assert len(cluster.sets(revision=old)) == 3
    assert cluster.reason("RolloutComplete")[0] == "False"
    assert cluster.reason("Ready") == ("True", "Serving")
    cluster.settle()


def test_going_back_uses_the_old_revision_and_takes_back_what_drains() -> None:
    cluster = running()
    old = cluster.revision()
    uids = {thing["metadata"]["uid"] for thing in cluster.sets()}
    cluster.busy = {f"{thing['metadata']['name']}-0" for thing in cluster.sets()}
    cluster.edit(engine={"image": "worker:2"})
    cluster.run(10)
    assert len(cluster.sets(revision=old, draining=True)) == 3
    cluster.edit(engine={"image": ""})
    cluster.settle()
    assert cluster.revision() == old
    assert {thing["metadata"]["uid"] for thing in cluster.sets()} == uids


def test_going_back_after_the_rollout_is_a_rollout_to_the_same_revision() -> None:
    cluster = running()
    old = cluster.revision()
    cluster.edit(engine={"image": "worker:2"})
    cluster.settle()
    cluster.edit(engine={"image": ""})
    cluster.settle()
    assert cluster.revisions() == {old}
    assert cluster.reason("RolloutComplete") == ("True", "Complete")


def test_an_edit_in_the_middle_supersedes() -> None:
    cluster = running()
    old = cluster.revision()
    of_image(cluster, "worker:2", STARTING)
    cluster.edit(engine={"image": "worker:2"})
    cluster.run(10)
    middle = cluster.revision()
    cluster.edit(engine={"image": "worker:3"})
    cluster.run(2)
    assert not cluster.sets(revision=middle), "what never served goes at once"
    assert cluster.sets(revision=old)
    cluster.settle()
    assert cluster.revisions() == {cluster.revision()} != {old}


def test_paused_stops_between_steps() -> None:
    cluster = running({"rollout": {"paused": True}})
    cluster.edit(engine={"image": "worker:2"})
    cluster.run(30)
    assert not cluster.sets(revision=cluster.revision())
    assert cluster.reason("RolloutComplete") == ("False", "Paused")
    cluster.edit(rollout={"paused": False})
    cluster.run(2)
    assert len(cluster.sets(revision=cluster.revision())) == 3
    cluster.edit(rollout={"paused": True})
    cluster.run(30)
    assert len(cluster.sets(revision=cluster.revision())) == 3
    assert len(cluster.sets()) == 6, "the step that was begun is finished"
    cluster.edit(rollout={"paused": False})
    cluster.settle()
    assert cluster.revisions() == {cluster.revision()}


def test_surge_0_says_what_it_costs_and_never_takes_more_than_that() -> None:
    cluster = running({"rollout": {"surge": 0, "maxUnavailable": 1}})
    assert "1 of 2 sets" in cluster.condition("RolloutComplete")["message"]
    fewest = [99]

    def watch() -> None:
        assert len(cluster.sets()) <= 6
        fewest[0] = min(fewest[0], sum(cluster.is_ready(s) for s in cluster.sets("decode", draining=False)))

    cluster.edit(engine={"image": "worker:2"})
    cluster.run(1, each=watch)
    assert "50 %" in cluster.condition("RolloutComplete")["message"]
    assert any("50 %" in event.message for event in cluster.events)
    cluster.run(60, each=watch)
    assert cluster.revisions() == {cluster.revision()}
    assert fewest[0] == 2


def test_surge_0_with_a_bad_revision_gives_the_old_one_back() -> None:
    cluster = running({"rollout": {"surge": 0, "maxUnavailable": 1, "progressDeadline": "60s"}})
    old = cluster.revision()
    of_image(cluster, "worker:bad", CRASHED)
    cluster.edit(engine={"image": "worker:bad"})
    cluster.run(120, step_s=2)
    assert cluster.revisions() == {old}
    assert len(cluster.sets()) == 6
    assert cluster.reason("RolloutComplete") == ("False", "EngineCrash")


def test_scaling_in_the_middle_works_in_sets() -> None:
    cluster = running()
    of_image(cluster, "worker:2", STARTING)
    cluster.edit(engine={"image": "worker:2"})
    cluster.run(5)
    old = next(iter(cluster.revisions() - {cluster.revision()}))
    cluster.edit(prefill={"replicas": 3}, decode={"replicas": 6})
    cluster.run(3)
    assert len(cluster.sets("decode", old)) == 6, "the revision that serves takes the load"
    cluster.health = lambda pod: READY
    cluster.settle()
    assert len(cluster.sets("prefill")) == 3
    assert len(cluster.sets("decode")) == 6
    assert cluster.revisions() == {cluster.revision()}


def test_scaling_and_sla_make_no_revision_and_touch_no_pod() -> None:
    cluster = running()
    uids = set(cluster.pods)
    revisions = [key for key in cluster.objects if key[0] == "ControllerRevision"]
    cluster.edit(sla={"ttft": {"p95": "500ms"}})
    cluster.settle()
    assert set(cluster.pods) == uids
    assert cluster.last is not None
    assert cluster.last.record is not None
    assert cluster.last.record.ttft_p95_ms == 500
    cluster.edit(decode={"replicas": 8}, prefill={"replicas": 4})
    cluster.settle()
    assert set(cluster.pods) >= uids
    assert [key for key in cluster.objects if key[0] == "ControllerRevision"] == revisions


def test_an_operator_with_other_templates_changes_no_pod_until_it_is_told_to() -> None:
    cluster = running()
    uids = set(cluster.pods)
    writes = list(cluster.writes)
    cluster.context = __import__("dataclasses").replace(
        cluster.context, version="0.2.0", worker_image="antiphon-worker:0.2.0"
    )
    cluster.run(30)
    assert cluster.writes == writes
    assert set(cluster.pods) == uids
    assert cluster.reason("UpdateAvailable") == ("True", "NewTemplates")
    assert f"{names.UPDATE_ANNOTATION}=0.2.0" in cluster.condition("UpdateAvailable")["message"]
    cluster.annotate(names.UPDATE_ANNOTATION, "0.2.0")
    cluster.settle()
    assert not uids & set(cluster.pods)
    assert cluster.reason("UpdateAvailable") == ("False", "UpToDate")


def test_only_revisions_of_use_are_kept() -> None:
    cluster = running()
    for image in ("a", "b", "c", "d"):
        cluster.edit(engine={"image": f"worker:{image}"})
        cluster.settle()
    assert len([key for key in cluster.objects if key[0] == "ControllerRevision"]) == 2


def test_the_shape_may_change_with_the_revision() -> None:
    cluster = running()
    cluster.edit(prefill=None)
    cluster.settle()
    assert not cluster.sets("prefill")
    assert cluster.reason("Ready") == ("True", "Serving")
    assert ("Pool", "qwen-prefill") not in cluster.objects
    cluster.edit(prefill={"replicas": 2})
    cluster.settle()
    assert len(cluster.sets("prefill")) == 2
    assert len(cluster.ids_seen) == len(set(cluster.ids_seen))


def test_a_bad_first_revision_is_replaced_without_waiting() -> None:
    cluster = Cluster()
    of_image(cluster, "worker:bad", CRASHED)
    cluster.edit(engine={"image": "worker:bad"})
    cluster.run(10)
    cluster.edit(engine={"image": "worker:good"})
    cluster.settle()
    assert cluster.reason("Ready") == ("True", "Serving")
    assert cluster.revisions() == {cluster.revision()}


def test_a_rollout_is_told_complete_once_that_stands_noted() -> None:
    """The note may fail to be written: whoever read "complete" and changed the spec would have nothing protected."""
    cluster = Cluster()
    noted = []
    for _ in range(60):
        cluster.tick()
        told = cluster.reason("RolloutComplete")[0] == "True"
        looks_soon = cluster.last is not None and cluster.last.check_after_s <= 1.0
        (revision,) = [thing for (kind, _), thing in cluster.objects.items() if kind == "ControllerRevision"]
        noted.append((names.COMPLETED_ANNOTATION in (revision["metadata"].get("annotations") or {}), told))
        assert looks_soon or noted[-1] != (True, False), "nothing else wakes the look that tells it"
        cluster.now += timedelta(seconds=1)
    assert noted.index((True, False)) == noted.index((True, True)) - 1
    assert (False, True) not in noted
