"""What the planner answers: objects as they should be, the status, and when to look again.

A plan is a value. The runtime carries it out: applies what differs, deletes, writes the status if it changed, and
looks again at `check_after_s` or when something happens. Carrying a plan out twice, or half, does no harm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from antiphon_kvtransfer.model_record import ModelRecord

from antiphon_operator.plan.scaled_records import ScaledModel


@dataclass(frozen=True, slots=True)
class Apply:
    """An object for server-side apply: exactly the fields that the operator owns."""

    manifest: Mapping[str, Any]
    create_only: bool = False
    """Fields beyond metadata are immutable once made (StatefulSet of a replica, ControllerRevision, Job): if it
    exists, only metadata is compared."""


@dataclass(frozen=True, slots=True)
class Delete:
    """An object to delete, by uid, so that a namesake is never hit."""

    api_version: str
    kind: str
    name: str
    uid: str
    propagation: Literal["Background", "Foreground"] = "Background"


@dataclass(frozen=True, slots=True)
class Announce:
    """A Kubernetes Event about the Model. Equal ones are counted, not repeated, by the runtime."""

    kind: Literal["Normal", "Warning"]
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Wants:
    """What the next look should show beside the caches."""

    events_of: frozenset[str] = frozenset()
    """Uids of objects whose warning events are wanted."""
    log_of: frozenset[str] = frozenset()
    """Names of pods whose crashed container's last line is wanted."""
    workers: frozenset[str] = frozenset()
    """Names of pods whose `/status` is wanted."""
    gateways: bool = False


@dataclass(frozen=True, slots=True)
class RedisAccess:
    """The ACL user of one Model. Its password is derived, not stored: see `runtime.credentials`."""

    user: str
    secret_name: str
    rotation: str
    """Another value makes another password; the one before stays valid until all pods have seen the new one."""


@dataclass(frozen=True, slots=True)
class Plan:
    """See the module's docstring. Lists are in the order to be carried out: applies, then deletes."""

    applies: tuple[Apply, ...]
    deletes: tuple[Delete, ...]
    status: Mapping[str, Any]
    """The Model's whole status."""
    pool_status: Mapping[str, Mapping[str, Any]]
    """Status of each Pool, by its name."""
    record: ModelRecord | None
    """What gateways should know. None: nothing (the name belongs to another Model, or the spec is refused)."""
    redis: RedisAccess | None
    gang_secret: str | None = None
    """Name of the Secret with the token of the Model's gangs; None: it has none. The token is random, not derived: see
    `runtime.gang_tokens`."""
    scaled: ScaledModel | None = None
    """What the autoscaler is to know. None: nothing, as the Model has no workers of its own."""
    events: tuple[Announce, ...] = ()
    wants: Wants = Wants()
    check_after_s: float | None = None
    """Look again after so long, whatever happens. None: only when something happens."""
