"""A cluster small enough for the planner's tests: objects in a dictionary, pods that do as the test says, a clock.

It carries plans out as the runtime does (applies in order, then deletes, statuses), makes the pods of StatefulSets,
and counts what was written, so that a test can say "settled". `tick` is one look; `run` is many with time between.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

from antiphon_operator import names
from antiphon_operator.options import OperatorContext
from antiphon_operator.plan.clock import stamp
from antiphon_operator.plan.observed import AutoscalerView, GatewayView, GatewayViews, Observed, WorkerView
from antiphon_operator.plan.planned import Announce, Apply, Plan
from antiphon_operator.plan.planner import plan

Object = dict[str, Any]
START = datetime(2026, 1, 1, tzinfo=UTC)
NAMESPACE, NAME, UID = "chat", "qwen", "uid-of-the-model"

READY, STARTING, NO_GPU, NO_IMAGE, CRASHED, REFUSED = "ready", "starting", "no gpu", "no image", "crashed", "refused"
NO_PLACE = "no place"
"""What a pod may do. REFUSED: the API server makes none. NO_PLACE: it could not place its ranks, and said so."""


def context(**changes: Any) -> OperatorContext:
    return OperatorContext(
        **{
            "version": "0.1.0",
            "worker_image": "antiphon-worker:0.1.0",
            "worker_redis_url": "redis://valkey:6379/0",
            "endpoint": "http://gateway:8000",
            **changes,
        }
    )


class Cluster:
    """See the module's docstring."""

    def __init__(self, spec: Object | None = None, **of_context: Any) -> None:
        self.now = START
        self.context = context(**of_context)
        self.model: Object = {
            "apiVersion": names.API_VERSION,
            "kind": "Model",
            "metadata": {
                "name": NAME,
                "namespace": NAMESPACE,
                "uid": UID,
                "generation": 1,
                "creationTimestamp": stamp(START),
                "annotations": {},
            },
            "spec": {
                "source": {"uri": "demo"},
                "prefill": {"replicas": 1},
                "decode": {"replicas": 2},
                **(spec or {}),
            },
        }
        self.objects: dict[tuple[str, str], Object] = {}
        self.pods: dict[str, Object] = {}
        self.health: Callable[[Object], str] = lambda pod: READY
        self.busy: set[str] = set()
        """Workers with requests."""
        self.problems: dict[str, str] = {}
        """What is in the way of workers that start ranks, by name."""
        self.asked_workers: frozenset[str] = frozenset()
        self.lost_nodes: set[str] = set()
        self.name_owners: dict[str, str] = {}
        self.claims: dict[str, Object] = {}
        self.namespace_labels: dict[str, str] = {}
        self.autoscaler: AutoscalerView | None = None
        self.links: tuple[str, ...] = ("ucx",)
        self.refusal = "exceeded quota: gpus"
        self.gateways: dict[str, bool] = {"gateway-a": True, "gateway-b": True}
        """Whether each gateway answers."""
        self.blind: set[str] = set()
        """Gateways that have no stream with anything new."""
        self.writes: list[str] = []
        self.events: list[Announce] = []
        self.ids_seen: list[str] = []
        self.last: Plan | None = None
        self._uids = itertools.count()
        self._nodes = itertools.count()

    # -- what a person does

    def edit(self, **spec: Any) -> None:
        """Change parts of the spec. Objects are merged one level deep, None removes."""
        for key, value in spec.items():
            old = self.model["spec"].get(key)
            if value is None:
                self.model["spec"].pop(key, None)
            elif isinstance(value, dict) and isinstance(old, dict):
                self.model["spec"][key] = {**old, **value}
            else:
                self.model["spec"][key] = value
        self.model["metadata"]["generation"] += 1

    def annotate(self, name: str, value: str) -> None:
        self.model["metadata"]["annotations"][name] = value

    # -- looks

    def tick(self, *, killed_after: int | None = None) -> Plan:
        """One look at what is, and what comes of it. `killed_after`: so many objects are applied, then the operator
        is gone: nothing is deleted, no status written."""
        self._pods_do()
        found = plan(self.observed(), self.context, self.now)
        self.last = found
        self.events += found.events
        for apply in found.applies[:killed_after]:
            self._apply(apply)
        if killed_after is not None:
            return found
        for delete in found.deletes:
            if (delete.kind, delete.name) in self.objects:
                self.writes.append(f"delete {delete.kind} {delete.name}")
                self._remove(delete.kind, delete.name)
        self.model = {**self.model, "status": dict(found.status)}
        for name, status in found.pool_status.items():
            if ("Pool", name) in self.objects:
                self.objects["Pool", name]["status"] = dict(status)
        self.asked_workers = found.wants.workers
        self._pods_do()
        return found

    def run(self, seconds: float, *, step_s: float = 1.0, each: Callable[[], None] | None = None) -> None:
        """Looks, `step_s` apart. `each` is called after each."""
        until = self.now + timedelta(seconds=seconds)
        while True:
            self.tick()
            if each is not None:
                each()
            if self.now >= until:
                return
            self.now += timedelta(seconds=step_s)

    def settle(self, limit: int = 200) -> None:
        """Looks until two in a row write nothing."""
        calm = 0
        for _ in range(limit):
            before = len(self.writes)
            self.tick()
            calm = calm + 1 if len(self.writes) == before else 0
            if calm > 5:
                return
            self.now += timedelta(seconds=2)
        raise AssertionError(f"does not settle: {self.writes[-6:]}, {self.condition('RolloutComplete')}")

    def observed(self) -> Observed:
        return Observed(
            model=self.model,
            children=tuple({"apiVersion": "v1", **thing} for thing in self.objects.values()),
            pods=tuple(self.pods.values()),
            name_owners=dict(self.name_owners),
            lost_nodes=frozenset(self.lost_nodes),
            claims=self.claims,
            events={
                thing["metadata"]["uid"]: ({"reason": "FailedCreate", "message": self.refusal},)
                for thing in self.sets()
                if self.health(thing["spec"]["template"]) == REFUSED
            },
            log_lines={pod["metadata"]["uid"]: "RuntimeError: no kernel image" for pod in self.pods.values()},
            workers={
                name: WorkerView(self.now, name not in self.busy, self.links, self.problems.get(name, ""))
                for name in self.asked_workers
                if name in self.pods
            },
            gateways=self._views(),
            namespace_labels=self.namespace_labels,
            autoscaler=self.autoscaler,
        )

    # -- what a test asks

    def sets(self, role: str = "", revision: str = "", *, draining: bool | None = None) -> list[Object]:
        found = []
        for (kind, _), thing in self.objects.items():
            labels = thing["metadata"].get("labels") or {}
            if kind != "StatefulSet" or (role and labels[names.ROLE_LABEL] != role):
                continue
            if revision and labels[names.REVISION_LABEL] != revision:
                continue
            if draining is not None and draining != self.is_draining(thing):
                continue
            found.append(thing)
        return found

    def is_draining(self, thing: Object) -> bool:
        return names.DRAINING_SINCE_ANNOTATION in (thing["metadata"].get("annotations") or {})

    def is_ready(self, thing: Object) -> bool:
        own = self.pods_of(thing)
        return len(own) == thing["spec"]["replicas"] and all(_is_ready(pod) for pod in own)

    def pods_of(self, thing: Object) -> list[Object]:
        uid = thing["metadata"]["uid"]
        return [pod for pod in self.pods.values() if pod["metadata"]["ownerReferences"][0]["uid"] == uid]

    def revision(self) -> str:
        """The revision that the last plan is for."""
        assert self.last is not None
        return str(self.last.status["revision"]["current"])

    def revisions(self) -> set[str]:
        return {thing["metadata"]["labels"][names.REVISION_LABEL] for thing in self.sets(draining=False)}

    def condition(self, kind: str) -> Object:
        conditions = (self.model.get("status") or {}).get("conditions", ())
        return next((dict(c) for c in conditions if c["type"] == kind), {})

    def reason(self, kind: str) -> tuple[str, str]:
        found = self.condition(kind)
        return found["status"], found["reason"]

    def object(self, kind: str, name: str) -> Object:
        return self.objects[kind, name]

    def forget_statuses(self) -> None:
        """Statuses are lost, as when the operator was killed before it could write them."""
        self.model.pop("status", None)
        for thing in self.objects.values():
            thing.pop("status", None)

    # -- nodes

    def lose_node(self, node: str) -> None:
        self.lost_nodes.add(node)

    # -- inside

    def _views(self) -> GatewayViews | None:
        if not self.context.gateway_configured:
            return None
        counts: dict[str, dict[str, int]] = {"prefill": {}, "decode": {}}
        for thing in self.sets():
            labels = thing["metadata"]["labels"]
            if self.is_ready(thing) and not self.is_draining(thing) and not self._is_lost(thing):
                by_revision = counts[labels[names.ROLE_LABEL]]
                by_revision[labels[names.REVISION_LABEL]] = by_revision.get(labels[names.REVISION_LABEL], 0) + 1
        views = tuple(
            GatewayView(name, {}, {}) if name in self.blind else GatewayView(name, counts["prefill"], counts["decode"])
            for name, answers in self.gateways.items()
            if answers
        )
        silent = tuple(f"{name}: refused" for name, answers in self.gateways.items() if not answers)
        return GatewayViews(asked_at=self.now, views=views, unreachable=silent)

    def _is_lost(self, thing: Object) -> bool:
        return any(pod["spec"]["nodeName"] in self.lost_nodes for pod in self.pods_of(thing))

    def _apply(self, apply: Apply) -> None:
        manifest = dict(apply.manifest)
        key = (manifest["kind"], manifest["metadata"]["name"])
        live = self.objects.get(key)
        if live is None:
            made = {"uid": f"uid-{next(self._uids)}", "creationTimestamp": stamp(self.now), "generation": 1}
            manifest["metadata"] = {**manifest["metadata"], **made}
            self.objects[key] = manifest
            self.writes.append(f"create {key[0]} {key[1]}")
            if key[0] == "StatefulSet":
                self.ids_seen.append(key[1])
            return
        wanted = {**live, "metadata": dict(live["metadata"])}
        for part in ("labels", "annotations"):
            foreign = {k: v for k, v in (live["metadata"].get(part) or {}).items() if not k.startswith(names.GROUP)}
            wanted["metadata"][part] = {**foreign, **(manifest["metadata"].get(part) or {})}
            if not wanted["metadata"][part]:
                del wanted["metadata"][part]
        if not apply.create_only:
            wanted |= {field: value for field, value in manifest.items() if field != "metadata"}
            if isinstance(live.get("spec"), dict):
                wanted["spec"] = {**live["spec"], **manifest["spec"]}
        if wanted != live:
            self.objects[key] = wanted
            self.writes.append(f"apply {key[0]} {key[1]}")

    def _remove(self, kind: str, name: str) -> None:
        thing = self.objects.pop((kind, name))
        if kind != "StatefulSet":
            return
        for pod in self.pods_of(thing):
            if pod["spec"]["nodeName"] in self.lost_nodes:
                pod["metadata"]["deletionTimestamp"] = stamp(self.now)
            else:
                del self.pods[pod["metadata"]["name"]]

    def delete_pod(self, name: str) -> None:
        del self.pods[name]

    def _pods_do(self) -> None:
        for thing in self.sets():
            if self.health(thing["spec"]["template"]) == REFUSED:
                continue
            for index in range(thing["spec"]["replicas"]):
                name = f"{thing['metadata']['name']}-{index}"
                if name not in self.pods:
                    self.pods[name] = self._new_pod(thing, name)
        for pod in self.pods.values():
            if "deletionTimestamp" not in pod["metadata"] and pod["spec"]["nodeName"] not in self.lost_nodes:
                pod["status"] = _status(self.health(pod), pod, self.now)

    def _new_pod(self, thing: Object, name: str) -> Object:
        template = thing["spec"]["template"]
        return {
            "kind": "Pod",
            "metadata": {
                "name": name,
                "uid": f"uid-{next(self._uids)}",
                "creationTimestamp": stamp(self.now),
                "labels": dict(template["metadata"]["labels"]),
                "ownerReferences": [{"kind": "StatefulSet", "uid": thing["metadata"]["uid"], "controller": True}],
            },
            "spec": {
                "nodeName": f"node-{next(self._nodes)}",
                "containers": [{"name": "worker", "image": template["spec"]["containers"][0]["image"]}],
            },
            "status": {},
        }


