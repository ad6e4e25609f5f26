"""The figures of scaling as gauges, and the manifests that scale by them."""

from __future__ import annotations

import asyncio
import copy
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from antiphon_gateway.scaling_metrics import attainment, percentile
from antiphon_operator.names import pool_name
from antiphon_operator.resource.checks import check
from antiphon_operator.resource.parse import parse_model
from antiphon_proto import worker_pb2 as pb
from prometheus_client.parser import text_string_to_metric_families

from tests.support import crds, keda
from tests.support.fake_worker import FakeWorker, accept_and_hang, byte_card
from tests.support.gateway import RunningGateway, eventually, running_gateway
from tests.support.manifests import assert_valid
from tests.support.model_records import model_record

FOLDER = crds.ROOT / "deploy/autoscaling"
DOCS = (crds.ROOT / "docs/autoscaling.md", crds.ROOT / "docs/gateway.md")
MODEL = "default/chat"
PREFIX = "antiphon_gateway_model_"
_SELECTOR = re.compile(r"(antiphon_gateway_model_\w+)(?:\{([^}]*)\})?")

Series = dict[str, list[tuple[dict[str, str], float]]]


async def scraped(running: RunningGateway) -> Series:
    """The page's series of Models, by name."""
    page = (await running.client.get("/metrics")).text
    return {
        family.name: [(sample.labels, sample.value) for sample in family.samples]
        for family in text_string_to_metric_families(page)
        if family.name.startswith(PREFIX)
    }


def value(series: Series, name: str, **labels: str) -> float:
    (found,) = [one for own, one in series[PREFIX + name] if own == {"model": MODEL, **labels}]
    return found


def prefill_and_decode(**options: Any) -> tuple[FakeWorker, FakeWorker]:
    card = byte_card(MODEL)
    return (
        FakeWorker(card, worker_id="d", role=pb.ROLE_DECODE, **options),
        FakeWorker(card, worker_id="p", role=pb.ROLE_PREFILL, **options),
    )


async def ask(running: RunningGateway, tokens: int = 100) -> Any:
    return await running.client.post("/v1/completions", json={"model": MODEL, "prompt": [7] * tokens, "max_tokens": 4})


# -- what they are


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        ([(float(one), 1.0) for one in range(1, 21)], 0.95, 19.0),
        ([(5.0, 1.0)], 0.95, 5.0),
        ([(1.0, 19.0), (9.0, 1.0)], 0.95, 1.0),
        ([(1.0, 18.0), (9.0, 2.0)], 0.95, 9.0),
        ([(3.0, 1.0), (1.0, 1.0), (2.0, 1.0)], 0.5, 2.0),
    ],
)
def test_a_percentile_is_by_weight(values: list[tuple[float, float]], share: float, expected: float) -> None:
    assert percentile(values, share) == expected


def test_a_limit_is_kept_by_what_is_at_it() -> None:
    assert attainment([(1.0, 3.0), (1.01, 1.0)]) == 0.75


async def test_a_model_with_a_promise_shows_how_it_is_kept() -> None:
    async with running_gateway(*prefill_and_decode()) as running:
        record = model_record(MODEL, names=(MODEL,), ttft_p95_ms=30_000.0, tpot_p95_ms=0.001)
        running.gateway.fleet.catalogue.update({MODEL: record})
        for _ in range(4):
            assert (await ask(running)).status_code == 200
        series = await scraped(running)
        assert value(series, "ttft_attainment_ratio") == 1.0
        # No worker makes a token in a microsecond.
        assert value(series, "tpot_attainment_ratio") == 0.0
        assert 0.0 < value(series, "ttft_p95_seconds") < 30.0
        assert value(series, "ttft_p95_promise_ratio") == pytest.approx(
            value(series, "ttft_p95_seconds") / 30.0, rel=0.01
        )
        assert value(series, "tpot_p95_promise_ratio") > 1.0
        assert (
            value(series, "queued_requests") == value(series, "held_requests") == value(series, "running_answers") == 0
        )


async def test_what_waits_and_what_workers_say_is_shown() -> None:
    decode, prefill = prefill_and_decode(behaviour=accept_and_hang)
    decode.queue.running = 7
    prefill.queue.waiting_tokens = 90_000
    decode.queue.waiting_tokens = 90_000
    async with running_gateway(decode, prefill) as running:
        waiting = [asyncio.create_task(ask(running, 50)) for _ in range(3)]
        await eventually(lambda: running.gateway.dispatcher.waiting == 3)
        series = await scraped(running)
        assert (value(series, "queued_requests"), value(series, "queued_tokens")) == (3, 150)
        assert value(series, "worker_waiting_tokens", role="prefill") == 90_000
        assert value(series, "worker_running_requests", role="decode") == 7
        # Without a promise or an answer there is nothing to say of them.
        assert not series.get(PREFIX + "ttft_attainment_ratio")
        assert not series.get(PREFIX + "ttft_p95_seconds")
        for request in waiting:
            request.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def test_no_client_makes_a_series() -> None:
    async with running_gateway(*prefill_and_decode()) as running:
        for name in ("unknown", "x" * 300):
            refused = await running.client.post("/v1/completions", json={"model": name, "prompt": "hello"})
            assert refused.status_code == 404
        models = {labels["model"] for found in (await scraped(running)).values() for labels, _ in found}
        assert models == {MODEL}


