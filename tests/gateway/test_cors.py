"""Pages in browsers that come from elsewhere: allowed by name, on every answer, and never with credentials."""

from __future__ import annotations

from typing import Any

import pytest
from antiphon_gateway.cors import CorsOriginInvalid, CrossOrigin

from tests.support.fake_worker import FakeWorker
from tests.support.gateway import running_gateway

CHAT: dict[str, Any] = {"model": "test-model", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
PATH = "/v1/chat/completions"
PAGE = "https://chat.example"
PREFLIGHT = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
ALLOWED = "access-control-allow-origin"


async def test_without_the_option_no_page_from_elsewhere_is_allowed() -> None:
    async with running_gateway(FakeWorker()) as running:
        response = await running.client.options(PATH, headers={"origin": PAGE, **PREFLIGHT})
        assert (response.status_code, ALLOWED in response.headers) == (405, False)
        response = await running.client.post(PATH, json=CHAT, headers={"origin": PAGE})
        assert (response.status_code, ALLOWED in response.headers) == (200, False)


async def test_a_named_origin_may_ask_and_reads_every_answer() -> None:
    async with running_gateway(FakeWorker(), cors_origin=(PAGE, "http://localhost:3000"), keys={"k": "t"}) as running:
        response = await running.client.options(PATH, headers={"origin": PAGE, **PREFLIGHT})
        assert (response.status_code, response.content) == (200, b"")
        assert response.headers[ALLOWED] == PAGE
        assert response.headers["access-control-allow-methods"] == "POST"
        assert response.headers["access-control-allow-headers"] == "authorization,content-type"
        key = {"origin": PAGE, "authorization": "Bearer k"}
        for body in (CHAT, {**CHAT, "stream": True}, {**CHAT, "n": 99}):
            response = await running.client.post(PATH, json=body, headers=key)
            assert response.status_code == (400 if "n" in body else 200)
            assert (response.headers[ALLOWED], response.headers["vary"]) == (PAGE, "origin")
            assert "x-request-id" in response.headers["access-control-expose-headers"]
            assert "access-control-allow-credentials" not in response.headers
        for response in (
            await running.client.post(PATH, json=CHAT, headers={"origin": PAGE}),
            await running.client.get("/nothing", headers={"origin": PAGE}),
            await running.client.options(PATH, headers={"origin": PAGE}),
        ):
            assert response.status_code in (401, 404, 405)
            assert response.headers[ALLOWED] == PAGE


async def test_other_origins_get_no_permission() -> None:
    async with running_gateway(FakeWorker(), cors_origin=(PAGE,)) as running:
        for origin in ("https://other.example", "null", f"{PAGE}.evil.example"):
            response = await running.client.options(PATH, headers={"origin": origin, **PREFLIGHT})
            assert (response.status_code, ALLOWED in response.headers) == (200, False)
            response = await running.client.post(PATH, json=CHAT, headers={"origin": origin})
            assert (response.status_code, ALLOWED in response.headers) == (200, False)
            assert response.headers["vary"] == "origin"


async def test_a_star_allows_all_and_no_credentials() -> None:
    async with running_gateway(FakeWorker(), cors_origin=("*",)) as running:
        response = await running.client.post(PATH, json={**CHAT, "foo": 1}, headers={"origin": "null"})
        assert response.headers[ALLOWED] == "*"
        assert response.headers["x-antiphon-ignored"] == "foo"
        assert "access-control-allow-credentials" not in response.headers


@pytest.mark.parametrize("origin", ["chat.example", "https://chat.example/", "https://", "HTTPS://chat.example", ""])
def test_what_is_no_origin_is_refused_when_the_gateway_starts(origin: str) -> None:
    with pytest.raises(CorsOriginInvalid, match="scheme://host"):
        CrossOrigin([origin])
