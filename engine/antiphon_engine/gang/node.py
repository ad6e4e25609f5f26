"""The process that keeps this machine's Ray node and leaves nothing of it behind (`python -m ...gang.node`).

Ray's own ways of starting a node do not fit. `ray.init()` would tie them to the worker's process and leaves agents
behind when that is killed; `ray start` adds a server for remote clients wherever grpcio is installed. So the node is
made as these make it, without dashboard, log monitor, autoscaler and client server, by a process that adopts all
orphans among its descendants (Linux: PR_SET_CHILD_SUBREAPER) and at its end kills them all: Ray's servers and agents,
and the ranks that this node runs. It ends when the worker goes, when the node breaks, or, for a node that joined, when
the head goes.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from antiphon_engine.gang import environment
from antiphon_engine.gang.helper_events import Failed, NodeUp, Progress
from antiphon_engine.gang.helper_side import Parent

_PR_SET_CHILD_SUBREAPER = 36
_UP_S = 60.0
"""For Ray's processes to start. They take 3-8 s on two cores."""
_PROGRESS_S = 10.0
_PROBE_S = 1.0
_PROBES = 5
"""A head that does not take connections for so many probes in a row is gone."""
_KILL_S = 5.0
FAILURE = 1
UNAVAILABLE = 4


class NodeTask(msgspec.Struct, frozen=True):
    ip: str
    """Address of this node, as the others reach it."""
    port: int
    """Of the head. 0: any free one."""
    join: str
    """host:port of the head to join; empty: be the head."""
    join_s: float
    """How long the head may take to come."""
    cpus: int
    gpus: int | None
    """None: what Ray finds."""
    token_file: str
    own_token: bool
    """Without a file: one of its own, which ends with the node. Else a cluster without authentication."""


def main() -> None:
    parent = Parent()
    task = parent.task(NodeTask)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # SIGTERM comes when a whole pod ends: the worker decides then, and closes our input.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Short: sockets' paths lie in it, and those may have about 100 characters.
    folder = Path(tempfile.mkdtemp(prefix="antiphon-ray-"))
    code = 0
    try:
        _keep(parent, task, folder)
    except _NodeError as error:
        parent.tell(Failed(str(error), UNAVAILABLE))
        code = 1
    except BaseException as error:  # noqa: BLE001 - told to the worker; nothing may stay behind
        parent.tell(Failed(f"Ray's node did not start: {type(error).__name__}: {error}", FAILURE))
        code = 1
    _clear_up(folder)
    os._exit(code)


class _NodeError(Exception):
    pass


def _keep(parent: Parent, task: NodeTask, folder: Path) -> None:
    token = task.token_file or (str(_own_token(folder)) if task.own_token else "")
    environment.prepare(os.environ, token, task.ip)
    if task.join:
        _await_head(parent, task)
        if parent.gone.is_set():
            return
    up = threading.Event()
    threading.Thread(target=_give_up, args=(parent, up, folder, task), name="deadline", daemon=True).start()
    node = _start(task, folder)
    up.set()
    parent.tell(NodeUp(str(node.address), token))
    silent = 0
    while not parent.gone.wait(_PROBE_S):
        _reap()
        dead = sorted(str(name) for name, _ in node.dead_processes())
        if dead:
            raise _NodeError(f"Ray's processes ended: {', '.join(dead)}")
        if task.join:
            silent = 0 if _answers(task.join) else silent + 1
            if silent >= _PROBES:
                raise _NodeError(f"the head {task.join} is gone")


