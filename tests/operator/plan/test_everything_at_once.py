"""Whatever happens, in whatever order: what must hold after every look, and where it must all end.

A state machine edits the spec, breaks and mends images and pods, loses nodes, deletes objects by hand, kills the
operator in the middle of a plan and loses its statuses; after each look the rules below are checked.
"""

from __future__ import annotations

from datetime import timedelta
from math import gcd
from typing import Any

from antiphon_operator import names
from antiphon_operator.plan.clock import moment
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.operator.plan.cluster import CRASHED, NO_GPU, READY, Cluster, Object

IMAGES = st.sampled_from(["worker:1", "worker:2", "worker:3"])
DRAIN_TIMEOUT_S = 40


class Everything(RuleBasedStateMachine):
    """See the module's docstring."""

    def __init__(self) -> None:
        super().__init__()
        self.cluster = Cluster(
            {
                "engine": {"image": "worker:1"},
                "prefill": {"replicas": 2},
                "decode": {"replicas": 2},
                "rollout": {"progressDeadline": "100s", "drainTimeout": f"{DRAIN_TIMEOUT_S}s"},
            }
        )
        self.cluster.health = self.health
        self.rolling_out = self.resized_in_rollout = False
        self.shape: tuple[dict[str, int], int] = ({}, 1)
        self.bad_images: dict[str, str] = {}
        self.bad_pods: set[str] = set()
        self.cluster.settle()

    def health(self, pod: Object) -> str:
        if pod["metadata"].get("name") in self.bad_pods:
            return CRASHED
        return self.bad_images.get(pod["spec"]["containers"][0].get("image", ""), READY)

    # -- what happens

    @rule(image=IMAGES)
    def edit_image(self, image: str) -> None:
        self.cluster.edit(engine={"image": image})
        self.look()

    @rule(prefill=st.integers(0, 3), decode=st.integers(0, 4))
    def scale(self, prefill: int, decode: int) -> None:
        if "prefill" in self.cluster.model["spec"]:
            self.cluster.edit(prefill={"replicas": prefill})
        self.cluster.edit(decode={"replicas": decode})
        self.look()

    @rule(replicas=st.none() | st.integers(1, 2))
    def change_shape(self, replicas: int | None) -> None:
        self.cluster.edit(prefill=None if replicas is None else {"replicas": replicas})
        self.look()

    @rule(surge=st.integers(0, 2), paused=st.booleans())
    def change_rollout(self, surge: int, paused: bool) -> None:
        self.cluster.edit(rollout={"surge": surge, "maxUnavailable": 1 if surge == 0 else 0, "paused": paused})
        self.look()

    @rule(image=IMAGES, state=st.sampled_from([CRASHED, NO_GPU, READY]))
    def break_or_mend_image(self, image: str, state: str) -> None:
        self.bad_images[image] = state
        self.look()

    @precondition(lambda self: self.cluster.pods)
    @rule(data=st.data())
    def break_pod(self, data: st.DataObject) -> None:
        self.bad_pods.add(data.draw(st.sampled_from(sorted(self.cluster.pods))))
        self.look()

    @rule()
    def mend_pods(self) -> None:
        self.bad_pods.clear()
        self.look()

    @precondition(lambda self: self.cluster.pods)
    @rule(data=st.data())
    def lose_node(self, data: st.DataObject) -> None:
        pod = data.draw(st.sampled_from(sorted(self.cluster.pods)))
        node = self.cluster.pods[pod]["spec"]["nodeName"]
        if node:
            self.cluster.lose_node(node)
        self.look()

    @rule(busy=st.booleans())
    def requests_come_and_go(self, busy: bool) -> None:
        self.cluster.busy = set(self.cluster.pods) if busy else set()
        self.look()

    @rule(blind=st.booleans())
    def a_gateway_goes_blind(self, blind: bool) -> None:
        self.cluster.blind = {"gateway-b"} if blind else set()
        self.look()

    @rule()
    def statuses_are_lost(self) -> None:
        self.cluster.forget_statuses()
        self.look()

    @rule(after=st.integers(0, 12))
    def the_operator_is_killed(self, after: int) -> None:
        self.cluster.tick(killed_after=after)
        self.cluster.forget_statuses()
        self.look()

    @precondition(lambda self: self.cluster.sets())
    @rule(data=st.data())
    def delete_a_replica_by_hand(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from([thing["metadata"]["name"] for thing in self.cluster.sets()]))
        self.cluster._remove("StatefulSet", name)
        self.look()

    @rule(seconds=st.sampled_from([1, 3, 10, 50, 120]))
    def time_passes(self, seconds: int) -> None:
        for _ in range(6):
            self.cluster.now += timedelta(seconds=seconds / 6)
            self.look()

    # -- one look, and what must hold of it

    def look(self) -> None:
        cluster = self.cluster
        cluster._pods_do()
        before = {thing["metadata"]["name"]: thing for thing in cluster.sets()}
        ready_before = {name for name, thing in before.items() if self.serves(thing)}
        worked = {f"{name}-0" for name in before if self.has_requests(name)}
        cluster.tick()
        after = {thing["metadata"]["name"]: thing for thing in cluster.sets()}
        self.check_room(before, after)
        self.check_capacity(before, after, ready_before)
        for name in before.keys() - after.keys():
            self.check_deleted(before[name], worked)
        assert len(cluster.ids_seen) == len(set(cluster.ids_seen)), "an id came back"

    def serves(self, thing: Object) -> bool:
        cluster = self.cluster
        return cluster.is_ready(thing) and not cluster.is_draining(thing) and not cluster._is_lost(thing)

    def has_requests(self, name: str) -> bool:
        pod = self.cluster.pods.get(f"{name}-0")
        statuses = (pod or {}).get("status", {}).get("containerStatuses", [{}])
        return f"{name}-0" in self.cluster.busy and bool(statuses[0].get("started"))

    def sizes(self) -> dict[str, int]:
        spec = self.cluster.model["spec"]
        return {role: spec[role]["replicas"] for role in ("prefill", "decode") if role in spec}

    def unit(self) -> dict[str, int]:
        sizes = self.sizes()
        sets = gcd(*sizes.values())
        return {role: count // sets if sets else 0 for role, count in sizes.items()}

    def rollout(self) -> dict[str, Any]:
        return {"surge": 1, "maxUnavailable": 0, **self.cluster.model["spec"]["rollout"]}

    def check_room(self, before: dict[str, Object], after: dict[str, Object]) -> None:
        """Replicas are never made beyond `surge` sets more than there should be. Only where sizes or surge were changed
        in the middle of a rollout may the protected revision be filled up beside a step that was asked for before."""
        shape = (self.sizes(), self.rollout()["surge"])
        if not self.resized_in_rollout:
            self.resized_in_rollout = self.rolling_out and shape != self.shape
        self.shape = shape
        self.rolling_out = self.cluster.reason("RolloutComplete") != ("True", "Complete")
        if not self.rolling_out:
            self.resized_in_rollout = False
        for role in ("prefill", "decode"):
            made = [n for n in after.keys() - before.keys() if self.role(after[n]) == role]
            standing = [
                thing for thing in after.values() if self.role(thing) == role and not self.cluster.is_draining(thing)
            ]
            if made:
                most = self.sizes()[role] + self.rollout()["surge"] * self.unit()[role]
                if self.resized_in_rollout:
                    most = max(most, 2 * self.sizes()[role])
                assert len(standing) <= most, f"{len(standing)} {role} replicas, at most {most}"

    def check_capacity(self, before: dict[str, Object], after: dict[str, Object], ready_before: set[str]) -> None:
        """No ready replica is taken away below what should be there, less the sets that may be missing."""
        for role, wanted in self.sizes().items():
            missing = self.rollout()["maxUnavailable"] * self.unit()[role]
            had = [name for name in ready_before if self.role(before[name]) == role]
            left = [name for name in had if name in after and not self.cluster.is_draining(after[name])]
            if len(left) < len(had):
                assert len(left) >= min(len(had), wanted - missing), f"{role}: {len(had)} ready, {len(left)} left"

    def check_deleted(self, thing: Object, worked: set[str]) -> None:
        """A replica with requests is deleted only when it was draining for as long as it may."""
        name = thing["metadata"]["name"]
        if f"{name}-0" not in worked or self.cluster._is_lost(thing):
            return
        if any(pod["spec"]["nodeName"] in self.cluster.lost_nodes for pod in self.cluster.pods_of(thing)):
            return
        since = moment((thing["metadata"].get("annotations") or {}).get(names.DRAINING_SINCE_ANNOTATION))
        assert since is not None, f"{name} was deleted without draining"
        assert self.cluster.now - since >= timedelta(seconds=DRAIN_TIMEOUT_S), f"{name} was deleted with requests"

    def role(self, thing: Object) -> str:
        return str(thing["metadata"]["labels"][names.ROLE_LABEL])

    @invariant()
    def requests_are_never_paired_across_revisions(self) -> None:
        """A revision gets requests only where it has a ready replica in each of its pools."""
        found = self.cluster.last
        assert found is not None
        assert found.record is not None
        for revision, weight in found.record.revisions.items():
            if weight:
                roles = {self.role(thing) for thing in self.cluster.sets(revision=revision)}
                stored = self.cluster.objects.get(("ControllerRevision", names.revision_name("qwen", revision)))
                assert stored is not None
                needed = set(stored["data"]["pools"])
                if not self.sizes().get("prefill", 1):
                    needed.discard("prefill")
                assert needed <= roles

    @invariant()
    def ready_is_true_only_with_a_pair(self) -> None:
        if self.cluster.condition("Ready").get("status") != "True":
            return
        found = self.cluster.last
        assert found is not None
        assert found.record is not None
        assert any(thing for thing in self.cluster.sets("decode", draining=False))

    def teardown(self) -> None:
        """Everything is mended: it comes to rest at what the spec asks for."""
        self.bad_images.clear()
        self.bad_pods.clear()
        self.cluster.busy.clear()
        self.cluster.blind.clear()
        self.cluster.edit(rollout={"surge": 1, "maxUnavailable": 0, "paused": False}, engine={"image": "worker:last"})
        for _ in range(400):
            written = len(self.cluster.writes)
            for _ in range(5):
                self.look()
                self.cluster.now += timedelta(seconds=3)
            if len(self.cluster.writes) == written:
                break
        assert len(self.cluster.writes) == written, self.cluster.writes[-5:]
        for role in ("prefill", "decode"):
            assert len(self.cluster.sets(role)) == self.sizes().get(role, 0)
        if self.cluster.sets():
            assert self.cluster.revisions() == {self.cluster.revision()}
        if all(self.sizes().values()):
            assert self.cluster.condition("Ready")["status"] == "True"
            assert self.cluster.reason("RolloutComplete") == ("True", "Complete")


TestEverything = Everything.TestCase
TestEverything.settings = settings(
    max_examples=60,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
    phases=[Phase.generate],  # a failure is told in seconds; add Phase.shrink to make it small, which takes minutes
)
