"""How it is served: the pools, what they are made of, and the KV cache between them."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, field

from antiphon_operator.resource.base import LABEL_KEY, Amount, ObjectName, Quantity, Resource, Rule, about, form
from antiphon_operator.resource.source import EXTENDED_RESOURCE

NETWORK = r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?/)?[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"


class Parallelism(Resource, frozen=True, kw_only=True):
    """How one replica is spread over devices."""

    RULES: ClassVar = (
        Rule(
            "(self.tensor * self.pipeline) % self.expert == 0",
            "expert must divide tensor x pipeline: expert parallelism re-uses those devices and adds none",
            lambda it: it.ranks % it.expert == 0,
        ),
    )

    tensor: Annotated[
        int,
        about("Devices that share each layer. They talk at every step: keep them in one node if you can.", ge=1, le=64),
    ] = 1
    pipeline: Annotated[int, about("Stages that the layers are cut into, one after the other.", ge=1, le=64)] = 1
    expert: Annotated[
        int,
        about(
            "Devices that a layer's experts are shared out to. Divides tensor x pipeline and adds none. With engine "
            "torch it is 1 or the same as tensor.",
            ge=1,
            le=64,
        ),
    ] = 1

    @property
    def ranks(self) -> int:
        """Devices of one replica."""
        return self.tensor * self.pipeline


class Resources(Resource, frozen=True, kw_only=True):
    """Of the worker's container."""

    requests: Annotated[
        dict[str, Amount],
        about("What is set aside for a worker pod, by resource name. Devices are derived, not written.", max_length=16),
    ] = field(default_factory=dict)
    limits: Annotated[
        dict[str, Amount],
        about("What a worker pod may use at most, by resource name. Devices are derived, not written.", max_length=16),
    ] = field(default_factory=dict)


class Pool(Resource, frozen=True, kw_only=True):
    """One pool of the Model (not the `Pool` object, which see in `pool.py`)."""

    RULES: ClassVar = (
        Rule(
            "!has(self.gpusPerPod) || (self.parallelism.tensor * self.parallelism.pipeline) % self.gpusPerPod == 0",
            "gpusPerPod must divide parallelism.tensor x parallelism.pipeline: all pods of a replica are alike",
            lambda it: it.gpus_per_pod is None or it.parallelism.ranks % it.gpus_per_pod == 0,
        ),
    )

    replicas: Annotated[
        int,
        about(
            "Copies of the model in this pool. With autoscaling mode Enforce or External it is only where scaling "
            "starts.",
            ge=0,
            le=1000,
        ),
    ] = 1
    parallelism: Annotated[Parallelism, about("How one replica is spread over devices.")] = Parallelism()
    gpus_per_pod: Annotated[
        Annotated[int, Meta(ge=1, le=64)] | None,
        about(
            "Devices of one pod. Fewer than tensor x pipeline make a replica of several pods, which start, fail and go "
            "together. Default: tensor x pipeline, so one pod."
        ),
    ] = None
    resources: Annotated[Resources, about("CPU, memory and other resources of a worker pod.")] = Resources()
    pod_template: Annotated[
        dict[str, Any],
        about(
            "What else the pods should have, as a pod template (`metadata`, `spec`): tolerations, node selector, "
            "volumes, side containers. Containers, env and volumes are merged by name, volume mounts by path; anything "
            "else replaces. The worker is the container `worker`. What a typed field says is refused here."
        ),
    ] = field(default_factory=dict)


class Placement(Resource, frozen=True, kw_only=True):
    """Where pods go."""

    same_topology: Annotated[
        str,
        form(f"^$|{LABEL_KEY}", "write the key of a node label, such as topology.kubernetes.io/zone", max_length=317),
        about(
            "Key of a node label, such as `topology.kubernetes.io/zone`. Pods of the Model prefer nodes with the same "
            "value, so that KV blocks travel a short way. Empty: no preference."
        ),
    ] = ""