def _start(task: NodeTask, folder: Path) -> Any:
    from ray._private.node import Node
    from ray._private.parameter import RayParams
    from ray.util import get_node_ip_address

    # Nodes of one machine, with loopback addresses, cannot all have the same ports: Ray takes them on all addresses.
    fixed = not task.ip.startswith("127.")
    # Ray's own types are stricter than its code.
    make: Any = RayParams
    own_ip: Any = get_node_ip_address
    parameters = make(
        node_ip_address=task.ip or own_ip(),
        gcs_server_port=None if task.join else task.port,
        gcs_address=_resolved(task.join) if task.join else None,
        node_manager_port=environment.NODE_MANAGER_PORT if fixed else 0,
        object_manager_port=environment.OBJECT_MANAGER_PORT if fixed else 0,
        runtime_env_agent_port=environment.RUNTIME_ENV_AGENT_PORT if fixed else None,
        min_worker_port=environment.FIRST_WORKER_PORT if fixed else 0,
        max_worker_port=environment.LAST_WORKER_PORT if fixed else 0,
        num_cpus=task.cpus,
        num_gpus=task.gpus,
        object_store_memory=environment.OBJECT_STORE_BYTES,
        temp_dir=str(folder),
        include_dashboard=False,
        include_log_monitor=False,
        no_monitor=True,
    )
    return Node(parameters, head=not task.join, shutdown_at_exit=False, spawn_reaper=True)


def _own_token(folder: Path) -> Path:
    token = folder / "token"
    with open(os.open(token, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o600), "w") as file:
        file.write(os.urandom(32).hex())
    return token


def _await_head(parent: Parent, task: NodeTask) -> None:
    ends_at = time.monotonic() + task.join_s
    say_at = time.monotonic()
    while not _answers(task.join):
        now = time.monotonic()
        if now >= ends_at:
            raise _NodeError(
                f"the head {task.join} did not come within {task.join_s:.0f} s: see that the gang's first worker runs, "
                "and that its port can be reached from here"
            )
        if now >= say_at:
            parent.tell(Progress(f"waiting for the head {task.join}, for {ends_at - now:.0f} s more"))
            say_at = now + _PROGRESS_S
        if parent.gone.wait(_PROBE_S):
            return


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_PROBE_S).close()
    except OSError:
        return False
    return True


def _resolved(address: str) -> str:
    """Ray compares addresses, so a name becomes one."""
    host, _, port = address.rpartition(":")
    return f"{socket.getaddrinfo(host.strip('[]'), None, socket.AF_INET)[0][4][0]}:{port}"


def _give_up(parent: Parent, up: threading.Event, folder: Path, task: NodeTask) -> None:
    """Ray's start has no deadline that can be relied on, and cannot be interrupted."""
    ends_at = time.monotonic() + _UP_S
    while not up.wait(0.2):
        if not parent.gone.is_set() and time.monotonic() < ends_at:
            continue
        if not parent.gone.is_set():
            at = f"join the head {task.join}" if task.join else "start"
            parent.tell(
                Failed(
                    f"Ray's node did not {at} within {_UP_S:.0f} s: see that the token is the same everywhere, "
                    "and that Ray's ports can be reached",
                    UNAVAILABLE,
                )
            )
        _clear_up(folder)
        os._exit(1)


def _clear_up(folder: Path) -> None:
    """Kill all descendants, also those whose parents are dead, until there are none."""
    ends_at = time.monotonic() + _KILL_S
    while (found := _descendants(os.getpid())) and time.monotonic() < ends_at:
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _reap()
        time.sleep(0.02)
    shutil.rmtree(folder, ignore_errors=True)


def _reap() -> None:
    """Adopted orphans that have ended. Ray's own children are asked after by their `Popen`, which copes."""
    for pid in _descendants(os.getpid(), zombies_only=True):
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def _descendants(root: int, *, zombies_only: bool = False) -> list[int]:
    """From /proc; none where there is no such thing."""
    children: dict[int, list[tuple[int, str]]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            head, _, rest = entry.read_text().rpartition(") ")
            state, parent = rest.split()[:2]
            children.setdefault(int(parent), []).append((int(head.split()[0]), state))
    found: list[int] = []
    waiting = [root]
    while waiting:
        for pid, state in children.get(waiting.pop(), ()):
            waiting.append(pid)
            if state == "Z" or not zombies_only:
                found.append(pid)
    return found


if __name__ == "__main__":
    main()
