"""A plan is carried out on what it was made from."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from antiphon_operator.kube import resources
from antiphon_operator.kube.drift import stamped
from antiphon_operator.kube.errors import Conflict
from antiphon_operator.plan.planned import Apply, Plan
from antiphon_operator.runtime.applier import Applier
from antiphon_operator.runtime.caches import Caches
from antiphon_operator.runtime.metrics import OperatorMetrics
from prometheus_client import CollectorRegistry

from tests.support.kube.api import Api
from tests.support.kube.resources import NAMESPACES
from tests.support.kube_in_process import InProcessClient, api_with_models, served

MODELS, POOLS = served(resources.MODELS), served(resources.POOLS)
Object = dict[str, Any]


class ScaledMeanwhile(InProcessClient):
    """While the Service is applied, a scaler writes the Pool's number, and the watch tells of it."""

    def __init__(self, api: Api, caches: Caches) -> None:
        super().__init__(api)
        self._caches = caches

    async def apply(self, manifest: Object) -> Object:
        if manifest["kind"] == "Service":
            patch = {"spec": {"replicas": 3}}
            self._caches.put("Pool", self.api.merge_patch(POOLS, "chat", "qwen-decode", patch, subresource="scale"))
        return await super().apply(manifest)


async def test_a_number_that_a_scaler_wrote_after_the_plan_was_made_is_not_written_over() -> None:
    api, caches = api_with_models(), Caches()
    api.create(NAMESPACES, None, {"metadata": {"name": "chat"}})
    model = api.create(MODELS, "chat", {"metadata": {"name": "qwen"}, "spec": {"source": {"uri": "demo"}}})
    caches.put("Model", model)
    pool = _child(model, "antiphon.dev/v1alpha1", "Pool", "qwen-decode", {"role": "decode", "replicas": 2})
    caches.put("Pool", api.apply(POOLS, "chat", "qwen-decode", stamped(pool), manager="antiphon-operator"))
    service = _child(model, "v1", "Service", "qwen-workers", {"clusterIP": "None", "ports": [{"port": 9000}]})
    client = ScaledMeanwhile(api, caches)
    applier = Applier(client.as_client(), caches, OperatorMetrics(CollectorRegistry()), lambda: datetime.now(UTC))
    remembered = _annotated(pool, "antiphon.dev/memory", "{}")
    outcome = await applier.carry_out(model, _plan(service, remembered))
    (failure,) = outcome.failures
    assert isinstance(failure.error, Conflict), "so the next look comes soon, and plans with the new number"
    assert api.get(POOLS, "chat", "qwen-decode")["spec"]["replicas"] == 3
    # the next look has seen it
    outcome = await applier.carry_out(model, _plan(_annotated(pool, "antiphon.dev/memory", "{}")))
    assert not outcome.failures
    assert api.get(POOLS, "chat", "qwen-decode")["spec"]["replicas"] == 2


def _plan(*manifests: Object) -> Plan:
    applies = tuple(Apply(manifest) for manifest in manifests)
    return Plan(applies=applies, deletes=(), status={}, pool_status={}, record=None, redis=None)


def _annotated(manifest: Object, name: str, text: str) -> Object:
    return {**manifest, "metadata": {**manifest["metadata"], "annotations": {name: text}}}


def _child(model: Object, api_version: str, kind: str, name: str, spec: Object) -> Object:
    owner = {
        "apiVersion": "antiphon.dev/v1alpha1",
        "kind": "Model",
        "name": model["metadata"]["name"],
        "uid": model["metadata"]["uid"],
        "controller": True,
        "blockOwnerDeletion": False,
    }
    metadata = {"name": name, "namespace": "chat", "ownerReferences": [owner]}
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata, "spec": spec}
