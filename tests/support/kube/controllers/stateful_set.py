"""StatefulSets: pods `<name>-0` to `<name>-N`, each made again only when the one before it is gone for good.

A pod that is Terminating keeps its ordinal taken, so a pod on a node that nobody hears of is never replaced. Templates
roll from the highest ordinal down, without partitions. Claim templates are not played.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tests.support.kube.controllers.loop import Controller
from tests.support.kube.controllers.mirror import Key, key_of
from tests.support.kube.controllers.pod_control import create_pod, delete_pod
from tests.support.kube.controllers.podinfo import (
    Object,
    controller_of,
    has_ended,
    is_ready,
    is_terminating,
    owner_reference,
    pod_from,
    template_hash,
)
from tests.support.kube.resources import CONTROLLER_REVISIONS, PODS, STATEFULSETS, Resource

COMPONENT = "statefulset-controller"
REVISION_LABEL = "controller-revision-hash"
NAME_LABEL = "statefulset.kubernetes.io/pod-name"
INDEX_LABEL = "apps.kubernetes.io/pod-index"


class StatefulSets(Controller):
    def keys(self, kind: str, resource: Resource, thing: Object) -> Iterable[Key]:
        if resource == STATEFULSETS:
            yield key_of(thing)
        elif resource == PODS and (owner := controller_of(thing)) is not None and owner["kind"] == "StatefulSet":
            yield thing["metadata"]["namespace"], owner["name"]

    def reconcile(self, key: Key) -> float | None:
        this = self.mirror.get(STATEFULSETS, key)
        if this is None or is_terminating(this):
            return None
        if this["spec"].get("volumeClaimTemplates"):
            raise NotImplementedError(f"StatefulSet {key}: the double plays no volumeClaimTemplates; use an emptyDir")
        revision = self._revision(this)
        pods = {_ordinal(pod): pod for pod in self.mirror.pods_of(this)}
        try:
            self._towards(this, revision, pods)
        finally:
            self._write_status(this, revision)
        return None

    def _towards(self, this: Object, revision: str, pods: dict[int, Object]) -> None:
        """One pass over the ordinals. With OrderedReady it stops at the first pod that is not as it should be."""
        wanted = this["spec"].get("replicas", 1)
        ordered = this["spec"].get("podManagementPolicy", "OrderedReady") == "OrderedReady"
        for ordinal in range(wanted):
            pod = pods.get(ordinal)
            if pod is not None and has_ended(pod) and not is_terminating(pod):
                delete_pod(self.api, pod)
                pod = self.mirror.get(PODS, key_of(pod))
            if pod is None:
                create_pod(self.api, this, _pod(this, revision, ordinal), COMPONENT)
            if ordered and (pod is None or is_terminating(pod) or not is_ready(pod)):
                return
        condemned = [pods[ordinal] for ordinal in sorted(pods, reverse=True) if ordinal >= wanted]
        for pod in condemned:
            if not is_terminating(pod):
                delete_pod(self.api, pod)
            if ordered:
                return
        if not condemned:
            self._roll(this, revision, [pods[ordinal] for ordinal in sorted(pods, reverse=True) if ordinal < wanted])

    def _roll(self, this: Object, revision: str, pods_from_the_top: list[Object]) -> None:
        if (this["spec"].get("updateStrategy") or {}).get("type") == "OnDelete":
            return
        for pod in pods_from_the_top:
            if pod["metadata"]["labels"].get(REVISION_LABEL) != revision:
                if not is_terminating(pod):
                    delete_pod(self.api, pod)
                return
            if not is_ready(pod):
                return

    def _revision(self, this: Object) -> str:
        """The name of the set's own ControllerRevision for its current template, made if it is not there."""
        namespace = this["metadata"]["namespace"]
        digest = template_hash(this["spec"]["template"])
        name = f"{this['metadata']['name']}-{digest}"
        if self.mirror.get(CONTROLLER_REVISIONS, (namespace, name)) is None:
            uid = this["metadata"]["uid"]
            earlier = [
                each
                for each in self.mirror.all(CONTROLLER_REVISIONS, namespace)
                if (owner := controller_of(each)) is not None and owner["uid"] == uid
            ]
            labels = (this["spec"]["template"].get("metadata") or {}).get("labels") or {}
            body = {
                "apiVersion": "apps/v1",
                "kind": "ControllerRevision",
                "metadata": {
                    "name": name,
                    "namespace": namespace,
                    "labels": {**labels, "controller.kubernetes.io/hash": digest},
                    "ownerReferences": [owner_reference(this)],
                },
                "data": {"spec": {"template": {**this["spec"]["template"], "$patch": "replace"}}},
                "revision": 1 + max((each["revision"] for each in earlier), default=0),
            }
            self.api.create(CONTROLLER_REVISIONS, namespace, body)
        return name

    def _write_status(self, this: Object, revision: str) -> None:
        live = self.mirror.get(STATEFULSETS, key_of(this))
        if live is None:
            return
        pods = self.mirror.pods_of(live)
        ready = sum(map(is_ready, pods))
        updated = sum(pod["metadata"]["labels"].get(REVISION_LABEL) == revision for pod in pods)
        wanted = live["spec"].get("replicas", 1)
        old: dict[str, Any] = live.get("status") or {}
        current = old.get("currentRevision") or revision
        if updated == len(pods) == ready == wanted:
            current = revision
        status = {
            "observedGeneration": live["metadata"]["generation"],
            "replicas": len(pods),
            "readyReplicas": ready,
            "availableReplicas": ready,
            "currentReplicas": sum(pod["metadata"]["labels"].get(REVISION_LABEL) == current for pod in pods),
            "updatedReplicas": updated,
            "currentRevision": current,
            "updateRevision": revision,
            "collisionCount": 0,
        }
        if any(old.get(name) != value for name, value in status.items()):
            namespace, name = key_of(live)
            self.api.merge_patch(STATEFULSETS, namespace, name, {"status": status}, subresource="status")


def _ordinal(pod: Object) -> int:
    return int(pod["metadata"]["name"].rpartition("-")[2])


def _pod(this: Object, revision: str, ordinal: int) -> Object:
    name = f"{this['metadata']['name']}-{ordinal}"
    labels = {NAME_LABEL: name, INDEX_LABEL: str(ordinal), REVISION_LABEL: revision}
    pod = pod_from(this["spec"]["template"], this, name, labels)
    pod["spec"]["hostname"] = name
    if service := this["spec"].get("serviceName"):
        pod["spec"]["subdomain"] = service
    return pod
