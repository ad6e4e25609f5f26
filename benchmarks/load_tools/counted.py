"""What the gateway's own /metrics say of what happened between two looks at them."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from prometheus_client.parser import text_string_to_metric_families

Page = Mapping[tuple[str, str], float]
"""The gateway's counters, and its histograms' sums and counts, by name and endpoint."""
_PREFIX = "antiphon_gateway_"


class Counted(msgspec.Struct, frozen=True):
    requests: int
    other_statuses: int
    """Answers with another status than 200, of any endpoint."""
    cancelled: int
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    ttft_mean_ms: float
    itl_mean_ms: float


def read(page: str) -> Page:
    found: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if "endpoint" not in sample.labels or sample.name.endswith("_bucket"):
                continue
            name = sample.name.removeprefix(_PREFIX)
            if name == "requests_total" and sample.labels["status"] != "200":
                key = ("other_statuses", "")
            else:
                key = (name, sample.labels["endpoint"])
            found[key] = found.get(key, 0.0) + sample.value
    return found


def between(before: Page, after: Page, endpoint: str) -> Counted:
    def more(name: str, of: str = endpoint) -> float:
        return after.get((name, of), 0.0) - before.get((name, of), 0.0)

    def mean_ms(name: str) -> float:
        return 1e3 * more(f"{name}_seconds_sum") / max(1.0, more(f"{name}_seconds_count"))

    return Counted(
        requests=round(more("requests_total")),
        other_statuses=round(more("other_statuses", "")),
        cancelled=round(more("cancelled_total")),
        prompt_tokens=round(more("prompt_tokens_total")),
        output_tokens=round(more("completion_tokens_total")),
        cached_tokens=round(more("cached_tokens_total")),
        ttft_mean_ms=mean_ms("time_to_first_token"),
        itl_mean_ms=mean_ms("inter_token"),
    )
