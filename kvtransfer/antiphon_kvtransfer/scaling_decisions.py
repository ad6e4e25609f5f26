"""What whoever scales a model leaves in Redis: its decisions with their inputs, and what it remembers between them.

The decisions are a bounded stream, so that a person can see why a pool grew, and have each made again elsewhere
(`antiphon decisions`, `antiphon simulate replay`). Nothing is decided from it: the one that decides keeps its memory
itself, and reads it here only when it starts. Both are bytes to this module; what they mean is
`antiphon_policy.scaling`'s.

One connection a call, and every call has a deadline: it is made every few seconds, never on the way of a request.
"""

from __future__ import annotations

from typing import cast

from antiphon_kvtransfer._redis import COMMAND_DEADLINE_S, SESSION_ERRORS, Backoff, problem, session
from antiphon_kvtransfer.access import RedisAccess
from antiphon_kvtransfer.keys import ModelKeys

DECISION_FIELD = b"decision"
"""Of a stream's entry: one decision as JSON."""
DECISIONS_KEPT = 200
"""A decision with all that it was made from has up to some hundred kilobytes."""
KEPT_FOR_S = 7 * 24 * 3600.0
"""After the last one."""
_PAGE = 20

_WRITE = """
-- KEYS scaling decisions; ARGV memory decision field kept ttl_ms. An empty decision is none.
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[5])
if ARGV[2] ~= '' then
  redis.call('XADD', KEYS[2], 'MAXLEN', ARGV[4], '*', ARGV[3], ARGV[2])
  redis.call('PEXPIRE', KEYS[2], ARGV[5])
end
return 1
"""
_MEMORY = "return redis.call('GET', KEYS[1])"


class DecisionsUnavailable(Exception):
    """Redis could not be asked; the message says why, without credentials."""


async def write_decision(
    access: RedisAccess, model: str, memory: bytes, decision: bytes = b"", *, kept: int = DECISIONS_KEPT
) -> None:
    """Both or neither. `decision`: empty if only the memory is to be renewed; `kept`: how many of them there are then.

    Raises DecisionsUnavailable.
    """
    keys = ModelKeys(model)
    arguments = (memory, decision, DECISION_FIELD, kept, int(KEPT_FOR_S * 1e3))
    try:
        async with session(access, Backoff()) as redis:
            await redis.script(_WRITE, (keys.scaling, keys.decisions), arguments, COMMAND_DEADLINE_S)
    except SESSION_ERRORS as error:
        raise DecisionsUnavailable(problem(error)) from error


async def read_memory(access: RedisAccess, model: str) -> bytes | None:
    """What was remembered last; None: nothing. Raises DecisionsUnavailable."""
    try:
        async with session(access, Backoff()) as redis:
            return cast(
                "bytes | None", await redis.script(_MEMORY, (ModelKeys(model).scaling,), (), COMMAND_DEADLINE_S)
            )
    except SESSION_ERRORS as error:
        raise DecisionsUnavailable(problem(error)) from error


async def read_decisions(access: RedisAccess, model: str) -> list[bytes]:
    """All that are kept, oldest first. Raises DecisionsUnavailable."""
    key, after = ModelKeys(model).decisions, b"0"
    found: list[bytes] = []
    try:
        async with session(access, Backoff()) as redis:
            while page := await redis.read_stream(
                key, after, count=_PAGE, block_ms=None, deadline_s=COMMAND_DEADLINE_S
            ):
                found += [fields[DECISION_FIELD] for _, fields in page if DECISION_FIELD in fields]
                after = page[-1][0]
    except SESSION_ERRORS as error:
        raise DecisionsUnavailable(problem(error)) from error
    return found
