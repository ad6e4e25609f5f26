"""The status as it is written: of the CRD's shape, without what is not known, and short in kubectl's table."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
from antiphon_operator.resource.effective import effective_dict
from antiphon_operator.resource.parse import parse_model
from antiphon_operator.resource.reasons import ConditionType, Phase, Reason
from antiphon_operator.resource.status import (
    Condition,
    ModelStatus,
    PoolsStatus,
    PoolStatus,
    ResolvedStatus,
    RevisionStatus,
    SlaStatus,
    latency_status,
    pool_summary,
    shortened,
    to_json,
)

from tests.support import crds

READY = Condition(
    type=ConditionType.READY,
    status="False",
    reason=Reason.STARTING,
    last_transition_time="2026-01-01T00:00:00Z",
    observed_generation=3,
)
FULL = ModelStatus(
    observed_generation=3,
    phase=Phase.STARTING,
    endpoint="http://gateway/v1",
    revision=RevisionStatus(current="abcdef", previous="123456"),
    resolved=ResolvedStatus(model_revision="0123abc", image="worker:1"),
    pools=PoolsStatus(
        prefill=pool_summary(desired=2, ready=1, gpus=4, reason=Reason.INSUFFICIENT_GPUS),
        decode=pool_summary(desired=4, ready=4, draining=1, gpus=16),
    ),
    sla=SlaStatus(ttft=latency_status(target="500ms", p95="480ms"), tpot=latency_status(target="40ms", p95=None)),
    conditions=(READY,),
    effective=effective_dict(parse_model(crds.sample_models()["every-field.yaml"])),
)


def faults(plural: str, status: dict[str, Any]) -> list[str]:
    at = crds.schema(plural)["properties"]["status"]
    found = [error.message for error in jsonschema.Draft202012Validator(at).iter_errors(status)]
    return found + list(crds.unknown_fields(at, status))


def test_a_full_status_has_the_shape_that_the_crd_promises() -> None:
    assert faults("models", to_json(FULL)) == []


def test_an_empty_status_says_only_what_it_is_about() -> None:
    assert to_json(ModelStatus(observed_generation=1)) == {"observedGeneration": 1, "conditions": []}
    assert faults("models", to_json(ModelStatus())) == []


def test_it_is_plain_json_that_compares_equal_after_a_round_trip() -> None:
    written = to_json(FULL)
    assert json.loads(json.dumps(written)) == written


def test_what_is_not_known_is_left_out_and_zero_is_not() -> None:
    written = to_json(
        ModelStatus(
            revision=RevisionStatus(current="abcdef"), pools=PoolsStatus(decode=pool_summary(desired=0, ready=0))
        )
    )
    assert written["revision"] == {"current": "abcdef"}
    assert set(written["pools"]) == {"decode"}
    assert written["pools"]["decode"]["ready"] == 0


def test_a_condition_is_always_whole() -> None:
    assert to_json(FULL)["conditions"] == [
        {
            "type": "Ready",
            "status": "False",
            "reason": "Starting",
            "message": "",
            "lastTransitionTime": "2026-01-01T00:00:00Z",
            "observedGeneration": 3,
        }
    ]


def test_kubectls_table_shows_two_numbers_in_one_column() -> None:
    assert pool_summary(desired=4, ready=2).summary == "2/4"
    assert FULL.sla is not None
    assert FULL.sla.ttft is not None
    assert FULL.sla.tpot is not None
    assert (FULL.sla.ttft.summary, FULL.sla.tpot.summary) == ("480ms/500ms", "-/40ms")
    measured_only = latency_status(target=None, p95="12ms")
    assert measured_only is not None
    assert measured_only.summary == "12ms"
    assert latency_status(target=None, p95=None) is None


def test_a_pool_in_trouble_says_when_it_tries_again() -> None:
    status = PoolStatus(
        observed_generation=1, replicas=2, ready_replicas=1, selector="antiphon.dev/model=m", failures=2,
        next_attempt_at="2026-01-01T00:00:30Z", reason=Reason.BACKING_OFF,
    )  # fmt: skip
    assert faults("pools", to_json(status)) == []
    assert to_json(status)["nextAttemptAt"] == "2026-01-01T00:00:30Z"
    assert "nextAttemptAt" not in to_json(PoolStatus())


def test_a_long_message_still_fits() -> None:
    assert shortened("short") == "short"
    assert len(shortened("x" * 10_000)) == 4096
