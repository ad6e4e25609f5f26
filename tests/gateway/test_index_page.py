"""The page that tells what a gateway believes of a worker's blocks."""

from __future__ import annotations

from antiphon_kvtransfer.identity import contents_digest

from tests.support.fake_worker import FakeWorker
from tests.support.gateway import eventually, running_gateway
from tests.support.membership import FakeEngine, announcing, block, record
from tests.support.valkey import Valkey


async def test_the_page_has_the_position_and_digest_of_what_the_worker_announced() -> None:
    engine = FakeEngine()
    engine.change({block(1), block(2)})
    with Valkey() as server:
        async with (
            announcing(server.url, engine, record("w0")),
            running_gateway(redis_url=server.url) as running,
        ):
            blocks = running.gateway.fleet.mirror.blocks  # type: ignore[union-attr]
            await eventually(lambda: blocks.contents("demo", "w0") == engine.held)
            engine.change({block(3)}, {block(1)})
            await eventually(lambda: blocks.contents("demo", "w0") == engine.held)
            overview = (await running.client.get("/v1/antiphon/index")).json()
            at = {"model": "demo", "incarnation": "i1", "sequence": 2}
            assert overview == {"redis": "ok", "blocks": 2, "sets_loaded": 1, "workers": {"w0": at}}
            page = (await running.client.get("/v1/antiphon/index/w0")).json()
            assert page == at | {"blocks": 2, "digest": contents_digest(engine.held)}


async def test_unknown_workers_keys_and_no_redis() -> None:
    async with running_gateway(FakeWorker(), keys={"key": "tenant"}) as running:
        assert (await running.client.get("/v1/antiphon/index")).status_code == 401
        running.client.headers["authorization"] = "Bearer key"
        assert (await running.client.get("/v1/antiphon/index")).json()["redis"] == "none"
        answer = await running.client.get("/v1/antiphon/index/w0")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "worker_not_known")


def test_equal_sets_and_no_others_have_equal_digests() -> None:
    assert contents_digest([block(1), block(2)]) == contents_digest([block(2), block(1)])
    assert len({contents_digest(some) for some in ([], [block(1)], [block(1), block(2)], [block(2)])}) == 4
