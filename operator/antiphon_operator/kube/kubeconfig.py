"""A kubeconfig: the current context's server, certificates and token.

Read as kubectl reads it, but for what would run programs (`exec`, `auth-provider`) or act as somebody else: those are
refused with a sentence, since an operator that silently used other credentials than its user meant would be worse.
"""

from __future__ import annotations

import base64
import binascii
import os
import ssl
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from antiphon_operator.kube.access import ClusterAccess, FileToken, Token, service_account
from antiphon_operator.kube.errors import AccessError

_REFUSED = {
    "exec": "runs a program for its credentials",
    "auth-provider": "uses an auth provider, which Kubernetes has removed",
    "username": "uses a password, which Kubernetes has removed",
    "as": "acts as somebody else",
}


def find_access(kubeconfig: str = "", environment: Mapping[str, str] = os.environ) -> ClusterAccess:
    """From the file given, else KUBECONFIG, else the service account. Raises AccessError."""
    listed = kubeconfig or environment.get("KUBECONFIG", "")
    paths = [Path(part) for part in listed.split(os.pathsep) if part]
    return read_kubeconfig(paths) if paths else service_account(environment)


def read_kubeconfig(paths: list[Path]) -> ClusterAccess:
    """Of several files, the first that names a thing counts. Raises AccessError."""
    config = _Merged()
    for path in paths:
        config.add(path)
    context = config.named("contexts", config.current, "context")
    cluster = config.named("clusters", str(context.get("cluster", "")), "cluster")
    user = config.named("users", str(context["user"]), "user") if context.get("user") else {}
    for field, what in _REFUSED.items():
        if user.get(field):
            raise AccessError(
                f"the user {context.get('user')!r} of the kubeconfig {what} ({field}), which the operator does not do: "
                "give it a kubeconfig with a client certificate, `token` or `tokenFile`"
            )
    server = str(cluster.get("server", "")).rstrip("/")
    if not server.startswith(("http://", "https://")):
        raise AccessError(f"the kubeconfig's server is {server!r}: it must begin with https:// or http://")
    return ClusterAccess(
        server=server,
        tls=_tls(cluster, user) if server.startswith("https://") else None,
        token=_token(user),
        namespace=str(context.get("namespace") or "default"),
        proxy_url=str(cluster["proxy-url"]) if cluster.get("proxy-url") else None,
        tls_server_name=str(cluster["tls-server-name"]) if cluster.get("tls-server-name") else None,
    )


class _Merged:
    """One configuration of several files. Relative paths in it are made absolute, each by its own file."""

    def __init__(self) -> None:
        self.current = ""
        self._named: dict[tuple[str, str], dict[str, Any]] = {}
        self._paths: list[Path] = []

    def add(self, path: Path) -> None:
        try:
            parsed = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise AccessError(f"the kubeconfig {path} cannot be read: {error}") from error
        if not isinstance(parsed, dict):
            raise AccessError(f"the kubeconfig {path} is empty or is not a YAML mapping")
        self._paths.append(path)
        self.current = self.current or str(parsed.get("current-context") or "")
        for section, single in (("contexts", "context"), ("clusters", "cluster"), ("users", "user")):
            for entry in parsed.get(section) or []:
                if isinstance(entry, dict) and isinstance(entry.get(single) or {}, dict):
                    values = {key: _absolute(key, value, path) for key, value in (entry.get(single) or {}).items()}
                    self._named.setdefault((section, str(entry.get("name"))), values)

    def named(self, section: str, name: str, what: str) -> dict[str, Any]:
        try:
            return self._named[section, name]
        except KeyError:
            where = ", ".join(map(str, self._paths))
            raise AccessError(f"the kubeconfig {where} has no {what} {name!r}: set its current-context") from None


def _absolute(key: str, value: Any, path: Path) -> Any:
    files = ("certificate-authority", "client-certificate", "client-key", "tokenFile")
    return str(path.parent / str(value)) if key in files and value else value


def _token(user: Mapping[str, Any]) -> Token | None:
    if user.get("tokenFile"):
        token = FileToken(Path(str(user["tokenFile"])))
        token.value()
        return token
    return Token(str(user["token"])) if user.get("token") else None


def _tls(cluster: Mapping[str, Any], user: Mapping[str, Any]) -> ssl.SSLContext:
    try:
        authority = _bytes(cluster, "certificate-authority")
        context = ssl.create_default_context(cadata=authority.decode("ascii") if authority else None)
        if cluster.get("insecure-skip-tls-verify"):
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        certificate, key = _bytes(user, "client-certificate"), _bytes(user, "client-key")
        if certificate:
            _load_pair(context, certificate, key)
    except (OSError, ValueError, binascii.Error) as error:  # ssl.SSLError is an OSError
        raise AccessError(f"a certificate or key of the kubeconfig cannot be used: {error}") from error
    return context


def _bytes(values: Mapping[str, Any], field: str) -> bytes:
    """Of `FIELD-data` (base64), else of the file that FIELD names; empty if neither is there."""
    if values.get(f"{field}-data"):
        return base64.b64decode(str(values[f"{field}-data"]), validate=True)
    return Path(str(values[field])).read_bytes() if values.get(field) else b""


def _load_pair(context: ssl.SSLContext, certificate: bytes, key: bytes) -> None:
    """The ssl module reads key pairs from files only. This one is ours alone and is gone right after."""
    with tempfile.NamedTemporaryFile(prefix="antiphon-client-") as pair:
        pair.write(certificate + b"\n" + key)
        pair.flush()
        context.load_cert_chain(pair.name)
