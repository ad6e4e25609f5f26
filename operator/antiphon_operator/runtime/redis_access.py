"""What the Redis user of one Model may do: what its workers' scripts do on the Model's own keys, no more. Pure.

A worker writes its record, its index and the stream of changes, all under the Model's hash tag. It neither reads nor
writes the operator's record of the Model, the list of models, or anything of another Model.
"""

from __future__ import annotations

from dataclasses import dataclass

from antiphon_kvtransfer.keys import ModelKeys

WORKER_COMMANDS = (
    "eval",
    "time",
    "get",
    "set",
    "del",
    "hget",
    "hmget",
    "hset",
    "pexpire",
    "pexpireat",
    "pttl",
    "sadd",
    "scard",
    "srem",
    "xadd",
    "zadd",
    "zrem",
    "zremrangebyscore",
)
"""Of the announcer's scripts (heartbeat, delta, whole set, withdrawal). The server checks them inside scripts too."""
CONNECTION_COMMANDS = ("ping", "select", "client|setinfo")
"""What the client library sends by itself."""


@dataclass(frozen=True, slots=True)
class UserAccess:
    """One Model's user. While a password is being rotated there are two."""

    user: str
    model_key: str
    passwords: tuple[str, ...]

    def __repr__(self) -> str:
        """Without passwords: records end up in logs."""
        return f"UserAccess(user={self.user!r}, model_key={self.model_key!r}, {len(self.passwords)} passwords)"


def user_rules(access: UserAccess) -> tuple[str, ...]:
    """Arguments of `ACL SETUSER <user>`: the whole user, so that sending them again changes nothing.

    Connections that stand stay, also when their password goes.
    """
    keys = ModelKeys(access.model_key)
    patterns = (keys.workers, keys.events, keys.record("*"), keys.index("*"), keys.blocks("*"))
    return (
        "reset",
        "on",
        *(f">{password}" for password in access.passwords),
        *(f"~{pattern}" for pattern in patterns),
        "-@all",
        *(f"+{command}" for command in (*WORKER_COMMANDS, *CONNECTION_COMMANDS)),
    )
