"""A new Model: what it gets, and what its status says on the way."""

from __future__ import annotations

import copy

from antiphon_operator import names
from antiphon_operator.plan.planner import plan

from tests.operator.plan.cluster import CRASHED, NO_GPU, NO_IMAGE, REFUSED, STARTING, Cluster


def test_a_new_model_gets_its_pools_and_serves() -> None:
    cluster = Cluster()
    cluster.settle()
    assert len(cluster.sets("prefill")) == 1
    assert len(cluster.sets("decode")) == 2
    assert cluster.reason("Ready") == ("True", "Serving")
    assert cluster.reason("RolloutComplete") == ("True", "Complete")
    assert cluster.last is not None
    assert cluster.last.record is not None
    assert cluster.last.record.revisions == {cluster.revision(): 1000}
    assert cluster.model["status"]["phase"] == "Running"
    assert cluster.model["status"]["pools"]["decode"]["summary"] == "2/2"


def test_settled_means_that_nothing_is_written() -> None:
    cluster = Cluster()
    cluster.settle()
    cluster.run(70)
    before = list(cluster.writes)
    status = cluster.model["status"]
    cluster.run(120, step_s=5)
    assert cluster.writes == before
    assert cluster.model["status"] == status


def test_what_others_rest_on_is_applied_first() -> None:
    kinds = [apply.manifest["kind"] for apply in Cluster().tick().applies]
    assert kinds.index("Pool") < kinds.index("StatefulSet")
    assert kinds.index("ControllerRevision") < kinds.index("StatefulSet")
    assert kinds.index("ServiceAccount") < kinds.index("StatefulSet")
    runs = [kind for at, kind in enumerate(kinds) if at == 0 or kinds[at - 1] != kind]
    assert len(runs) == len(set(runs)), "objects of one kind stand together"


def test_the_same_look_gives_the_same_plan() -> None:
    cluster = Cluster()
    assert cluster.tick() == Cluster().tick()


def test_no_gpus_is_said_and_lasts_no_longer_than_it_is() -> None:
    cluster = Cluster({"accelerator": {"resource": "nvidia.com/gpu"}})
    cluster.health = lambda pod: NO_GPU
    cluster.run(2000, step_s=50)
    assert cluster.reason("Ready") == ("False", "InsufficientGpus")
    assert "add nodes" in cluster.condition("Ready")["message"]
    assert len(cluster.sets()) == 3, "a first deployment is never taken down"
    cluster.health = lambda pod: "ready"
    cluster.settle()
    assert cluster.reason("Ready") == ("True", "Serving")


def test_an_image_that_cannot_be_pulled() -> None:
    cluster = Cluster()
    cluster.health = lambda pod: NO_IMAGE
    cluster.run(3)
    assert cluster.reason("Ready") == ("False", "ImagePull")


def test_a_crash_is_told_with_the_last_line_of_the_log() -> None:
    cluster = Cluster()
    cluster.health = lambda pod: CRASHED
    cluster.run(3)
    assert cluster.reason("PoolsReady") == ("False", "EngineCrash")
    assert "RuntimeError: no kernel image" in cluster.condition("PoolsReady")["message"]
    assert cluster.last is not None
    assert len(cluster.last.wants.log_of) == 3


def test_a_quota_is_read_from_the_events_of_the_stateful_set() -> None:
    cluster = Cluster()
    cluster.health = lambda pod: REFUSED
    cluster.run(3)
    assert cluster.reason("Ready") == ("False", "QuotaExceeded")
    assert cluster.last is not None
    assert len(cluster.last.wants.events_of) == 3


def test_pod_security_is_told_apart() -> None:
    cluster = Cluster()
    cluster.health = lambda pod: REFUSED
    cluster.refusal = 'pods "x" is forbidden: violates PodSecurity "restricted:latest"'
    cluster.run(3)
    assert cluster.reason("Ready") == ("False", "PodSecurity")


def test_it_is_not_ready_before_every_gateway_that_answers_has_a_pair() -> None:
    cluster = Cluster()
    cluster.blind = {"gateway-b"}
    cluster.run(5)
    assert cluster.reason("Ready") == ("False", "SomeGateways")
    assert "gateway-b" in cluster.condition("Ready")["message"]
    cluster.blind = set()
    cluster.run(3)
    assert cluster.reason("Ready") == ("True", "Serving")


def test_a_gateway_that_does_not_answer_is_said_but_does_not_unmake_ready() -> None:
    cluster = Cluster()
    cluster.gateways["gateway-b"] = False
    cluster.settle()
    assert cluster.reason("Ready") == ("True", "Serving")
    assert cluster.reason("GatewayReady") == ("False", "GatewayUnreachable")
    cluster.gateways["gateway-a"] = False
    cluster.run(3)
    assert cluster.reason("Ready") == ("False", "GatewayUnreachable")


def test_an_operator_that_has_not_asked_gateways_yet_does_not_take_ready_back() -> None:
    cluster = Cluster()
    cluster.settle()
    views = cluster._views
    cluster._views = lambda: None  # type: ignore[method-assign]
    cluster.run(2)
    assert cluster.reason("Ready") == ("True", "Serving")
    cluster._views = views  # type: ignore[method-assign]
    cluster.settle()


def test_times_of_conditions_stay_while_the_status_does() -> None:
    cluster = Cluster()
    cluster.settle()
    since = cluster.condition("Ready")["lastTransitionTime"]
    cluster.run(100, step_s=10)
    assert cluster.condition("Ready")["lastTransitionTime"] == since
    cluster.health = lambda pod: STARTING
    cluster.run(2)
    assert cluster.condition("Ready")["status"] == "False"
    assert cluster.condition("Ready")["lastTransitionTime"] > since


def test_aggregated_serving_has_one_pool_and_no_transfer() -> None:
    cluster = Cluster()
    cluster.edit(prefill=None)
    cluster.settle()
    assert not cluster.sets("prefill")
    assert ("Pool", "qwen-prefill") not in cluster.objects
    assert cluster.reason("Ready") == ("True", "Serving")
    assert cluster.reason("TransferReady") == ("True", "NotNeeded")


def test_every_child_is_labelled_and_owned() -> None:
    for apply in Cluster().tick().applies:
        about = apply.manifest["metadata"]
        assert about["labels"][names.MODEL_LABEL] == "qwen"
        assert about["ownerReferences"][0]["kind"] == "Model"


def test_what_is_observed_is_never_changed() -> None:
    cluster = Cluster()
    cluster.settle()
    cluster.edit(engine={"image": "worker:2"})
    cluster.run(3)
    observed = cluster.observed()
    before = copy.deepcopy(observed)
    plan(observed, cluster.context, cluster.now)
    assert observed == before
