"""Where Redis is and as whom to speak to it.

A password that stands in a file is read again for each connection, so a rotated one needs no restart: the server goes
on with the connections that it has, and the next one brings the new password. Neither URL nor password is ever logged
or put into an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from redis.asyncio import Redis


class RedisUrlError(Exception):
    """The Redis URL cannot be used. The message says why, without credentials, and what to do."""


@dataclass(frozen=True, slots=True)
class RedisAccess:
    """See the module's docstring. `str(access)` is fit for logs."""

    url: str
    username: str = ""
    password_file: str = ""

    def check(self) -> None:
        """Raises RedisUrlError unless this could be a Redis."""
        check_url(self.url)
        if (self.username or self.password_file) and "@" in urlsplit(self.url).netloc:
            raise RedisUrlError(
                f"the Redis URL {self} has a user or password of its own: leave it out of the URL, or leave away "
                "--redis-username and --redis-password-file"
            )

    def password(self) -> str:
        """What the file says now. Reads from disk. Raises OSError."""
        return Path(self.password_file).read_text().strip() if self.password_file else ""

    def __str__(self) -> str:
        return redacted(self.url)


def access_of(redis: str | RedisAccess) -> RedisAccess:
    """A URL alone is an access too."""
    return redis if isinstance(redis, RedisAccess) else RedisAccess(redis)


def redacted(url: str) -> str:
    """The URL without user, password and query."""
    try:
        parts = urlsplit(url)
        port = f":{parts.port}" if parts.port else ""
        return f"{parts.scheme}://{parts.hostname or ''}{port}{parts.path}"
    except ValueError:
        return "(an unreadable URL)"


def check_url(url: str) -> None:
    """Raises RedisUrlError unless the URL is one of redis://, rediss://, unix://."""
    try:
        scheme = urlsplit(url).scheme
        if scheme in ("redis", "rediss", "unix"):
            Redis.from_url(url)
            return
    except (ValueError, TypeError):
        # Not kept as the cause: its own text may quote the URL.
        raise RedisUrlError(
            f"the Redis URL {redacted(url)} is not valid: it must look like redis://[user:password@]host:port/database"
        ) from None
    raise RedisUrlError(
        f"the Redis URL {redacted(url)} has no scheme that is known: use redis://, rediss:// (TLS) or unix://"
    )
