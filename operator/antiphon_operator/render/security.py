"""The two security profiles of a Model's pods.

*Restricted* is what the `restricted` Pod Security Standard asks for, and a read-only root file system with it. *RDMA*
is used when `kvCache.transfer.rdma.resource` is set: the same, with the device, the IPC_LOCK capability that pinning
memory may need, and the secondary networks. IPC_LOCK is refused by the `baseline` standard too, so the namespace has
to allow `privileged` pods; nothing else in the profile needs that.
"""

from __future__ import annotations

from antiphon_operator.render.metadata import Manifest
from antiphon_operator.resource.effective import EffectiveModel

USER_ID = 10001
NETWORKS_ANNOTATION = "k8s.v1.cni.cncf.io/networks"


def uses_rdma(model: EffectiveModel) -> bool:
    return model.spec.kv_cache.transfer.rdma.resource not in ("", "none")


def pod_security() -> Manifest:
    """Of every pod. The group owns the pod's volumes, so that the Secret is readable without being world-readable."""
    return {
        "runAsNonRoot": True,
        "runAsUser": USER_ID,
        "runAsGroup": USER_ID,
        "fsGroup": USER_ID,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def container_security(*, rdma: bool = False) -> Manifest:
    """Of every container; `rdma` for those that register memory with a device."""
    capabilities: Manifest = {"drop": ["ALL"]}
    if rdma:
        capabilities["add"] = ["IPC_LOCK"]
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": capabilities,
    }


def rdma_resources(model: EffectiveModel) -> dict[str, str]:
    """Devices that one worker container asks for."""
    rdma = model.spec.kv_cache.transfer.rdma
    return {rdma.resource: str(rdma.count)} if uses_rdma(model) else {}


def network_annotations(model: EffectiveModel) -> dict[str, str]:
    """Secondary networks, as Multus reads them."""
    rdma = model.spec.kv_cache.transfer.rdma
    return {NETWORKS_ANNOTATION: ",".join(rdma.networks)} if uses_rdma(model) and rdma.networks else {}
