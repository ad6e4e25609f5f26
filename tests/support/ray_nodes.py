"""A Ray cluster of several nodes on this machine (`ray.cluster_utils.Cluster`), and what Ray itself says of it.

with RayNodes(NodeSize(cpus=0)) as nodes:
    node = nodes.add(NodeSize(cpus=2))
    ... nodes.address ...
    nodes.remove(node)
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import psutil
import pytest
from antiphon_engine.gang import environment

from tests.support.gang import descendants, until


@dataclass(frozen=True, slots=True)
class NodeSize:
    cpus: int
    gpus: int = 0
    """What the node claims to have; Ray believes it."""


@dataclass(frozen=True, slots=True)
class Group:
    """A placement group, as the cluster's head has it."""

    state: str
    strategy: str
    bundles: list[dict[str, float]]
    nodes: list[str]
    """Id of each bundle's node; empty where it has none."""


@dataclass(frozen=True, slots=True)
class Rank:
    """A rank's actor, alive."""

    pid: int
    node: str


class RayNodes:
    def __init__(self, head: NodeSize, *others: NodeSize) -> None:
        self._sizes = (head, *others)
        self._patch = pytest.MonkeyPatch()
        # Short: sockets' paths lie in it.
        self._folder = tempfile.mkdtemp(prefix="ray-nodes-")
        self.token_file = str(Path(self._folder) / "token")

    def __enter__(self) -> Self:
        Path(self.token_file).write_text(os.urandom(32).hex())
        wanted = dict(os.environ)
        environment.prepare(wanted, self.token_file, "")
        for name in set(os.environ) | set(wanted):
            if name in wanted:
                self._patch.setenv(name, wanted[name])
            else:
                self._patch.delenv(name)
        # Ray reads its environment when it is imported.
        import ray._private.utils
        from ray.cluster_utils import Cluster

        # It would tell the whole machine, in a folder that need not be there, which cluster to join.
        self._patch.setattr(ray._private.utils, "write_ray_address", lambda address: None)
        self._cluster = Cluster()
        try:
            self.ids = [self.add(size) for size in self._sizes]
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._cluster.shutdown()
        self._patch.undo()
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def add(self, size: NodeSize) -> str:
        """Ray's id of the new node, which is up. Ray gives it 30 s, which a busy machine may exceed: then once more."""
        before = set(descendants(os.getpid()))
        try:
            return self._add(size)
        except Exception as error:
            if "timed out during startup" not in str(error):
                raise
            for process in set(descendants(os.getpid())) - before:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            return self._add(size)

    def _add(self, size: NodeSize) -> str:
        head: dict[str, Any] = {"include_dashboard": False, "no_monitor": True, "temp_dir": self._folder}
        node = self._cluster.add_node(
            num_cpus=size.cpus,
            num_gpus=size.gpus,
            object_store_memory=environment.OBJECT_STORE_BYTES,
            include_log_monitor=False,
            **(head if self._cluster.head_node is None else {}),
        )
        return str(node.node_id)

    def remove(self, node_id: str) -> None:
        """kill -9 of a node's servers. The head learns it by itself."""
        (node,) = [node for node in self._cluster.worker_nodes if node.node_id == node_id]
        self._cluster.remove_node(node, allow_graceful=False)

    def until_known_dead(self, node_id: str) -> None:
        """The head counts a removed node among its own until five of its questions, 3 s apart, had no answer."""
        state = self._cluster.global_state
        until(lambda: all(node["NodeID"] != node_id for node in state.node_table() if node["Alive"]), 60.0)

    @contextmanager
    def stopped(self, node_id: str) -> Iterator[None]:
        """A node that stands still with all its ranks, and then goes on."""
        (node,) = [node for node in self._cluster.worker_nodes if node.node_id == node_id]
        pids = [info.process.pid for infos in node.all_processes.values() for info in infos]
        pids += [rank.pid for rank in self.ranks() if rank.node == node_id]
        processes = [psutil.Process(pid) for pid in pids]
        for process in processes:
            process.suspend()
        try:
            yield
        finally:
            for process in processes:
                with suppress(psutil.NoSuchProcess):
                    process.resume()

    # -- what the head says

    def groups(self) -> list[Group]:
        """Those that are not removed."""
        tables: dict[str, dict[str, Any]] = self._cluster.global_state.placement_group_table()
        return [
            Group(
                str(table["state"]),
                str(table["strategy"]),
                [table["bundles"][number] for number in sorted(table["bundles"])],
                [table["bundles_to_node_id"][number] for number in sorted(table["bundles"])],
            )
            for table in tables.values()
            if table["state"] != "REMOVED"
        ]

    def ranks(self) -> list[Rank]:
        actors: dict[str, dict[str, Any]] = self._cluster.global_state.actor_table(None, None, "ALIVE")
        return [
            Rank(int(actor["Pid"]), str(actor["Address"]["NodeID"]))
            for actor in actors.values()
            if "RankProcess" in actor["ActorClassName"]
        ]

    def taken(self) -> dict[str, float]:
        """How much of each resource of the live nodes is not free."""
        free: Counter[str] = Counter()
        total: Counter[str] = Counter()
        state = self._cluster.global_state
        available = state.available_resources_per_node()
        for node in state.node_table():
            if node["Alive"]:
                for device in ("CPU", "GPU"):
                    total[device] += node["Resources"].get(device, 0)
                    free[device] += available.get(node["NodeID"], {}).get(device, 0)
        return {device: total[device] - free[device] for device in total if total[device] != free[device]}

    def until_nothing_is_left(self) -> None:
        """No group, no rank, every place free."""
        try:
            until(lambda: not self.groups() and not self.ranks() and not self.taken())
        except AssertionError as error:
            raise AssertionError(f"left: {self.groups()}, {self.ranks()}, {self.taken()}") from error
