"""Do KV blocks travel as the Model asks? From the links that workers tell, and from what the namespace allows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any

from antiphon_operator.plan.identity import jitter
from antiphon_operator.plan.replicas import Replica
from antiphon_operator.plan.state import State
from antiphon_operator.plan.verdict import Verdict
from antiphon_operator.render.security import uses_rdma
from antiphon_operator.resource.reasons import Reason

LOOK_PERIOD_S = 60
_LOOK_S = 6
_ENFORCE = "pod-security.kubernetes.io/enforce"


def judge_transfer(state: State, replicas: Iterable[Replica], before: Mapping[str, Any] | None) -> Verdict:
    """`before`: the condition as it stands. Links that are not known now are as they were told last."""
    model = state.model
    if model.aggregated:
        return Verdict("True", Reason.NOT_NEEDED, "Aggregated serving: no KV block travels between pools.")
    level = state.observed.namespace_labels.get(_ENFORCE, "")
    if uses_rdma(model) and level in ("baseline", "restricted"):
        return Verdict(
            "False",
            Reason.NEEDS_PRIVILEGED_NAMESPACE,
            f"Pods with RDMA lock memory, which pod security level {level} of namespace {model.namespace} refuses: "
            f"kubectl label namespace {model.namespace} {_ENFORCE}=privileged --overwrite",
        )
    links = _links(state, replicas)
    if not links:
        return _as_before(before)
    transfer = model.spec.kv_cache.transfer
    expected = transfer.require == "rdma" or uses_rdma(model) or transfer.transport == "ucx"
    if "tcp" in links and expected:
        required = transfer.require == "rdma"
        return Verdict(
            "False" if required else "True",
            Reason.TCP_FALLBACK,
            f"Some pairs use tcp (links: {', '.join(sorted(links))}): look at spec.kvCache.transfer.rdma and at the "
            f"workers' logs (kubectl logs -n {model.namespace} -l antiphon.dev/model={model.name})"
            + ("." if required else "; requests are served, first tokens may come later."),
        )
    return Verdict("True", Reason.CONNECTED, f"Links between workers: {', '.join(sorted(links))}.")


def _links(state: State, replicas: Iterable[Replica]) -> set[str]:
    views = state.observed.workers
    return {
        link for replica in replicas if replica.live and replica.worker in views for link in views[replica.worker].links
    }


def _as_before(before: Mapping[str, Any] | None) -> Verdict:
    if before and before.get("reason") in (Reason.CONNECTED, Reason.TCP_FALLBACK):
        return Verdict(before["status"], Reason(before["reason"]), str(before.get("message", "")))
    return Verdict("Unknown", Reason.WAITING, "No worker has told of a link yet: it shows after the first requests.")


def next_turn_at(state: State) -> datetime:
    """When a worker's page is to be looked at next."""
    shift = jitter("links", state.model.uid) * LOOK_PERIOD_S
    passed = (state.now.timestamp() + shift) % LOOK_PERIOD_S
    return state.now + timedelta(seconds=LOOK_PERIOD_S - passed)


def wanted_pages(state: State, replicas: Iterable[Replica]) -> frozenset[str]:
    """Workers whose page should be looked at for their links: one decode worker for a few seconds of each minute, at
    a moment of its own for each Model."""
    if state.model.aggregated:
        return frozenset()
    ready = [replica for replica in replicas if replica.role == "decode" and replica.live and replica.ready]
    if not ready:
        return frozenset()
    shift = jitter("links", state.model.uid) * LOOK_PERIOD_S
    passed = (state.now.timestamp() + shift) % LOOK_PERIOD_S
    turn = int((state.now.timestamp() + shift) // LOOK_PERIOD_S)
    return frozenset({ready[turn % len(ready)].worker}) if passed < _LOOK_S else frozenset()
