"""Whether a worker that is asked to change its role may: the rules of `Worker.SetRole`.

Whoever may reach the worker's gRPC port may ask: what keeps others from it is the network (docs/worker.md).
"""

from __future__ import annotations

from antiphon_proto import worker_pb2 as wire

from antiphon_worker.parallel import checked_shape
from antiphon_worker.role import ChangeOutdated, ChangeRefused
from antiphon_worker.service import WorkerContext


def change_role(context: WorkerContext, request: wire.SetRoleRequest) -> bool:
    """Do it; False: it has that role already. Raises ChangeRefused or ChangeOutdated, and all stays as it is."""
    identity, role = context.identity, context.role
    if request.incarnation not in ("", identity.incarnation):
        raise ChangeOutdated(f"{identity.worker_id} is incarnation {identity.incarnation}, not {request.incarnation}")
    if request.role != role.wire:
        refusal = _refusal(context)
        if refusal:
            raise ChangeRefused(f"{identity.worker_id} keeps the role {role.name}: {refusal}")
    return role.change(request.role, request.expected_role_version)


def _refusal(context: WorkerContext) -> str:
    """Why it cannot; empty: it can."""
    options = context.options
    if context.drain.on:
        return "it is draining"
    if options.revision:
        return "it is a replica of a Model's pool, and pools do not share replicas: change their sizes instead"
    ranks = checked_shape(options).ranks
    if ranks > 1:
        return f"it has {ranks} ranks, whose shape is chosen for its pool: start a worker of the other one instead"
    return ""
