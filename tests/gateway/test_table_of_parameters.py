"""The table of docs/api.md, row by row: what stands there of a parameter is what a gateway does with it.

Asked with the very requests that other servers were asked (`benchmarks/api_peers`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from antiphon_gateway.parameters import PARAMETERS, Endpoint, Parameter, Standing

from benchmarks.api_peers import questions
from tests.support.fake_worker import FakeWorker, byte_card
from tests.support.gateway import RunningGateway, eventually, running_gateway

pytestmark = pytest.mark.asyncio(loop_scope="module")

MODEL = "test-model"
ROWS = [(endpoint, row) for row in PARAMETERS for endpoint in row.endpoints]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[RunningGateway]:
    """Of a model whose template has a word for whatever can reach one."""
    worker = FakeWorker(byte_card(MODEL, template=questions.TEMPLATE))
    async with running_gateway(worker, trust_request_chat_template=True) as gateway:
        yield gateway
        await eventually(lambda: gateway.at_rest)


@pytest.mark.parametrize(
    ("endpoint", "row"), ROWS, ids=[f"{endpoint.name.lower()}-{row.name}" for endpoint, row in ROWS]
)
async def test_a_row_is_what_happens(running: RunningGateway, endpoint: Endpoint, row: Parameter) -> None:
    value = questions.VALUES[endpoint.value].get(row.name)
    if value is None:
        assert row.name in questions.BODIES[endpoint.value] or row.name == "model", "it needs a question"
        value = MODEL if row.name == "model" else questions.BODIES[endpoint.value][row.name]
    body = questions.question(endpoint.value, row.name, value, MODEL)
    response = await running.client.post(endpoint.value, json=body)
    if row.standing is Standing.REFUSED:
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert error["code"] == "unsupported_parameter"
        assert error["param"] == row.name or error["param"] in questions.BESIDE[row.name]
    else:
        assert response.status_code == 200, response.text
        assert row.name not in response.headers.get("x-antiphon-ignored", "")
