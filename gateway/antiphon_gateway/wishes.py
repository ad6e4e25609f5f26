"""What a client says of how its request is to be treated: its session, its priority, how long it will wait.

    x-session-id            any text up to 128 characters; a hint for routing only
    x-antiphon-priority     high, normal or low
    x-request-timeout-ms    the client gives up after so long

A body may name the priority too: `service_tier` as OpenAI does (priority, default, auto, flex), or `priority` as vLLM
does (a number: below 0 before others, above 0 after them). The header wins over both, `service_tier` over `priority`.
Nobody gets more than its key allows (`auth`); who asks for more gets that, without an error, as with OpenAI.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from antiphon_policy.admission import Priority

from antiphon_gateway.errors import invalid
from antiphon_gateway.sessions import MAX_ID_CHARACTERS

PRIORITIES = {"high": Priority.HIGH, "normal": Priority.NORMAL, "low": Priority.LOW}
"""By the names that keys and headers use."""

_TIERS = {
    "priority": Priority.HIGH,
    "auto": Priority.NORMAL,
    "default": Priority.NORMAL,
    "scale": Priority.NORMAL,
    "flex": Priority.LOW,
}


@dataclass(frozen=True, slots=True)
class Wishes:
    """From a request's head."""

    session: str = ""
    priority: Priority | None = None
    """None: not said."""
    timeout_s: float | None = None
    most: Priority = Priority.NORMAL
    """What its key allows."""

    def granted(self, service_tier: str | None = None, number: int | None = None) -> Priority:
        """The class that the request waits in, with what its body says. Raises ApiError (400)."""
        wanted = Priority.NORMAL
        if self.priority is not None:
            wanted = self.priority
        elif service_tier is not None:
            if service_tier not in _TIERS:
                raise invalid(f"service_tier must be one of {', '.join(_TIERS)}.", param="service_tier")
            wanted = _TIERS[service_tier]
        elif number:
            wanted = Priority.HIGH if number < 0 else Priority.LOW
        return min(wanted, self.most)


NO_WISHES = Wishes()


def read_wishes(header: Callable[[bytes], str], most: Priority) -> Wishes:
    """From a request's head (a header that is not there is empty). Raises ApiError (400)."""
    session, priority = header(b"x-session-id"), header(b"x-antiphon-priority")
    timeout_ms = header(b"x-request-timeout-ms")
    if not (session or priority or timeout_ms) and most is Priority.NORMAL:
        return NO_WISHES
    wanted = None
    if priority:
        wanted = PRIORITIES.get(priority.strip().lower())
        if wanted is None:
            raise invalid("The header x-antiphon-priority must be high, normal or low.")
    timeout_s = None
    if timeout_ms:
        # Ten digits are a hundred days.
        if not (timeout_ms.isascii() and timeout_ms.isdigit() and 0 < len(timeout_ms) <= 10 and int(timeout_ms)):
            raise invalid("The header x-request-timeout-ms must be a whole number of milliseconds above 0.")
        timeout_s = int(timeout_ms) / 1000.0
    return Wishes(session if len(session) <= MAX_ID_CHARACTERS else "", wanted, timeout_s, most)
