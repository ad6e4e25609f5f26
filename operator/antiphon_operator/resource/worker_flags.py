"""Options of `antiphon worker` that the operator writes itself, and where a person says the same.

They may be given neither in `engine.args` nor as an `ANTIPHON_*` variable: the operator's own would win, and what a
person wrote would be silently without effect; or theirs would, and the status would tell of something else.
"""

from __future__ import annotations

_OPERATOR = "the operator sets it"

OWNED_FLAGS: dict[str, str] = {
    "model": "write spec.source",
    "name": _OPERATOR,
    "role": _OPERATOR,
    "revision": _OPERATOR,
    "engine": "write spec.engine.name",
    "dtype": "write spec.engine.dtype",
    "block-tokens": "write spec.kvCache.blockTokens",
    "transport": "write spec.kvCache.transfer.transport",
    "max-context-tokens": "write spec.maxContextTokens",
    "tensor-parallel": "write parallelism.tensor of the pool",
    "pipeline-parallel": "write parallelism.pipeline of the pool",
    "expert-parallel": "write parallelism.expert of the pool",
    "worker-id": _OPERATOR,
    "host": _OPERATOR,
    "advertise-host": _OPERATOR,
    "port": _OPERATOR,
    "status-port": _OPERATOR,
    "redis-url": _OPERATOR,
    "redis-username": _OPERATOR,
    "redis-password-file": _OPERATOR,
    "list-model": _OPERATOR,
    "drain-timeout-s": _OPERATOR,
    "ready-file": _OPERATOR,
    "log-json": _OPERATOR,
    "ray-head": _OPERATOR,
    "ray-join": _OPERATOR,
    "ray-token-file": _OPERATOR,
    "ray-node-ranks": "write gpusPerPod of the pool",
    "ray-address": "replicas of a Model have Ray clusters of their own",
}
"""Flag without its dashes -> what to do instead."""

OWNED_VARIABLES = frozenset({"POD_NAME", "POD_NAMESPACE", "POD_IP", "POD_INDEX", "REPLICA", "GANG_HEAD"})
"""The worker's arguments refer to them."""


def flag_of(argument: str) -> str | None:
    """The flag that an argument gives, without dashes, `no-` and value; None for a value."""
    if not argument.startswith("--") or argument == "--":
        return None
    flag = argument[2:].partition("=")[0]
    positive = flag.removeprefix("no-")
    return positive if positive in OWNED_FLAGS else flag


def instead_of_flag(argument: str) -> str | None:
    """What to do instead of giving this argument; None if it may be given."""
    flag = flag_of(argument)
    return None if flag is None else OWNED_FLAGS.get(flag)


def instead_of_variable(name: str) -> str | None:
    """What to do instead of setting this variable; None if it may be set."""
    if name in OWNED_VARIABLES:
        return _OPERATOR
    if not name.startswith("ANTIPHON_"):
        return None
    return OWNED_FLAGS.get(name.removeprefix("ANTIPHON_").lower().replace("_", "-"))
