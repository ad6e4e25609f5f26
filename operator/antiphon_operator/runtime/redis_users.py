"""The users of Models in Redis: written, followed through rotations, and removed with their Models.

The part of `redis_records` that is about users. Which users should be there is a value here; what stands in Redis is
looked at once at each start of the server, because an operator before this one may have left more there: a password
that is still valid for a while, and users of Models that were deleted while no operator ran. Those go as soon as all
Models are known (`retain`); only users that are ours by name and by the keys that they may touch are ever removed.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar, cast

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from antiphon_operator.runtime.redis_access import (
    ACCESS_KEY,
    OVERLAP_S,
    AccessNote,
    UserAccess,
    decode_note,
    encode_note,
    following,
    model_of_user,
    user_rules,
)

_log = logging.getLogger("antiphon.operator.redis")

BATCH = 100
NOTES_TTL_S = 24 * 3600.0
"""After an operator has gone for good, its notes go too."""
_T = TypeVar("_T")

Execute = Callable[[Any], Awaitable[list[Any]]]
"""Sends a pipeline; refusals come back as answers."""


class RedisUsers:
    """See the module's docstring. All methods belong to one event loop."""

    def __init__(self, *, grace_s: float, clock: Callable[[], float], now_ms: Callable[[], int]) -> None:
        """`grace_s`: between the end of a Model and that of its user. `clock` is monotonic, `now_ms` Unix time."""
        self._grace_s = grace_s
        self._clock = clock
        self._now_ms = now_ms
        self._wanted: dict[str, UserAccess] = {}
        self._changed: set[str] = set()
        self._notes: dict[str, AccessNote] = {}
        self._found: dict[str, str] = {}
        """Users of ours that stood in Redis when it was looked at, and whose."""
        self._leaving: dict[str, float] = {}
        """Users that are to go, and when."""
        self._is_orphan: Callable[[str], bool] | None = None
        self._trouble = ""

    # -- what should be there

    def put(self, access: UserAccess) -> bool:
        """True if that is news."""
        self._leaving.pop(access.user, None)
        if self._wanted.get(access.user) == access:
            return False
        self._wanted[access.user] = access
        self._changed.add(access.user)
        return True

    def remove(self, user: str) -> None:
        """The user goes after the grace, so that workers that are ending can still say goodbye."""
        if user in self._wanted or user in self._found:
            self._leaving.setdefault(user, self._clock() + self._grace_s)

    def retain(self, is_orphan: Callable[[str], bool]) -> None:
        """From now on, users go whose model's key is an orphan."""
        self._is_orphan = is_orphan
        self._remove_orphans()

    def renew(self) -> None:
        self._changed |= self._wanted.keys()

    def due_at(self) -> float:
        """When there is something to do by the time alone, on the monotonic clock."""
        now, now_ms = self._clock(), self._now_ms()
        ends = [note.before_until_ms for user, note in self._notes.items() if note.before and user in self._wanted]
        return min((*(now + (end_ms - now_ms) / 1000 for end_ms in ends), *self._leaving.values()), default=math.inf)

    # -- Redis

    async def look(self, redis: Redis) -> None:
        """What stands there. What this process knows already counts more."""
        try:
            notes = await cast(Awaitable[dict[bytes, bytes]], redis.hgetall(ACCESS_KEY))
            lines: list[bytes] = await cast(Any, redis).execute_command("ACL", "LIST")
        except ResponseError as refusal:
            self._refused([refusal])
            return
        for name, raw in notes.items():
            note = decode_note(raw)
            if note is not None:
                self._notes.setdefault(name.decode(), note)
                self._found[name.decode()] = note.model
        self._found |= dict(ours for line in lines if (ours := model_of_user(line.decode())) is not None)
        self._remove_orphans()

    async def write(self, redis: Redis, execute: Execute) -> None:
        now = self._clock()
        for users in batches([user for user, at in self._leaving.items() if at <= now]):
            pipeline = redis.pipeline(transaction=False)
            for user in users:
                pipeline.execute_command("ACL", "DELUSER", user)
                pipeline.hdel(ACCESS_KEY, user)
            self._refused(await execute(pipeline))
            for user in users:
                self._gone(user, now)
        self._end_overlaps()
        for users in batches(self._changed):
            accesses = [self._wanted[user] for user in users]
            pipeline = redis.pipeline(transaction=False)
            for access in accesses:
                note = self._note(access)
                # The note first: were this cut off between the two, it could be made good.
                pipeline.hset(ACCESS_KEY, access.user, cast(str, encode_note(note)))
                pipeline.execute_command("ACL", "SETUSER", access.user, *user_rules(note))
            pipeline.pexpire(ACCESS_KEY, int(NOTES_TTL_S * 1000))
            self._refused(await execute(pipeline))
            # Also what was refused: it is tried again with the next renewal, as with everything else.
            self._changed -= {access.user for access in accesses if self._wanted.get(access.user) == access}

    # -- inside

    def _note(self, access: UserAccess) -> AccessNote:
        before = self._notes.get(access.user)
        note = self._notes[access.user] = following(before, access, self._now_ms())
        if note.before and (before is None or before.before != note.before):
            _log.info("%s: new Redis password; the one before stays valid for %g s", access.model_key, OVERLAP_S)
        return note

    def _end_overlaps(self) -> None:
        now_ms = self._now_ms()
        for user in self._wanted:
            note = self._notes.get(user)
            if note is not None and note.before and note.before_until_ms <= now_ms:
                self._changed.add(user)

    def _gone(self, user: str, now: float) -> None:
        """Unless it came back meanwhile."""
        if self._leaving.get(user, now + 1) > now:
            self._changed.add(user)
            return
        del self._leaving[user]
        for known in (self._wanted, self._notes, self._found):
            known.pop(user, None)
        self._changed.discard(user)

    def _remove_orphans(self) -> None:
        if self._is_orphan is None:
            return
        orphans = [user for user, key in self._found.items() if user not in self._wanted and self._is_orphan(key)]
        for user in orphans:
            self.remove(user)
        if orphans:
            _log.info("%d users of Models that are gone leave redis", len(orphans))

    def _refused(self, answers: Iterable[Any]) -> None:
        """Users that could not be kept are no reason to leave gateways without records."""
        refusals = [answer for answer in answers if isinstance(answer, ResponseError)]
        if refusals and not self._trouble:
            _log.warning(
                "redis does not let the operator keep the users of Models (%s): give its user the command acl",
                refusals[0],
            )
        self._trouble = str(refusals[0]) if refusals else ""


def batches(items: Iterable[_T]) -> Iterable[list[_T]]:
    """Of what there is now: the collection may change between batches."""
    snapshot = iter(list(items))
    while batch := list(itertools.islice(snapshot, BATCH)):
        yield batch


def unix_ms() -> int:
    return time.time_ns() // 1_000_000
