"""The children as they should be, in the order in which they are to be applied: what others rest on comes first.

A Pool comes before the StatefulSets whose ordinals it remembers, a ControllerRevision before the replicas that are made
from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from antiphon_operator import names
from antiphon_operator.names import Role
from antiphon_operator.plan.clock import stamp
from antiphon_operator.plan.fleet import Birth
from antiphon_operator.plan.identity import replica_id
from antiphon_operator.plan.memory import PoolMemory, write
from antiphon_operator.plan.planned import Apply, Delete
from antiphon_operator.plan.replicas import Replica
from antiphon_operator.plan.revisions import Revision
from antiphon_operator.plan.state import State
from antiphon_operator.render.common import disruption_budget, headless_service, pod_monitor, service_account
from antiphon_operator.render.metadata import labels, metadata
from antiphon_operator.render.network import network_policy
from antiphon_operator.render.pool import pool_object
from antiphon_operator.render.replica import stateful_set

_OURS_ALONE = frozenset({"Pool", "PodDisruptionBudget", "NetworkPolicy", "PodMonitor", "ServiceAccount"})
"""Kinds of which a child that is not wanted any more is deleted."""


def surroundings(state: State) -> list[Apply]:
    """What is there as long as the Model is, whatever its replicas do."""
    model, context = state.model, state.context
    made = [headless_service(model)]
    if not model.spec.service_account_name:
        made.append(service_account(model))
    if context.network_policies:
        made.append(network_policy(model, context))
    made += [disruption_budget(model, pool) for pool in model.pools]
    if context.pod_monitors:
        made.append(pod_monitor(model))
    return [Apply(manifest) for manifest in made]


def pools(state: State, sizes: Mapping[Role, int | None], memories: Mapping[Role, PoolMemory]) -> list[Apply]:
    """The Pool objects, with what is remembered on them. All know the next ordinal."""
    following = max(memory.next_ordinal for memory in memories.values())
    made = []
    for pool in state.model.pools:
        memory = memories[pool.role]
        manifest = pool_object(state.model, pool, sizes[pool.role])
        told = msgspec.structs.replace(memory, next_ordinal=following)
        manifest["metadata"]["annotations"] = {names.MEMORY_ANNOTATION: write(told)}
        made.append(Apply(manifest))
    return made


def born(state: State, birth: Birth, revision: Revision) -> Apply:
    """A new replica."""
    own_id = replica_id(state.model.uid, birth.role, birth.revision, birth.ordinal)
    notes = {names.ORDINAL_ANNOTATION: str(birth.ordinal)}
    return Apply(stateful_set(state.model, birth.role, revision.data, own_id, notes), create_only=True)


def standing(state: State, replica: Replica, whole: str, revision: Revision | None) -> Apply:
    """A replica that is there, with its marks. Only these are written, unless a hand changed its size or image."""
    notes = {names.ORDINAL_ANNOTATION: str(replica.ordinal)}
    if replica.draining_since is not None:
        notes[names.DRAINING_SINCE_ANNOTATION] = stamp(replica.draining_since)
        notes[names.DRAIN_REASON_ANNOTATION] = replica.drain_reason
    if whole:
        notes[names.WHOLE_ANNOTATION] = whole
    if revision is None or replica.role not in revision.data.pools:
        return Apply(_as_it_stands(state, replica, notes), create_only=True)
    manifest = stateful_set(state.model, replica.role, revision.data, replica.id, notes)
    return Apply(manifest, create_only=not _edited(replica.stateful_set, manifest))


def _as_it_stands(state: State, replica: Replica, notes: Mapping[str, str]) -> dict[str, Any]:
    """For a replica whose revision is not kept any more: it cannot be rendered, but it can still be marked."""
    own = labels(state.model, "worker", replica.role, replica.revision) | {names.REPLICA_LABEL: replica.id}
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": metadata(state.model, replica.name, own, notes),
        "spec": dict(replica.stateful_set.get("spec") or {}),
    }


def _edited(live: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    return _size_and_images(live) != _size_and_images(wanted)


def _size_and_images(stateful: Mapping[str, Any]) -> tuple[Any, ...]:
    spec = stateful.get("spec") or {}
    pod = (spec.get("template") or {}).get("spec") or {}
    images = [(c.get("name"), c.get("image")) for c in pod.get("containers") or ()]
    return (spec.get("replicas"), sorted(map(str, images)))


def removed(replica: Replica) -> Delete:
    return Delete("apps/v1", "StatefulSet", replica.name, replica.uid)


def unwanted(state: State, applies: Iterable[Apply], kept_revisions: Iterable[str]) -> list[Delete]:
    """Children of our making that nothing asks for any more. Jobs are the source's; replicas are the fleet's."""
    wanted = {(apply.manifest["kind"], apply.manifest["metadata"]["name"]) for apply in applies}
    given_up = {names.revision_name(state.model.name, name) for name in set(state.revisions) - set(kept_revisions)}
    busy = {names.pool_name(state.model.name, replica.role) for replica in state.replicas}
    found = []
    for child in state.observed.children:
        kind, about = child["kind"], child["metadata"]
        if about.get("deletionTimestamp"):
            continue
        extra = kind in _OURS_ALONE and (kind, about["name"]) not in wanted
        if kind in ("Pool", "PodDisruptionBudget"):
            extra = extra and about["name"] not in busy
        if kind == "ServiceAccount":
            extra = extra and not state.replicas
        if extra or (kind == "ControllerRevision" and about["name"] in given_up):
            found.append(Delete(child["apiVersion"], kind, about["name"], about["uid"]))
    return found
