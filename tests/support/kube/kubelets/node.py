"""A node of a test cluster: its shape as an object of the API, and whether it is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.support.kube.controllers import clock

Object = dict[str, Any]
NODE_INFO = {
    "architecture": "amd64",
    "bootID": "test",
    "containerRuntimeVersion": "test://1",
    "kernelVersion": "test",
    "kubeProxyVersion": "",
    "kubeletVersion": "v1.36.2",
    "machineID": "test",
    "operatingSystem": "linux",
    "osImage": "test",
    "systemUUID": "test",
}
UNREACHABLE_TAINT = "node.kubernetes.io/unreachable"


@dataclass(frozen=True, slots=True)
class NodeShape:
    name: str
    cpu: str = "64"
    memory: str = "512Gi"
    pods: int = 1000
    extended: Mapping[str, int] = field(default_factory=dict)
    """Extended resources, such as {"nvidia.com/gpu": 8}."""
    labels: Mapping[str, str] = field(default_factory=dict)
    taints: tuple[Mapping[str, str], ...] = ()
    address: str = "127.0.0.1"

    def manifest(self) -> Object:
        capacity = {"cpu": self.cpu, "memory": self.memory, "pods": str(self.pods), "ephemeral-storage": "1Ti"}
        capacity |= {name: str(count) for name, count in self.extended.items()}
        return {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": self.name, "labels": {"kubernetes.io/hostname": self.name, **self.labels}},
            "spec": {"taints": [dict(taint) for taint in self.taints]},
            "status": {
                "capacity": capacity,
                "allocatable": capacity,
                "conditions": [ready_condition("True")],
                "addresses": [{"type": "InternalIP", "address": self.address}],
                "nodeInfo": NODE_INFO,
            },
        }


def ready_condition(status: str) -> Object:
    """`status`: True, or Unknown for a node that is not heard of."""
    time = clock.now()
    reason, message = (
        ("KubeletReady", "kubelet is posting ready status")
        if status == "True"
        else ("NodeStatusUnknown", "Kubelet stopped posting node status.")
    )
    return {
        "type": "Ready",
        "status": status,
        "reason": reason,
        "message": message,
        "lastHeartbeatTime": time,
        "lastTransitionTime": time,
    }


class Node:
    """`awake` is set but while the node is frozen."""

    def __init__(self, shape: NodeShape) -> None:
        self.shape = shape
        self.awake = asyncio.Event()
        self.awake.set()