class Rdma(Resource, frozen=True, kw_only=True):
    """What a pod needs for RDMA."""

    RULES: ClassVar = (
        Rule(
            "!has(self.networks) || size(self.networks) == 0 || (has(self.resource) && self.resource != '')",
            "networks go with an RDMA device: set rdma.resource, or remove rdma.networks",
            lambda it: not it.networks or it.resource != "",
        ),
    )

    resource: Annotated[
        str,
        form(
            EXTENDED_RESOURCE,
            "write the extended resource of an RDMA device, such as rdma/hca, or none",
            max_length=253,
        ),
        about(
            "Extended resource of an RDMA device, such as `rdma/hca`. Pods that have one lock memory (IPC_LOCK), which "
            "needs a namespace that allows privileged pods. Empty or `none`: no RDMA device."
        ),
    ] = ""
    count: Annotated[int, about("RDMA devices of one pod.", ge=1, le=16)] = 1
    networks: Annotated[
        tuple[
            Annotated[
                str,
                form(NETWORK, "write a network attachment as name or namespace/name", max_length=253, min_length=1),
            ],
            ...,
        ],
        about(
            "Network attachments of each pod, as `name` or `namespace/name`, for clusters that use them.", max_length=16
        ),
    ] = ()


class Transfer(Resource, frozen=True, kw_only=True):
    """How KV blocks travel."""

    RULES: ClassVar = (
        Rule(
            "self.require != 'rdma' || (has(self.rdma.resource) && !(self.rdma.resource in ['', 'none']))",
            "require: rdma needs rdma.resource: name the extended resource of an RDMA device, such as rdma/hca",
            lambda it: it.require != "rdma" or it.rdma.resource not in ("", "none"),
        ),
        Rule(
            "self.require != 'rdma' || self.transport != 'tcp'",
            "transport: tcp has no RDMA: set transport: auto, or require: any",
            lambda it: it.require != "rdma" or it.transport != "tcp",
        ),
    )

    transport: Annotated[
        Literal["auto", "ucx", "tcp"],
        about("How KV blocks are read from peers. auto: UCX where it works, else TCP."),
    ] = "auto"
    require: Annotated[
        Literal["any", "rdma"],
        about("rdma: a link that fell back to TCP makes TransferReady false. any: it is only mentioned."),
    ] = "any"
    rdma: Annotated[Rdma, about("RDMA devices and networks of the pods.")] = Rdma()


class Tier(Resource, frozen=True, kw_only=True):
    """Memory below the device's for KV blocks."""

    type: Annotated[Literal["host"], about("host: memory of the node.")]
    size: Annotated[Quantity, about("How much of it one pod uses, such as 64Gi.")]


class KvCache(Resource, frozen=True, kw_only=True):
    """The cache of keys and values."""

    block_tokens: Annotated[
        int, about("Tokens of one KV block, the unit of re-use and transfer. The same in both pools.", ge=8, le=512)
    ] = 64
    transfer: Annotated[Transfer, about("How KV blocks travel from prefill to decode and between peers.")] = Transfer()
    tiers: Annotated[
        tuple[Tier, ...],
        about(
            "Memory that KV blocks move to when the device is full. Reserved: this version keeps them on the device "
            "and refuses tiers.",
            max_length=4,
        ),
    ] = ()
    isolation: Annotated[
        Literal["PerTenant", "Shared"],
        about(
            "PerTenant: tenants never share cached prompts, so none can tell from the timing what another one asked. "
            "Shared: all tenants do."
        ),
    ] = "PerTenant"


class Proxy(Resource, frozen=True, kw_only=True):
    """The way out of the cluster."""

    http_proxy: Annotated[str, about("Value of HTTP_PROXY.", max_length=512)] = ""
    https_proxy: Annotated[str, about("Value of HTTPS_PROXY.", max_length=512)] = ""
    no_proxy: Annotated[str, about("Value of NO_PROXY. Addresses inside the cluster are added.", max_length=2048)] = ""


class NamedReference(Resource, frozen=True, kw_only=True):
    """An object of the Model's namespace."""

    name: Annotated[ObjectName, about("Name of a Secret in the Model's namespace.")]


class ConfigMapKey(Resource, frozen=True, kw_only=True):
    """A key of a ConfigMap."""

    name: Annotated[ObjectName, about("Name of a ConfigMap in the Model's namespace.")]
    key: Annotated[str, about("Key in it that holds the certificates (PEM).", min_length=1, max_length=253)] = "ca.crt"
