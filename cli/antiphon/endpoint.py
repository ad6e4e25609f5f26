"""How commands that ask an endpoint reach it: its URL, the key they show, and whether a proxy stands between."""

from __future__ import annotations

import ipaddress
import urllib.parse
import urllib.request
from pathlib import Path

from antiphon.configuration import ConfigurationError


def base_url(url: str, flag: str) -> str:
    """What `/v1/...` is put behind. `flag` is named where `url` is none. Raises ConfigurationError."""
    text = url.strip().rstrip("/")
    try:
        parts = urllib.parse.urlsplit(text)
        sound = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        sound = False
    if not sound:
        raise ConfigurationError(f"{flag} {url!r} is no URL of a gateway: say http://HOST:PORT")
    return text.removesuffix("/v1")


def api_key(path: str) -> str:
    """The key in the file that --api-key-file names; empty for no file. Raises ConfigurationError."""
    if not path:
        return ""
    try:
        key = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--api-key-file {path} cannot be read: {error}") from error
    if not key or len(key.split()) != 1:
        raise ConfigurationError(f"--api-key-file {path} holds no key: it is to hold one, and nothing else")
    return key


def opener(url: str) -> urllib.request.OpenerDirector:
    """No proxy stands between a machine and itself."""
    host = urllib.parse.urlsplit(url).hostname or ""
    try:
        own = ipaddress.ip_address(host).is_loopback
    except ValueError:
        own = host == "localhost"
    return urllib.request.build_opener(urllib.request.ProxyHandler({})) if own else urllib.request.build_opener()