# -- the manifests


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def of_kind(name: str, kind: str) -> list[dict[str, Any]]:
    return [doc for doc in documents(name) if doc["kind"] == kind]


@pytest.mark.parametrize("name", ["keda.yaml", "hpa.yaml"])
def test_the_manifests_are_valid_and_scale_the_pools_of_their_model(name: str) -> None:
    (model,) = of_kind(name, "Model")
    assert crds.refusals("models", model) == []
    parsed = parse_model(model)
    assert check(parsed) == []
    assert parsed.spec.autoscaling.mode == "External"
    scalers = of_kind(name, "ScaledObject" if name == "keda.yaml" else "HorizontalPodAutoscaler")
    targets = [scaler["spec"]["scaleTargetRef"] for scaler in scalers]
    kind = crds.crd("pools")["spec"]["names"]["kind"]
    assert targets == [
        {"apiVersion": "antiphon.dev/v1alpha1", "kind": kind, "name": pool_name("chat", role)}
        for role in ("prefill", "decode")
    ]
    assert {scaler["metadata"]["namespace"] for scaler in scalers} == {model["metadata"]["namespace"]}
    # What they scale by has to be there: a selector, without which no autoscaler does anything.
    assert crds.crd("pools")["spec"]["versions"][0]["subresources"]["scale"]["labelSelectorPath"]


def test_kedas_objects_are_what_its_documentation_says() -> None:
    for scaler in of_kind("keda.yaml", "ScaledObject"):
        assert keda.problems(scaler) == []


@pytest.mark.parametrize(
    "wrong",
    [
        lambda spec: spec["triggers"][0]["metadata"].pop("serverAddress"),
        lambda spec: spec["triggers"][0]["metadata"].update(treshold="1"),
        lambda spec: spec["triggers"][0]["metadata"].update(threshold=4096),
        lambda spec: spec.pop("scaleTargetRef"),
        lambda spec: spec.update(minReplicas=1),
        lambda spec: spec.update(minReplicaCount=9),
    ],
)
def test_the_schema_of_keda_finds_mistakes(wrong: Any) -> None:
    scaler = copy.deepcopy(of_kind("keda.yaml", "ScaledObject")[0])
    wrong(scaler["spec"])
    assert keda.problems(scaler)


def test_kubernetes_own_objects_are_valid_and_their_metrics_are_those_of_the_rules() -> None:
    scalers, (rules,) = of_kind("hpa.yaml", "HorizontalPodAutoscaler"), of_kind("hpa.yaml", "ConfigMap")
    assert_valid([*scalers, rules])
    offered = [rule["name"]["as"] for rule in yaml.safe_load(rules["data"]["config.yaml"])["externalRules"]]
    wanted = [metric["external"]["metric"]["name"] for scaler in scalers for metric in scaler["spec"]["metrics"]]
    assert wanted == offered


def queries() -> Iterator[tuple[str, str]]:
    """(where, PromQL) of all manifests and of the pages."""
    for scaler in of_kind("keda.yaml", "ScaledObject"):
        for trigger in scaler["spec"]["triggers"]:
            yield f"keda.yaml {scaler['metadata']['name']}", trigger["metadata"]["query"]
    (rules,) = of_kind("hpa.yaml", "ConfigMap")
    for rule in yaml.safe_load(rules["data"]["config.yaml"])["externalRules"]:
        yield "hpa.yaml", rule["seriesQuery"]
        yield "hpa.yaml", rule["metricsQuery"]
    for page in DOCS:
        yield page.name, page.read_text()


def labels_of(selector: str) -> Mapping[str, str]:
    return dict(re.findall(r'(\w+)="([^"]*)"', selector or ""))


async def test_every_metric_that_is_asked_for_is_on_the_page() -> None:
    async with running_gateway(*prefill_and_decode()) as running:
        record = model_record(MODEL, names=(MODEL,), ttft_p95_ms=500.0, tpot_p95_ms=40.0)
        running.gateway.fleet.catalogue.update({MODEL: record})
        assert (await ask(running)).status_code == 200
        series = await scraped(running)
    asked = set()
    for where, query in queries():
        for name, selector in _SELECTOR.findall(query):
            asked.add(name)
            labels = labels_of(selector)
            found = [own for own, _ in series.get(name, ()) if labels.items() <= own.items()]
            assert found, f"{where} asks for {name}{{{selector}}}"
    assert asked == series.keys(), "and every gauge is told of in the pages"


def test_the_folder_is_known() -> None:
    assert {path.name for path in Path(FOLDER).iterdir()} == {"keda.yaml", "hpa.yaml"}
