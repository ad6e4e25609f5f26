"""What a kubelet needs from whatever runs its containers: scripted ones, or real processes.

The kubelet owns a pod's status, restarts and back-off; the runtime owns what the containers do. A sandbox is one pod's
place in the runtime (its address, its volumes); a run is one start of one container.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, NamedTuple, Protocol

from tests.support.kube.kubelets.status import Exit

Object = dict[str, Any]


class NotYet(Exception):
    """A container or a pod cannot start now, and is tried again: `reason` is what its waiting state says."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason, self.message = reason, message


class ImageMissing(Exception):
    """The image cannot be pulled. The text is what the registry is said to have answered."""


class TestFault(Exception):
    """The test gave the runtime too little, or the pod asks for what the runtime does not play: tried no more, told in
    the container's status, and raised when the cluster is closed."""

    __test__ = False


class Health(NamedTuple):
    """What the probes say. `failed` names the probe because of which the container is to be restarted."""

    started: bool
    ready: bool
    failed: str = ""


class Run(Protocol):
    container_id: str

    async def ended(self) -> Exit:
        """When it has ended by itself or by `stop`. May be awaited again."""
        ...

    def health(self) -> AsyncGenerator[Health, None]:
        """What the probes say, each time it changes, for as long as anyone asks. Never ends by itself."""
        ...

    async def stop(self, grace_s: float) -> None:
        """In good order within the grace, then by force. Returns when it has ended."""
        ...


class Sandbox(Protocol):
    address: str

    async def start(self, container: Object) -> Run:
        """Raises NotYet and ImageMissing."""
        ...

    def log(self, container: str, *, previous: bool) -> str | None:
        """What the container's current or last run, or the one before it, has said. None: there was no such run."""
        ...

    async def close(self) -> None:
        """Everything of the pod is ended and gone but its logs."""
        ...


class Runtime(Protocol):
    async def open(self) -> None: ...

    async def close(self) -> None:
        """After all sandboxes are closed."""
        ...

    async def sandbox(self, pod: Object) -> Sandbox:
        """Raises NotYet, for instance while a Secret that the pod mounts is missing."""
        ...

    def freeze(self, pod_uid: str) -> None:
        """The pod's node is lost: whatever runs in it stands still."""
        ...

    def thaw(self, pod_uid: str) -> None: ...
