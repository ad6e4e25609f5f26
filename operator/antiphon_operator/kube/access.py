"""Where the API server is, and who the operator is there: from a kubeconfig, or from the pod's service account.

Read once; only the token is read again, because it changes under a running process.
"""

from __future__ import annotations

import os
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from antiphon_operator.kube.errors import AccessError

TOKEN_REREAD_S = 60.0
SERVICE_ACCOUNT_FOLDER = Path("/var/run/secrets/kubernetes.io/serviceaccount")


class Token:
    """A bearer token that never changes."""

    def __init__(self, value: str) -> None:
        self._value = value

    def value(self) -> str:
        """Raises AccessError."""
        return self._value

    def forget(self) -> None:
        """It was not accepted: read it anew before its next use."""


class FileToken(Token):
    """A token in a file that its issuer renews. If the file cannot be read for a while, the one at hand is used on."""

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__("")
        self._path = path
        self._clock = clock
        self._read_at: float | None = None

    def value(self) -> str:
        now = self._clock()
        if self._read_at is None or now - self._read_at >= TOKEN_REREAD_S:
            try:
                self._value = self._path.read_text(encoding="ascii").strip()
            except (OSError, ValueError) as error:
                if not self._value:
                    raise AccessError(f"the token file {self._path} cannot be read: {error}") from error
            self._read_at = now
        return self._value

    def forget(self) -> None:
        self._read_at = None


@dataclass(frozen=True, slots=True)
class ClusterAccess:
    """All that a connection needs."""

    server: str
    """`https://host:port`, perhaps with a path; no slash at its end."""
    tls: ssl.SSLContext | None = None
    """None: plain HTTP."""
    token: Token | None = None
    namespace: str = "default"
    proxy_url: str | None = None
    tls_server_name: str | None = None


def service_account(
    environment: Mapping[str, str] = os.environ, folder: Path = SERVICE_ACCOUNT_FOLDER
) -> ClusterAccess:
    """The pod's own access. Raises AccessError."""
    host, port = environment.get("KUBERNETES_SERVICE_HOST", ""), environment.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise AccessError(
            "there is no way to an API server: give --kubeconfig or KUBECONFIG, or run in a pod with a service account"
        )
    try:
        tls = ssl.create_default_context(cafile=str(folder / "ca.crt"))
        namespace = (folder / "namespace").read_text(encoding="ascii").strip()
    except (OSError, ssl.SSLError) as error:
        raise AccessError(
            f"the service account in {folder} cannot be read ({error}): "
            "the pod needs automountServiceAccountToken: true"
        ) from error
    token = FileToken(folder / "token")
    token.value()
    address = f"[{host}]" if ":" in host else host
    return ClusterAccess(server=f"https://{address}:{port}", tls=tls, token=token, namespace=namespace or "default")
