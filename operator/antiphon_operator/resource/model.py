"""The `Model` resource as Python types: the one source of its CRD, its reference page and its defaults.

Written for the person who types the YAML: a field's description is what `kubectl explain` shows. Only
`spec.source` is required. Times are texts such as `500ms`, `90s`, `1m30s`; quantities are Kubernetes quantities.

The types are spread over three modules by what they answer: `source` (what is served), `serving` (with which pools)
and `promise` (how well). All of them are to be had here.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from antiphon_operator.names import MAX_MODEL_NAME
from antiphon_operator.resource.base import (
    Amount,
    Duration,
    OptionalName,
    Quantity,
    Resource,
    Rule,
    about,
    form,
)
from antiphon_operator.resource.promise import Autoscaling, Bounds, Percentiles, Rollout, Sla
from antiphon_operator.resource.serving import (
    ConfigMapKey,
    KvCache,
    NamedReference,
    Parallelism,
    Placement,
    Pool,
    Proxy,
    Rdma,
    Resources,
    Tier,
    Transfer,
)
from antiphon_operator.resource.source import Accelerator, Cache, Engine, SecretReference, Source

__all__ = [
    "NAME_RULES",
    "Accelerator",
    "Amount",
    "Autoscaling",
    "Bounds",
    "Cache",
    "ConfigMapKey",
    "Duration",
    "Engine",
    "KvCache",
    "ModelSpec",
    "NamedReference",
    "Parallelism",
    "Percentiles",
    "Placement",
    "Pool",
    "Proxy",
    "Quantity",
    "Rdma",
    "Resources",
    "Rollout",
    "SecretReference",
    "Sla",
    "Source",
    "Tier",
    "Transfer",
    "parse_spec",
]

SERVED_NAME = r"^[A-Za-z0-9]([A-Za-z0-9._:/-]*[A-Za-z0-9])?$"
_MODEL_NAME = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"
"""Services are named after the Model, and a Service's name starts with a letter and has no dot."""


def _is_model_name(name: str) -> bool:
    return name[:1].isalpha() and name == name.lower() and name.isascii() and name.replace("-", "a").isalnum()


NAME_RULES: tuple[Rule, ...] = (
    Rule(
        f"size(self.metadata.name) <= {MAX_MODEL_NAME}",
        f"metadata.name must have at most {MAX_MODEL_NAME} characters: its pools are named after it",
        lambda name: len(name) <= MAX_MODEL_NAME,
    ),
    Rule(
        f"self.metadata.name.matches('{_MODEL_NAME}')",
        "metadata.name must be lower-case letters, digits and '-', start with a letter and not end with '-': "
        "put the name that clients use, which may be freer, into spec.names",
        lambda name: _is_model_name(name) and not name.endswith("-"),
    ),
)
"""About the Model's own name: `holds` takes the name."""


def _spreads_experts_evenly(pool: Pool | None) -> bool:
    return pool is None or pool.parallelism.expert in (1, pool.parallelism.tensor)


class ModelSpec(Resource, frozen=True, kw_only=True):
    """What a person asks for."""

    RULES: ClassVar = (
        Rule(
            "!has(self.names) || self.names.all(a, self.names.exists_one(b, a == b))",
            "names must differ from each other: remove the one that is there twice",
            lambda it: len(set(it.names)) == len(it.names),
        ),
        Rule(
            "has(self.prefill) || !has(self.autoscaling.prefill)",
            "autoscaling.prefill goes with a prefill pool: add prefill, or remove autoscaling.prefill",
            lambda it: it.prefill is not None or it.autoscaling.prefill == Bounds(),
        ),
        Rule(
            "self.engine.name != 'torch' || ((self.decode.parallelism.expert == 1 || "
            "self.decode.parallelism.expert == self.decode.parallelism.tensor) && (!has(self.prefill) || "
            "self.prefill.parallelism.expert == 1 || "
            "self.prefill.parallelism.expert == self.prefill.parallelism.tensor))",
            "engine torch spreads experts over all ranks of a stage or over none: set parallelism.expert of the pool "
            "to its tensor, or to 1",
            lambda it: it.engine.name != "torch" or all(map(_spreads_experts_evenly, (it.prefill, it.decode))),
        ),
    )

    source: Annotated[Source, about("Where the weights come from.")]
    names: Annotated[
        tuple[
            Annotated[
                str,
                form(
                    SERVED_NAME,
                    "write a name of letters, digits and . _ : / - that starts and ends with a letter or digit",
                    max_length=253,
                    min_length=1,
                ),
            ],
            ...,
        ],
        about(
            "Names that clients use, unique in the cluster: of two Models that claim one, the older has it and the "
            "younger does not start. Default: the Model's own name.",
            max_length=16,
        ),
    ] = ()
    max_context_tokens: Annotated[
        Annotated[int, Meta(ge=1, le=16_777_216)] | None,
        about("Longest prompt with its output. Default: what the model allows."),
    ] = None
    engine: Annotated[Engine, about("What computes.")] = Engine()
    accelerator: Annotated[Accelerator, about("Which devices the workers compute on.")] = Accelerator()
    prefill: Annotated[
        Pool | None,
        about(
            "Pool that computes prompts and hands their KV blocks to the decode pool. Omitted: aggregated serving, "
            "every decode worker does both."
        ),
    ] = None
    decode: Annotated[
        Pool, about("Pool that generates tokens; without a prefill pool it computes the prompts as well.")
    ] = Pool()
    placement: Annotated[Placement, about("Where pods go.")] = Placement()
    kv_cache: Annotated[KvCache, about("The cache of keys and values, and how it travels between pools.")] = KvCache()
    sla: Annotated[Sla, about("Latency to be kept. May be edited at any time and never restarts a pod.")] = Sla()
    autoscaling: Annotated[Autoscaling, about("Who decides how many replicas there are.")] = Autoscaling()
    rollout: Annotated[Rollout, about("How a new revision takes over from the old one.")] = Rollout()
    image_pull_secrets: Annotated[
        tuple[NamedReference, ...], about("Secrets for pulling the worker image.", max_length=16)
    ] = ()
    service_account_name: Annotated[
        OptionalName,
        about(
            "ServiceAccount of the pods. Empty: one of the Model's own, which may do nothing. No token is mounted "
            "either way."
        ),
    ] = ""
    ca_bundle: Annotated[
        ConfigMapKey | None, about("Certificates to trust when fetching the weights, beside the usual ones.")
    ] = None
    proxy: Annotated[Proxy, about("Proxy for fetching the weights.")] = Proxy()


def parse_spec(raw: Any) -> ModelSpec:
    """The spec of a Model object. Raises msgspec.ValidationError, whose text names the field."""
    return msgspec.convert(raw, ModelSpec)
