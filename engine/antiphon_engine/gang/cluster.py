"""The Ray cluster that a worker's ranks are placed in: one that is there already, or one that lives as long as it.

A cluster of the worker's own is on loopback (`local`), or for other machines to join (`head`: `--ray-head`). Either
is kept by a helper process (`node`), which the worker closes last and which ends by itself when the worker does. A
rank's death does not touch it: the gang is placed anew in the same cluster. One whose node broke is started anew.
"""

from __future__ import annotations

import enum
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from antiphon_engine.gang import environment
from antiphon_engine.gang.errors import GangStartError, GangStopped
from antiphon_engine.gang.helper import Helper, HelperEnded
from antiphon_engine.gang.helper_events import Failed, NodeUp, Progress
from antiphon_engine.gang.node import NodeTask

logger = logging.getLogger("antiphon.engine.gang")

NODE_MODULE = "antiphon_engine.gang.node"
CLOSE_S = 15.0
START_S = 120.0
LISTEN_S = 0.2
FAILURE = 1


class ClusterKind(enum.Enum):
    LOCAL = "local"
    HEAD = "head"
    EXISTING = "existing"


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    kind: ClusterKind = ClusterKind.LOCAL
    address: str = ""
    """EXISTING: host:port of its head. A node of it has to run on this machine."""
    node_ip: str = ""
    """HEAD: this node's address, as joiners reach it."""
    token_file: str = ""
    """Empty: LOCAL makes a token of its own; others run without, which Ray advises against."""
    node_ranks: int = 0
    """Ranks that this machine takes; 0: one a core (LOCAL: as many as are wanted)."""


@dataclass(frozen=True, slots=True)
class ClusterAddress:
    address: str
    token_file: str
    node_ip: str
    nodes_may_come: bool


class RayCluster:
    """Used from one thread at a time."""

    def __init__(self, settings: ClusterSettings) -> None:
        self._settings = settings
        self._node: Helper | None = None
        self._up: NodeUp | None = None

    def ensure(self, ranks: int, progress: Callable[[str], None], stop: threading.Event) -> ClusterAddress:
        """Its address; started first where it is ours and does not run. Raises GangStartError, GangStopped."""
        settings = self._settings
        if settings.kind is ClusterKind.EXISTING:
            ip = environment.LOOPBACK if environment.is_on_loopback_alone(settings.address) else ""
            return ClusterAddress(settings.address, settings.token_file, ip, True)
        local = settings.kind is ClusterKind.LOCAL
        ip = environment.LOOPBACK if local else settings.node_ip
        if self._node is not None and not self._runs():
            self.close()
        if self._node is None:
            cores = environment.usable_cores()
            task = NodeTask(
                ip=ip,
                port=0 if local else environment.HEAD_PORT,
                join="",
                join_s=0.0,
                cpus=settings.node_ranks or (max(ranks, cores) if local else cores),
                gpus=None,
                token_file=settings.token_file,
                own_token=local,
            )
            progress(f"starting Ray ({settings.kind.value})")
            self._node = Helper(NODE_MODULE, task)
            self._up = await_node(self._node, progress, stop, START_S)
        assert self._up is not None
        return ClusterAddress(self._up.address, self._up.token_file, ip, not local)

    @property
    def node_pid(self) -> int | None:
        """Of the process that keeps this machine's node; None: there is none of ours."""
        return None if self._node is None else self._node.pid

    def close(self) -> None:
        """End what is ours. Idempotent."""
        node, self._node, self._up = self._node, None, None
        if node is not None:
            node.close(CLOSE_S)

    def _runs(self) -> bool:
        assert self._node is not None
        try:
            while (event := self._node.next(0.0)) is not None:
                if isinstance(event, Failed):
                    logger.error("%s", event.message)
                    return False
        except HelperEnded as error:
            logger.error("%s", error)
            return False
        return True


def await_node(node: Helper, progress: Callable[[str], None], stop: threading.Event, deadline_s: float) -> NodeUp:
    """Raises GangStartError, GangStopped; the caller closes the helper."""
    ends_at = time.monotonic() + deadline_s
    while True:
        try:
            event = node.next(LISTEN_S)
        except HelperEnded as error:
            raise GangStartError(f"Ray's node did not start: {error}", FAILURE) from error
        match event:
            case NodeUp():
                return event
            case Failed(message, exit_code):
                raise GangStartError(message, exit_code)
            case Progress(text):
                progress(text)
        if stop.is_set():
            raise GangStopped
        if time.monotonic() >= ends_at:
            raise GangStartError(f"Ray's node did not start within {deadline_s:.0f} s", FAILURE)
