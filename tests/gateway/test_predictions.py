"""How far routing's predictions were off is a figure on /metrics."""

from __future__ import annotations

from antiphon_gateway.metrics import GatewayMetrics

from tests.support.fake_worker import FakeWorker
from tests.support.gateway import running_gateway

CHAT = {"model": "test-model", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
ERROR = "antiphon_gateway_ttft_prediction_error_ratio"


def test_the_error_is_relative_to_what_was_measured_whichever_side_it_is_on() -> None:
    metrics = GatewayMetrics()
    metrics.predicted("a-model", 150.0, 100.0)
    metrics.predicted("a-model", 60.0, 100.0)
    metrics.predicted("a-model", 60.0, 0.0)  # nothing was measured: says nothing
    page = metrics.page().decode()
    assert f'{ERROR}_count{{model="a-model"}} 2.0' in page
    assert f'{ERROR}_bucket{{le="0.3",model="a-model"}} 0.0' in page
    assert f'{ERROR}_bucket{{le="0.5",model="a-model"}} 2.0' in page


async def test_each_first_token_is_compared_with_what_routing_had_said() -> None:
    async with running_gateway(FakeWorker()) as running:
        for _ in range(2):
            assert (await running.client.post("/v1/chat/completions", json=CHAT)).status_code == 200
        assert running.metric(f"{ERROR}_count") == 2
        assert running.metric(f"{ERROR}_sum") > 0
