"""KEDA's ScaledObject, judged by its public documentation (keda.sh: "ScaledObject specification" and "Prometheus",
2.15 to 2.22): which fields there are, which are needed, and of what type. Strict about what it does not know."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jsonschema

_NAME = {"type": "string", "pattern": r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", "maxLength": 253}
_COUNT = {"type": "integer", "minimum": 0}
_NUMBER_AS_TEXT = {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?$"}


def _object(required: tuple[str, ...], **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "required": list(required),
        "properties": properties,
        "additionalProperties": False,
    }


PROMETHEUS = _object(
    ("serverAddress", "query", "threshold"),
    serverAddress={"type": "string", "pattern": "^https?://"},
    query={"type": "string", "minLength": 1},
    threshold=_NUMBER_AS_TEXT,
    activationThreshold=_NUMBER_AS_TEXT,
    namespace={"type": "string"},
    customHeaders={"type": "string"},
    queryParameters={"type": "string"},
    ignoreNullValues={"enum": ["true", "false"]},
    unsafeSsl={"enum": ["true", "false"]},
    timeout={"type": "string"},
    authModes={"type": "string"},
)

_TRIGGER = _object(
    ("type", "metadata"),
    type={"const": "prometheus"},
    name={"type": "string"},
    metricType={"enum": ["AverageValue", "Value"]},
    useCachedMetrics={"type": "boolean"},
    authenticationRef=_object(
        ("name",), name=_NAME, kind={"enum": ["TriggerAuthentication", "ClusterTriggerAuthentication"]}
    ),
    metadata=PROMETHEUS,
)

SCALED_OBJECT = _object(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "keda.sh/v1alpha1"},
    kind={"const": "ScaledObject"},
    metadata=_object(("name",), name=_NAME, namespace=_NAME, labels={"type": "object"}, annotations={"type": "object"}),
    spec=_object(
        ("scaleTargetRef", "triggers"),
        scaleTargetRef=_object(
            ("name",), apiVersion={"type": "string"}, kind={"type": "string"}, name=_NAME, envSourceContainerName=_NAME
        ),
        pollingInterval={"type": "integer", "minimum": 1},
        cooldownPeriod=_COUNT,
        initialCooldownPeriod=_COUNT,
        idleReplicaCount=_COUNT,
        minReplicaCount=_COUNT,
        maxReplicaCount={"type": "integer", "minimum": 1},
        fallback=_object(("failureThreshold", "replicas"), failureThreshold=_COUNT, replicas=_COUNT),
        advanced={"type": "object"},
        triggers={"type": "array", "minItems": 1, "items": _TRIGGER},
    ),
)


def problems(scaled_object: Mapping[str, Any]) -> list[str]:
    """What KEDA would say of it; empty: nothing."""
    found = [
        f"{'.'.join(map(str, error.path))}: {error.message}"
        for error in jsonschema.Draft202012Validator(SCALED_OBJECT).iter_errors(dict(scaled_object))
    ]
    if not found:
        spec = scaled_object["spec"]
        least, most = spec.get("minReplicaCount", 0), spec.get("maxReplicaCount", 100)
        if least > most:
            found.append(f"spec: at least {least} and at most {most} replicas")
        if spec.get("idleReplicaCount", -1) >= least:
            found.append("spec.idleReplicaCount: must be less than minReplicaCount")
    return found
