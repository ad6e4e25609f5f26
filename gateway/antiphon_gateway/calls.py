"""One generating request between its body and its flight: what is known of it, and what reading it gives."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeAlias

import msgspec
from antiphon_proto import worker_pb2 as pb

from antiphon_gateway.answers import Renderer
from antiphon_gateway.explain import Trail
from antiphon_gateway.flight import Flight, Ticket
from antiphon_gateway.models import Prompt
from antiphon_gateway.streaming import Presence
from antiphon_gateway.tools import Parsing


class Started(msgspec.Struct, frozen=True):
    """A request that has been read and understood, ready to be queued."""

    flight: Flight
    renderer: Renderer
    stream: bool


class ChatPlan(msgspec.Struct, frozen=True):
    """What a request for a chat's answer comes to: what workers are given, and how what they say is read."""

    prompt: Prompt
    sampling: pb.Sampling
    parsing: Parsing | None
    """None: the answer is text and nothing else."""
    enough: Callable[[int, str], bool] | None
    """As a flight has it."""


@dataclass(slots=True, eq=False)
class Call:
    """One generating request until it is answered: all that starting it, or starting it again, needs."""

    raw: bytes
    ticket: Ticket
    presence: Presence
    trail: Trail
    stream: bool = False
    """Whether its answer is to be streamed, as soon as that is known."""
    starts: int = 0
    failures: int = 0
    """How often workers have failed on it."""
    woken_at: float = 0.0
    """Monotonic: when it had waited for a Model that woke; 0: it has not."""
    ignored: tuple[str, ...] = ()
    """Fields of the body that have no effect, of which the client is told."""


Starter: TypeAlias = Callable[[Call], Awaitable[Started]]
