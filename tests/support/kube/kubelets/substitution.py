"""What a process sees in place of a container's paths and Service names. Pure.

A process has no mount namespace and no cluster DNS, so each is replaced in its arguments and variables, from one table
each. The tables are strict, for a path that was silently left alone would make a test of nothing: each mount must be
named by some argument or variable (but for those that the test says nobody names), and what is named under a mount
whose content is fixed must be there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.kube.kubelets.runtime import TestFault

_BEFORE = r"(?:(?<=^)|(?<=[=:,;\s\"'(\[]))"
_AFTER = r"(?=$|[:,;\s\"')\]])"
_SERVICE = re.compile(
    r"(?<![A-Za-z0-9.-])(?P<name>[a-z0-9-]+(?:\.[a-z0-9-]+){1,2})\.svc(?:\.cluster\.local)?\.?(?::(?P<port>[0-9]+))?"
    r"(?![A-Za-z0-9-])"
)


@dataclass(frozen=True, slots=True)
class Mount:
    """`path` in the container is `folder` (or file) on the machine."""

    path: str
    folder: Path
    fixed: bool
    """Its content is given (a Secret, a ConfigMap): a path under it that is not there is a mistake."""


class Mounts:
    """The mounts of one container: `substitute` each of its arguments and variables, then `check_all_used`."""

    def __init__(self, container: str, mounts: Sequence[Mount], unnamed: frozenset[str] = frozenset()) -> None:
        """`unnamed`: mount paths that no argument or variable names."""
        self._container = container
        self._mounts = sorted(mounts, key=lambda mount: len(mount.path), reverse=True)
        self._unnamed = unnamed
        self._used: set[str] = set()

    def substitute(self, text: str) -> str:
        """Raises TestFault for a path that is not under its mount."""
        if not self._mounts:
            return text
        prefixes = "|".join(re.escape(mount.path) for mount in self._mounts)
        path = re.compile(rf"{_BEFORE}(?P<mount>{prefixes})(?P<rest>/[^:,;\s\"')\]]*|){_AFTER}")
        return path.sub(self._one, text)

    def at(self, path: str) -> Path | None:
        """Where a single path is; None: under no mount."""
        for mount in self._mounts:
            if path == mount.path or path.startswith(f"{mount.path}/"):
                self._used.add(mount.path)
                return mount.folder.joinpath(path[len(mount.path) :].lstrip("/"))
        return None

    def check_all_used(self) -> None:
        """Raises TestFault for a mount that the process cannot know of."""
        unseen = [mount.path for mount in self._mounts if mount.path not in self._used | self._unnamed]
        if unseen:
            raise TestFault(
                f"container {self._container}: no argument or variable names its mounts {unseen}, so the process "
                f"cannot see them; name them there, or give them to the runtime as unnamed_mounts"
            )

    def _one(self, match: re.Match[str]) -> str:
        mount = next(each for each in self._mounts if each.path == match["mount"])
        self._used.add(mount.path)
        found = mount.folder.joinpath(match["rest"].lstrip("/"))
        if mount.fixed and not found.exists():
            raise TestFault(
                f"container {self._container}: {match[0]} is named, but what is mounted at {mount.path} has no "
                f"{match['rest']}"
            )
        return str(found) + ("/" if match["rest"].endswith("/") else "")


@dataclass(frozen=True, slots=True)
class ServiceName:
    """`name.namespace` of a Service, or `pod.name.namespace` of a pod behind a headless one, as some text names it."""

    name: str
    port: int | None


def services_named(text: str) -> set[ServiceName]:
    """Each `name.namespace.svc[.cluster.local][:port]` in the text."""
    return {_service_name(match) for match in _SERVICE.finditer(text)}


def services_substituted(text: str, addresses: Mapping[ServiceName, str]) -> str:
    """With each of them replaced by its `address` or `address:port`."""
    return _SERVICE.sub(lambda match: addresses[_service_name(match)], text)


def from_table(table: Mapping[str, str], service: ServiceName) -> str | None:
    """The test's own answer. Keys are `name.namespace.svc` with or without a port, values addresses likewise."""
    if service.port is not None and (found := table.get(f"{service.name}.svc:{service.port}")) is not None:
        return found
    if (found := table.get(f"{service.name}.svc")) is not None:
        return found if service.port is None or ":" in found else f"{found}:{service.port}"
    return None


def _service_name(match: re.Match[str]) -> ServiceName:
    return ServiceName(match["name"], int(match["port"]) if match["port"] else None)
