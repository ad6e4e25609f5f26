"""The `Model` resource as Python types: the one source of its CRD, its reference page and its defaults.

Written for the person who types the YAML: a field's description is what `kubectl explain` shows. Only
`spec.source` is required. Times are texts such as `500ms`, `90s`, `1m30s`; quantities are Kubernetes quantities.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct


class _Camel(Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=False):
    """Python's snake_case is the YAML's camelCase."""


DURATION = r"^([0-9]{1,9}(ms|s|m|h))+$"
Duration = Annotated[str, Meta(max_length=32, pattern=DURATION)]
Quantity = Annotated[str, Meta(max_length=32, pattern=r"^[0-9]{1,12}(\.[0-9]{1,6})?(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?$")]


class SecretReference(_Camel, frozen=True, kw_only=True):
    name: Annotated[str, Meta(description="Name of a Secret in the Model's namespace.", min_length=1, max_length=253)]
    key: Annotated[str, Meta(description="Key in the Secret.", min_length=1, max_length=253)] = "token"


class Cache(_Camel, frozen=True, kw_only=True):
    type: Annotated[
        Literal["Ephemeral", "Claim"],
        Meta(
            description="Ephemeral: each pod downloads into its own volume. Claim: a Job downloads once into a claim."
        ),
    ] = "Ephemeral"
    size: Annotated[Quantity | None, Meta(description="Size limit of the ephemeral volume.")] = None
    claim_name: Annotated[str, Meta(description="PersistentVolumeClaim (RWX or ROX).", max_length=253)] = ""


class Source(_Camel, frozen=True, kw_only=True):
    uri: Annotated[
        str,
        Meta(
            description="Where the weights are: `hf://org/name`, `pvc://claim/path`, or `demo`.",
            min_length=1,
            max_length=512,
            pattern=r"^(demo|hf://[A-Za-z0-9._-]+/[A-Za-z0-9._-]+|pvc://[a-z0-9]([-a-z0-9.]*[a-z0-9])?(/[A-Za-z0-9._/-]*)?)$",
        ),
    ]
    revision: Annotated[str, Meta(description="Branch, tag or commit.", max_length=128)] = ""
    secret_ref: SecretReference | None = None
    cache: Cache = Cache()


class Engine(_Camel, frozen=True, kw_only=True):
    name: Annotated[Literal["torch", "timed", "vllm"], Meta(description="Which engine computes.")] = "torch"
    dtype: Annotated[Literal["bfloat16", "float32"], Meta(description="Number format of weights and KV.")] = "bfloat16"
    image: Annotated[str, Meta(description="Worker image; empty: the operator's.", max_length=512)] = ""
    args: Annotated[
        tuple[Annotated[str, Meta(max_length=512)], ...],
        Meta(description="Further options of `antiphon worker`.", max_length=64),
    ] = ()


class Accelerator(_Camel, frozen=True, kw_only=True):
    resource: Annotated[
        str, Meta(description="Extended resource of one device, such as `nvidia.com/gpu`, or `none`.", max_length=253)
    ] = ""
    """Empty: `none` for `demo` and for the timed engine, else `nvidia.com/gpu`."""


class Parallelism(_Camel, frozen=True, kw_only=True):
    tensor: Annotated[int, Meta(ge=1, le=64)] = 1
    pipeline: Annotated[int, Meta(ge=1, le=64)] = 1
    expert: Annotated[int, Meta(ge=1, le=64)] = 1

    @property
    def ranks(self) -> int:
        return self.tensor * self.pipeline


class Resources(_Camel, frozen=True, kw_only=True):
    requests: Annotated[dict[str, Quantity], Meta(max_length=16)] = {}
    limits: Annotated[dict[str, Quantity], Meta(max_length=16)] = {}


class Pool(_Camel, frozen=True, kw_only=True):
    """One pool of the Model (not the `Pool` object, which see in `pool.py`)."""

    replicas: Annotated[int, Meta(ge=0, le=1000)] = 1
    parallelism: Parallelism = Parallelism()
    gpus_per_pod: Annotated[int | None, Meta(ge=1, le=64)] = None
    """None: ranks, so one pod."""
    resources: Resources = Resources()
    pod_template: dict[str, Any] = {}


class Placement(_Camel, frozen=True, kw_only=True):
    same_topology: Annotated[str, Meta(max_length=317)] = ""


class Rdma(_Camel, frozen=True, kw_only=True):
    resource: Annotated[str, Meta(max_length=253)] = ""
    count: Annotated[int, Meta(ge=1, le=16)] = 1
    networks: Annotated[tuple[Annotated[str, Meta(max_length=253)], ...], Meta(max_length=16)] = ()


class Transfer(_Camel, frozen=True, kw_only=True):
    transport: Literal["auto", "ucx", "tcp"] = "auto"
    require: Literal["any", "rdma"] = "any"
    rdma: Rdma = Rdma()


class Tier(_Camel, frozen=True, kw_only=True):
    type: Literal["host"]
    size: Quantity


class KvCache(_Camel, frozen=True, kw_only=True):
    block_tokens: Annotated[int, Meta(ge=8, le=512)] = 64
    transfer: Transfer = Transfer()
    tiers: Annotated[tuple[Tier, ...], Meta(max_length=4)] = ()
    isolation: Literal["PerTenant", "Shared"] = "PerTenant"


class Percentiles(_Camel, frozen=True, kw_only=True):
    p95: Duration | None = None


class Sla(_Camel, frozen=True, kw_only=True):
    ttft: Percentiles = Percentiles()
    tpot: Percentiles = Percentiles()


class Bounds(_Camel, frozen=True, kw_only=True):
    min: Annotated[int, Meta(ge=0, le=1000)] = 1
    max: Annotated[int, Meta(ge=1, le=1000)] = 8


class Autoscaling(_Camel, frozen=True, kw_only=True):
    mode: Literal["Disabled", "Advise", "Enforce", "External"] = "Disabled"
    prefill: Bounds = Bounds()
    decode: Bounds = Bounds()
    gpu_budget: Annotated[int | None, Meta(ge=1, le=100_000)] = None


class Rollout(_Camel, frozen=True, kw_only=True):
    surge: Annotated[int, Meta(ge=0, le=1000)] = 1
    max_unavailable: Annotated[int, Meta(ge=0, le=1000)] = 0
    progress_deadline: Duration = "15m"
    drain_timeout: Duration = "10m"
    paused: bool = False


class Proxy(_Camel, frozen=True, kw_only=True):
    http_proxy: Annotated[str, Meta(max_length=512)] = ""
    https_proxy: Annotated[str, Meta(max_length=512)] = ""
    no_proxy: Annotated[str, Meta(max_length=2048)] = ""


class NamedReference(_Camel, frozen=True, kw_only=True):
    name: Annotated[str, Meta(min_length=1, max_length=253)]


class ConfigMapKey(_Camel, frozen=True, kw_only=True):
    name: Annotated[str, Meta(min_length=1, max_length=253)]
    key: Annotated[str, Meta(min_length=1, max_length=253)] = "ca.crt"


class ModelSpec(_Camel, frozen=True, kw_only=True):
    source: Source
    names: Annotated[tuple[Annotated[str, Meta(min_length=1, max_length=253)], ...], Meta(max_length=16)] = ()
    """Empty: the Model's own name."""
    max_context_tokens: Annotated[int | None, Meta(ge=1, le=16_777_216)] = None
    engine: Engine = Engine()
    accelerator: Accelerator = Accelerator()
    prefill: Pool | None = None
    """None: aggregated serving, every decode worker does both."""
    decode: Pool = Pool()
    placement: Placement = Placement()
    kv_cache: KvCache = KvCache()
    sla: Sla = Sla()
    autoscaling: Autoscaling = Autoscaling()
    rollout: Rollout = Rollout()
    image_pull_secrets: Annotated[tuple[NamedReference, ...], Meta(max_length=16)] = ()
    service_account_name: Annotated[str, Meta(max_length=253)] = ""
    """Empty: one of the Model's own, without a mounted token."""
    ca_bundle: ConfigMapKey | None = None
    proxy: Proxy = Proxy()


def parse_spec(raw: object) -> ModelSpec:
    """The spec of a Model object. Raises msgspec.ValidationError, whose text names the field."""
    return msgspec.convert(raw, ModelSpec)
