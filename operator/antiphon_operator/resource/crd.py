"""The custom resource definitions, made from the types: a structural schema, rules with sentences, kubectl's columns.

`python -m antiphon_operator.resource.crd` writes them as templates into the chart; `--check` only says whether they
are there as they should be. They are kept when the release goes (Models are users' data) and are never edited by hand.

A CRD gives a field its default only where the default is a value of its own: what is empty stays unwritten, so that a
stored Model is no longer than what a person wrote. Every list, map and text is bounded, because the API server
refuses a CRD whose rules could cost without limit.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from antiphon_operator.names import GROUP, VERSION
from antiphon_operator.resource import generated
from antiphon_operator.resource.base import Rule
from antiphon_operator.resource.model import NAME_RULES, ModelSpec
from antiphon_operator.resource.pool import PoolSpec
from antiphon_operator.resource.schema import object_schema, rule_schema, without_defaults
from antiphon_operator.resource.status import ModelStatus, PoolStatus

FOLDER = Path("charts/antiphon/templates/crds")
_HEADER = "# Made by `python -m antiphon_operator.resource.crd` from the types: do not edit.\n"


def _column(name: str, path: str, *, kind: str = "string", wide: bool = False, about: str = "") -> dict[str, Any]:
    column: dict[str, Any] = {"name": name, "type": kind, "jsonPath": path}
    if about:
        column["description"] = about
    if wide:
        column["priority"] = 1
    return column


_READY = '.status.conditions[?(@.type=="Ready")]'

MODEL_COLUMNS = (
    _column("Ready", f"{_READY}.status", about="Whether a request to the Model is answered now."),
    _column("Prefill", ".status.pools.prefill.summary", about="Ready and desired replicas of the prefill pool."),
    _column("Decode", ".status.pools.decode.summary", about="Ready and desired replicas of the decode pool."),
    _column("TTFT", ".status.sla.ttft.summary", about="Time to first token, 95th percentile: measured/promised."),
    _column("TPOT", ".status.sla.tpot.summary", about="Time per output token, 95th percentile: measured/promised."),
    _column("Phase", ".status.phase", wide=True),
    _column("Reason", f"{_READY}.reason", wide=True),
    _column("Revision", ".status.revision.current", wide=True),
    _column("Endpoint", ".status.endpoint", wide=True),
    _column("Age", ".metadata.creationTimestamp", kind="date"),
)
POOL_COLUMNS = (
    _column("Role", ".spec.role"),
    _column("Desired", ".spec.replicas", kind="integer"),
    _column("Replicas", ".status.replicas", kind="integer"),
    _column("Ready", ".status.readyReplicas", kind="integer"),
    _column("Draining", ".status.draining", kind="integer", wide=True),
    _column("Failures", ".status.failures", kind="integer", wide=True),
    _column("Reason", ".status.reason", wide=True),
    _column("Age", ".metadata.creationTimestamp", kind="date"),
)


def model_crd() -> dict[str, Any]:
    """`models.antiphon.dev`."""
    return _definition(
        kind="Model",
        plural="models",
        short_names=["mdl"],
        columns=MODEL_COLUMNS,
        subresources={"status": {}},
        schema=_root(
            "One language model, served behind the cluster's gateways: its weights, its prefill and decode pools, and "
            "the latency it should keep.",
            object_schema(ModelSpec, "What is asked for. Only `source` is required."),
            object_schema(ModelStatus, "What is, as the operator sees it."),
            NAME_RULES,
        ),
    )


def pool_crd() -> dict[str, Any]:
    """`pools.antiphon.dev`."""
    return _definition(
        kind="Pool",
        plural="pools",
        short_names=["mpool"],
        columns=POOL_COLUMNS,
        subresources={
            "status": {},
            "scale": {
                "specReplicasPath": ".spec.replicas",
                "statusReplicasPath": ".status.replicas",
                "labelSelectorPath": ".status.selector",
            },
        },
        schema=_root(
            "One pool of a Model, made by the operator under a stable name. Scale it (kubectl scale, HPA, KEDA) where "
            "its Model has autoscaling mode External.",
            object_schema(PoolSpec, "What the pool should be."),
            object_schema(PoolStatus, "What it is."),
        ),
    )


def _root(
    description: str, spec: dict[str, Any], status: dict[str, Any], name_rules: tuple[Rule, ...] = ()
) -> dict[str, Any]:
    metadata: dict[str, Any] = {"type": "object"}
    root: dict[str, Any] = {"type": "object", "description": description, "required": ["spec"]}
    if name_rules:
        # the bound that any object's name has, said here so that the rules about it have a bounded cost
        metadata["properties"] = {"name": {"type": "string", "maxLength": 253}}
        root["x-kubernetes-validations"] = [rule_schema(rule) for rule in name_rules]
    root["properties"] = {
        "apiVersion": {"type": "string", "description": f"{GROUP}/{VERSION}"},
        "kind": {"type": "string", "description": "Kind of the object."},
        "metadata": metadata,
        "spec": spec,
        "status": without_defaults(status),
    }
    return root


def _definition(
    *,
    kind: str,
    plural: str,
    short_names: list[str],
    columns: Sequence[dict[str, Any]],
    subresources: dict[str, Any],
    schema: dict[str, Any],
) -> dict[str, Any]:
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{plural}.{GROUP}",
            "annotations": {"helm.sh/resource-policy": "keep"},
            "labels": {"app.kubernetes.io/name": "antiphon", "app.kubernetes.io/component": "crds"},
        },
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": kind,
                "listKind": f"{kind}List",
                "plural": plural,
                "singular": kind.lower(),
                "shortNames": short_names,
                # not in "all": `kubectl delete all --all` must not take what serves users
                "categories": ["antiphon"],
            },
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "additionalPrinterColumns": list(columns),
                    "subresources": subresources,
                    "schema": {"openAPIV3Schema": schema},
                }
            ],
        },
    }


class _Plain(yaml.SafeDumper):
    """No anchors: the same object twice is written twice."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def crd_files() -> dict[str, str]:
    """File name -> contents, as they belong into the chart."""
    files = {}
    for crd in (model_crd(), pool_crd()):
        text = yaml.dump(crd, Dumper=_Plain, sort_keys=False, width=110, allow_unicode=True)
        files[f"{crd['spec']['names']['plural']}.yaml"] = _HEADER + text
    return files


def main(arguments: Sequence[str] | None = None) -> int:
    return generated.run("antiphon_operator.resource.crd", __doc__, FOLDER, crd_files(), arguments)


if __name__ == "__main__":
    sys.exit(main())
