"""How often the operator asks the API server, by verb, kind and outcome."""

from __future__ import annotations

from prometheus_client import Counter

API_REQUESTS = Counter(
    "antiphon_operator_api_requests_total",
    "Requests to the API server; each try counts",
    ("verb", "kind", "outcome"),
)
