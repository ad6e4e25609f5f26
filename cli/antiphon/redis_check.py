"""Whether a Redis that was named answers, asked once before anything is started.

Workers and gateways ride out a Redis that goes away, so one that was never there would only show as a start without
end.
"""

from __future__ import annotations

from antiphon_telemetry.exit import ExitCode
from antiphon_telemetry.logs import hide_credentials
from redis import Redis
from redis.exceptions import RedisError

from antiphon.children import StartFailed

_DEADLINE_S = 5.0


def check_redis(url: str) -> None:
    """Raises StartFailed when `url` is no address of a Redis, or nothing answers there. Blocks for a bounded time."""
    try:
        client = Redis.from_url(url, socket_connect_timeout=_DEADLINE_S, socket_timeout=_DEADLINE_S)
    except ValueError as error:
        raise StartFailed(ExitCode.BAD_INPUT, f"--redis-url: {hide_credentials(str(error))}") from error
    try:
        with client:
            client.ping()
    except (RedisError, OSError) as error:
        raise StartFailed(
            ExitCode.UNAVAILABLE,
            f"no Redis answers at {hide_credentials(url)} ({error}): start it, correct --redis-url, or "
            "leave the option away to get one that comes along",
        ) from error
