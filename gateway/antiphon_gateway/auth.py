"""Who asks: API keys, tenants, and the salt that keeps tenants' KV caches apart.

The keys file is JSON, {key: tenant}. Without one, everybody is the tenant "". Keys are kept only as digests, and the
look-up is by digest, so that its time says nothing about a key. A tenant's cache salt is derived here and nowhere
else: no part of a request can choose it.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from pathlib import Path

import msgspec

from antiphon_gateway import errors

_SALT_DOMAIN = b"antiphon/cache-salt/v1"


class ApiKeysError(ValueError):
    """The keys file cannot be used; the message says why."""


def cache_salt(tenant: str) -> bytes:
    """The salt of a tenant's block chains; the empty tenant has the empty salt."""
    return hmac.digest(_SALT_DOMAIN, tenant.encode(), "sha256") if tenant else b""


class ApiKeys:
    """Keys and their tenants; `None` instead of keys: no key is asked for."""

    def __init__(self, tenants: Mapping[str, str] | None) -> None:
        self._tenants = None if tenants is None else {_digest(key): tenant for key, tenant in tenants.items()}

    @classmethod
    def load(cls, path: str) -> ApiKeys:
        """Read the keys file; an empty path: no key is asked for. Raises ApiKeysError."""
        if not path:
            return cls(None)
        try:
            tenants = msgspec.json.decode(Path(path).read_bytes(), type=dict[str, str])
        except OSError as error:
            raise ApiKeysError(f"the API keys file {path} cannot be read: {error}") from error
        except msgspec.DecodeError as error:
            raise ApiKeysError(f"the API keys file {path} is not a JSON object of key: tenant: {error}") from error
        if not all(tenants) or not all(tenants.values()):
            raise ApiKeysError(f"the API keys file {path} has an empty key or an empty tenant")
        return cls(tenants)

    def tenant(self, authorization: str) -> str:
        """The tenant of an Authorization header. Raises ApiError (401)."""
        if self._tenants is None:
            return ""
        scheme, _, key = authorization.partition(" ")
        tenant = self._tenants.get(_digest(key.strip())) if scheme.lower() == "bearer" else None
        if tenant is None:
            raise errors.unauthorized()
        return tenant


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
