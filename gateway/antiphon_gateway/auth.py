"""Who asks: API keys, tenants, and the salt that keeps tenants' KV caches apart.

The keys file is JSON, {key: tenant} or {key: {"tenant": tenant, "priority": the highest class that it may use}}; the
class is normal where it is not said. Without a file, everybody is the tenant "". Keys are kept only as digests, and the
look-up is by digest, so that its time says nothing about a key. A tenant's cache salt is derived here and nowhere
else: no part of a request can choose it, only part the tenant's own cache further.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
from antiphon_policy.admission import Priority

from antiphon_gateway import errors
from antiphon_gateway.wishes import PRIORITIES

_SALT_DOMAIN = b"antiphon/cache-salt/v1"
_OWN_SALT_DOMAIN = b"antiphon/cache-salt/request/v1/"


class ApiKeysError(ValueError):
    """The keys file cannot be used; the message says why."""


def cache_salt(tenant: str) -> bytes:
    """The salt of a tenant's block chains; the empty tenant has the empty salt."""
    return hmac.digest(_SALT_DOMAIN, tenant.encode(), "sha256") if tenant else b""


def own_salt(salt: bytes, asked: str) -> bytes:
    """For a request that asks for a salt: a part of the cache that has `salt`, and never one outside of it."""
    return hmac.digest(salt, _OWN_SALT_DOMAIN + asked.encode(), "sha256")


class Caller(NamedTuple):
    """Whom a key belongs to."""

    tenant: str
    most: Priority = Priority.NORMAL
    """The highest class that it may use."""


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    """A key's value in the file where it says more than the tenant."""

    tenant: str
    priority: Literal["high", "normal", "low"] = "normal"


_ANYBODY = Caller("")


class ApiKeys:
    """Keys and their tenants; `None` instead of keys: no key is asked for."""

    def __init__(self, callers: Mapping[str, str | Caller] | None) -> None:
        self._callers = (
            None
            if callers is None
            else {
                _digest(key): Caller(caller) if isinstance(caller, str) else caller for key, caller in callers.items()
            }
        )

    @classmethod
    def load(cls, path: str) -> ApiKeys:
        """Read the keys file; an empty path: no key is asked for. Raises ApiKeysError."""
        if not path:
            return cls(None)
        try:
            entries = msgspec.json.decode(Path(path).read_bytes(), type=dict[str, str | _Entry])
        except OSError as error:
            raise ApiKeysError(f"the API keys file {path} cannot be read: {error}") from error
        except msgspec.DecodeError as error:
            raise ApiKeysError(f"the API keys file {path} is not a JSON object of key: tenant: {error}") from error
        callers = {
            key: Caller(entry) if isinstance(entry, str) else Caller(entry.tenant, PRIORITIES[entry.priority])
            for key, entry in entries.items()
        }
        if not all(callers) or not all(caller.tenant for caller in callers.values()):
            raise ApiKeysError(f"the API keys file {path} has an empty key or an empty tenant")
        return cls(callers)

    def caller(self, authorization: str) -> Caller:
        """Whom an Authorization header stands for. Raises ApiError (401)."""
        if self._callers is None:
            return _ANYBODY
        scheme, _, key = authorization.partition(" ")
        caller = self._callers.get(_digest(key.strip())) if scheme.lower() == "bearer" else None
        if caller is None:
            raise errors.unauthorized()
        return caller

    def tenant(self, authorization: str) -> str:
        """The tenant of an Authorization header. Raises ApiError (401)."""
        return self.caller(authorization).tenant


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
