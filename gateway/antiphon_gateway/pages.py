"""The small pages: which models there are, and what this gateway can serve now."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from antiphon_policy.routing import WorkerRole

from antiphon_gateway.fleet import Fleet, can_decode
from antiphon_gateway.models import Model
from antiphon_gateway.selection import Selection


class ModelObject(msgspec.Struct):
    id: str
    created: int
    max_model_len: int
    object: str = "model"
    owned_by: str = "antiphon"


class ModelList(msgspec.Struct):
    data: list[ModelObject]
    object: str = "list"


class RevisionWorkers(msgspec.Struct):
    """Workers of one revision with a standing stream that are not draining. `decode` includes those that do both."""

    prefill: int = 0
    decode: int = 0


class ModelWorkers(msgspec.Struct):
    """The same for the whole model, by role."""

    decode: int = 0
    prefill: int = 0
    both: int = 0
    revisions: dict[str, RevisionWorkers] = msgspec.field(default_factory=dict)


class Ready(msgspec.Struct):
    ready: bool
    draining: bool
    models: dict[str, ModelWorkers]
    """By key: what a model's workers call it."""
    redis: str


def list_models(fleet: Fleet) -> Iterator[ModelObject]:
    """By the names that clients use."""
    taken = set()
    for name, record in fleet.catalogue.names():
        taken.add(name)
        model = fleet.models.get(record.model)
        created = record.created_at_ms // 1000 or (model.created if model is not None else 0)
        limit = context_limit(model, record.max_context_tokens) if model is not None else record.max_context_tokens
        yield ModelObject(name, created, limit)
    for model in fleet.models:
        # A model with a record has the record's names only.
        if model.name not in taken and fleet.catalogue.record(model.name) is None:
            yield ModelObject(model.name, model.created, model.max_context_tokens)


def context_limit(model: Model, of_record: int) -> int:
    """Tokens of prompt and answer together. `of_record`: 0 says nothing."""
    return min(model.max_context_tokens, of_record or model.max_context_tokens)


def ready_page(fleet: Fleet, selection: Selection, *, draining: bool, ready_without_workers: bool) -> Ready:
    keys = {record.model for record in fleet.catalogue} | fleet.served_models() | {model.name for model in fleet.models}
    models = {key: _count(fleet, selection, key) for key in sorted(keys)}
    served = any(workers.decode + workers.both for workers in models.values())
    healthy = fleet.mirror_healthy
    return Ready(
        ready=not draining and (served or (ready_without_workers and fleet.settled)),
        draining=draining,
        models=models,
        redis="none" if healthy is None else "ok" if healthy else "down",
    )


def _count(fleet: Fleet, selection: Selection, key: str) -> ModelWorkers:
    found = ModelWorkers()
    for group in fleet.groups_of(key):
        own = found.revisions.setdefault(group.revision, RevisionWorkers())
        for client in selection.usable(group):
            role = client.attachment.role if client.attachment is not None else None
            if role is None:
                continue
            if role is WorkerRole.BOTH:
                found.both += 1
            elif role is WorkerRole.DECODE:
                found.decode += 1
            else:
                found.prefill += 1
            if can_decode(role):
                own.decode += 1
            else:
                own.prefill += 1
    return found