def _is_ready(pod: Object) -> bool:
    return any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions", ()))


def _status(health: str, pod: Object, now: datetime) -> Object:
    restarts = (pod["status"].get("containerStatuses") or [{}])[0].get("restartCount", 0)
    container: Object = {"name": "worker", "restartCount": restarts, "ready": False, "started": False}
    conditions: list[Object] = [{"type": "Ready", "status": "True" if health == READY else "False"}]
    match health:
        case "ready":
            container |= {"ready": True, "started": True, "state": {"running": {}}}
        case "starting":
            container |= {"state": {"running": {}}}
        case "no image":
            container |= {"state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such tag"}}}
        case "crashed":
            container |= {
                "restartCount": max(1, restarts),
                "state": {"waiting": {"reason": "CrashLoopBackOff"}},
                "lastState": {"terminated": {"exitCode": 1}},
            }
        case "no place":
            said = "GangUnschedulable: bundle 3 of 4 lacks 1 GPU: no pod has as many that are free"
            container |= {
                "restartCount": max(1, restarts),
                "state": {"waiting": {"reason": "CrashLoopBackOff"}},
                "lastState": {"terminated": {"exitCode": 4, "message": said}},
            }
        case "no gpu":
            pod["spec"]["nodeName"] = ""
            conditions.append(
                {
                    "type": "PodScheduled",
                    "status": "False",
                    "reason": "Unschedulable",
                    "message": "0/3 nodes are available: 3 Insufficient nvidia.com/gpu.",
                }
            )
            return {"phase": "Pending", "conditions": conditions}
    return {"phase": "Running", "conditions": conditions, "containerStatuses": [container]}
