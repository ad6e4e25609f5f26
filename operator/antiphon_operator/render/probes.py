"""When a worker pod counts as started, ready and alive. All probes are HTTP on the status port.

Ready says: weights loaded, engine steps, transport registered; never Redis or peers. Started is the first time it is
ready: until then neither of the others is asked, so loading may take as long as the model is large. Alive is whether
the process's event loop turns. A long engine step has no part in it (the engine has a thread of its own), so what
fails it for a minute is beyond waiting for.
"""

from __future__ import annotations

import math

from antiphon_operator.render.metadata import Manifest
from antiphon_operator.render.weights import Weights

STARTUP_FLOOR_S = 600
"""Compiling and registering memory take minutes whatever the size."""
SLOWEST_LOAD_BYTES_PER_S = 50_000_000
"""A network file system on a bad day."""

_PERIOD_S = 2


def startup_s(weights: Weights | None) -> int:
    """How long a worker may load before it is started anew."""
    size_bytes = weights.size_bytes if weights else 0
    return STARTUP_FLOOR_S + math.ceil(size_bytes / SLOWEST_LOAD_BYTES_PER_S)


def _get(path: str) -> Manifest:
    return {"path": path, "port": "status"}


def worker_probes(weights: Weights | None) -> Manifest:
    """The three probes, as fields of the container."""
    return {
        "startupProbe": {
            "httpGet": _get("/ready"),
            "periodSeconds": _PERIOD_S,
            "timeoutSeconds": 2,
            "failureThreshold": math.ceil(startup_s(weights) / _PERIOD_S),
        },
        "readinessProbe": {
            "httpGet": _get("/ready"),
            "periodSeconds": _PERIOD_S,
            "timeoutSeconds": 2,
            "failureThreshold": 3,
        },
        "livenessProbe": {
            "httpGet": _get("/health"),
            "periodSeconds": 10,
            "timeoutSeconds": 5,
            "failureThreshold": 6,
        },
    }
