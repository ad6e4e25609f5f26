"""Telling a running worker its role: `Worker.SetRole`, called once, with a deadline."""

from __future__ import annotations

import grpc
import grpc.aio
from antiphon_policy.route_records import WorkerRole
from antiphon_proto import worker_pb2 as wire
from antiphon_proto.worker_pb2_grpc import WorkerStub

DEADLINE_S = 5.0

_WIRE = {WorkerRole.PREFILL: wire.Role.ROLE_PREFILL, WorkerRole.DECODE: wire.Role.ROLE_DECODE}
_OPTIONS = (("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1))


class RoleRefused(Exception):
    """The worker keeps its role; the message is its own."""


class WorkerUnreachable(Exception):
    """It did not answer: whether it changed its role is not known. Ask again."""


async def set_role(address: str, role: WorkerRole) -> int:
    """Have the worker at `address` (gRPC, host:port) be a prefill or a decode worker; its role's version.

    Raises RoleRefused or WorkerUnreachable.
    """
    try:
        async with grpc.aio.insecure_channel(address, options=_OPTIONS) as channel:
            reply = await WorkerStub(channel).SetRole(wire.SetRoleRequest(role=_WIRE[role]), timeout=DEADLINE_S)
            return int(reply.role_version)
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
            raise RoleRefused(error.details() or "it said no more") from error
        raise WorkerUnreachable(f"{error.code().name}: {error.details()}") from error
