"""What the Redis user of one Model may do: what its workers' scripts do on the Model's own keys, no more. Pure.

A worker writes its record, its index and the stream of changes, all under the Model's hash tag. It neither reads nor
writes the operator's record of the Model, the list of models, or anything of another Model.

Beside each user the operator keeps a note in Redis: whose it is, and which password was valid before the one of now.
So a rotation outlives the operator that began it. What stands there are SHA-256 sums of derived passwords (256 random
bits each), as Redis itself keeps them: they open nothing.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from urllib.parse import unquote

import msgspec
from antiphon_kvtransfer.keys import ModelKeys

from antiphon_operator.names import redis_user

ACCESS_KEY = "antiphon:access"
"""Hash: user -> note."""
OVERLAP_S = 180.0
"""How long the password before a rotation stays valid: until the kubelets have surely brought the new Secret to all
pods."""

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
    "rename",
    "sadd",
    "scard",
    "srem",
    "unlink",
    "xadd",
    "zadd",
    "zcard",
    "zrem",
    "zremrangebyscore",
)
"""Of the announcer's scripts (heartbeat, delta, whole set, withdrawal). The server checks them inside scripts too."""
CONNECTION_COMMANDS = ("ping", "select", "client|setinfo")
"""What the client library sends by itself."""


_OUR_USER = re.compile(r"user (antiphon-[0-9a-f]{16}) ")
_WORKERS_PATTERN = re.compile(r"~antiphon:\{([^{} ]+)\}:workers( |$)")


@dataclass(frozen=True, slots=True)
class UserAccess:
    """One Model's user."""

    user: str
    model_key: str
    uid: str
    """Of the Model: a namesake's passwords are no passwords of this one."""
    password: str

    def __repr__(self) -> str:
        """Without the password: records end up in logs."""
        return f"UserAccess(user={self.user!r}, model_key={self.model_key!r}, uid={self.uid!r})"


class AccessNote(msgspec.Struct, frozen=True, kw_only=True):
    """What the operator remembers of one user."""

    model: str
    """The model's key."""
    uid: str
    current: str
    """SHA-256 of the password, 64 hex digits."""
    before: str = ""
    """Likewise, of the one before; empty: none is valid beside the current one."""
    before_until_ms: int = 0
    """Unix time."""


def following(note: AccessNote | None, access: UserAccess, now_ms: int) -> AccessNote:
    """The note that follows `note`, by what is wanted now and by the time."""
    current = hashlib.sha256(access.password.encode()).hexdigest()
    if note is None or note.uid != access.uid:
        return AccessNote(model=access.model_key, uid=access.uid, current=current)
    if note.current == current:
        return note if now_ms < note.before_until_ms else msgspec.structs.replace(note, before="", before_until_ms=0)
    return AccessNote(
        model=access.model_key,
        uid=access.uid,
        current=current,
        before=note.current,
        before_until_ms=now_ms + int(OVERLAP_S * 1000),
    )


def encode_note(note: AccessNote) -> bytes:
    return msgspec.json.encode(note, order="sorted")


def decode_note(raw: bytes) -> AccessNote | None:
    """None: not a note of this version. It is written anew."""
    try:
        return msgspec.json.decode(raw, type=AccessNote)
    except msgspec.MsgspecError:
        return None


def model_of_user(rules: str) -> tuple[str, str] | None:
    """(user, model key) of a line of `ACL LIST` that describes a Model's user; None: not a user of ours.

    The name alone does not count: it has to be the one that we would give to the Model whose keys the user may touch.
    """
    user, keys = _OUR_USER.match(rules), _WORKERS_PATTERN.search(rules)
    if user is None or keys is None:
        return None
    key = unquote(keys[1])
    namespace, _, name = key.partition("/")
    return (user[1], key) if redis_user(namespace, name) == user[1] else None


def user_rules(note: AccessNote) -> tuple[str, ...]:
    """Arguments of `ACL SETUSER <user>`: the whole user, so that sending them again changes nothing.

    Connections that stand stay, also when their password goes.
    """
    keys = ModelKeys(note.model)
    patterns = (keys.workers, keys.events, keys.record("*"), keys.index("*"), keys.blocks("*"))
    return (
        "reset",
        "on",
        *(f"#{password}" for password in (note.current, note.before) if password),
        *(f"~{pattern}" for pattern in patterns),
        "-@all",
        *(f"+{command}" for command in (*WORKER_COMMANDS, *CONNECTION_COMMANDS)),
    )
