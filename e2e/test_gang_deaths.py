"""kill -9 of what a worker of two ranks is made of, in a Ray cluster of three nodes, under load.

A house of real processes with a real (tiny) model: a prefill worker, a decode worker of one rank, and beside it one
whose two ranks stand on two nodes. Clients stream through a gateway all the time. Whatever is killed of the second
worker, every request is answered to its end and the other workers never notice.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
from antiphon_operator.plan.trouble import GANG_UNSCHEDULABLE
from antiphon_operator.runtime.workers import Workers as OperatorView
from antiphon_telemetry.exit import ExitCode

from tests.support.gang import descendants, until_gone
from tests.support.house import House
from tests.support.ray_nodes import NodeSize, RayNodes
from tests.support.workers import WorkerProcess, prompt_of
from tests.torch_engine.parallel.tiny_models import CONFIGS, write_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="module")]

WAIT_S = 90.0
LANES = 5
TOKENS = 60
PAUSE_S = 0.1
"""Between two requests of a client, so that ranks that start get a share of a small machine."""
ONE_DEVICE = NodeSize(cpus=1)


class Scene:
    def __init__(self, house: House, nodes: RayNodes, model: Path) -> None:
        self.house = house
        self.nodes = nodes
        self.model = model
        self.gang: WorkerProcess
        self.others: list[WorkerProcess] = []
        # The gang's. Chosen, as its page is read before it is ready.
        with socket.create_server(("127.0.0.1", 0)) as server:
            self.status_port = int(server.getsockname()[1])

    async def start(self) -> None:
        prefill, decode, self.gang = await self.house.start_workers(
            ("--role", "prefill"), ("--role", "decode"), self.gang_options()
        )
        self.others = [prefill, decode]
        # By cost, one rank would get all requests for so small a model.
        await self.house.start_gateway("--lost-after-ms", "5000", "--routing", "round-robin")
        await self.until_serving(2)

    @property
    def ray_options(self) -> tuple[str, ...]:
        return ("--ray-address", self.nodes.address, "--ray-token-file", self.nodes.token_file)

    def gang_options(self) -> tuple[str, ...]:
        shape = ("--pipeline-parallel", "2", "--spread-stages", *self.ray_options)
        return ("--role", "decode", "--worker-id", "gang", "--status-port", str(self.status_port), *shape)

    async def status(self) -> dict[str, Any]:
        """Of the gang's worker, which has no page for a moment between two lives."""
        while True:
            try:
                return await self.gang.status()
            except OSError:
                await asyncio.sleep(0.02)

    async def until(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        async with asyncio.timeout(WAIT_S):
            while True:
                status = await self.status()
                if condition(status):
                    return status
                await asyncio.sleep(0.05)

    async def until_serving(self, decode: int) -> None:
        """The gateway has so many decode workers."""
        async with asyncio.timeout(WAIT_S):
            while True:
                page = (await self.house.client.get(f"{self.house.url}/ready")).json()
                if [(model["prefill"], model["decode"]) for model in page["models"].values()] == [(1, decode)]:
                    return
                await asyncio.sleep(0.02)

    @asynccontextmanager
    async def load(self) -> AsyncIterator[None]:
        """Clients that stream until the block ends. The gang has work when it begins, and at its end."""
        stop = asyncio.Event()

        async def lane(number: int) -> None:
            count = 0
            while not stop.is_set():
                count += 1
                await asyncio.sleep(PAUSE_S)
                prompt = prompt_of(20 + 40 * (count % 4), seed=number * 1000 + count)
                answer = await self.house.stream(prompt, max_tokens=TOKENS)
                assert answer.complete, (answer.status, answer.error)
                assert answer.events[-1]["usage"]["completion_tokens"] == TOKENS

        async with asyncio.TaskGroup() as lanes:
            for number in range(LANES):
                lanes.create_task(lane(number))
            await self.until(lambda status: status.get("running", 0) > 1)
            yield
            await self.until(lambda status: status.get("running", 0) > 1)
            stop.set()

    def ranks(self) -> list[psutil.Process]:
        return [psutil.Process(rank.pid) for rank in self.nodes.ranks()]


@dataclass(frozen=True, slots=True)
class AtRest:
    """What is there when nobody asks for anything."""

    incarnations: list[str]
    """Of the workers beside the gang's."""
    helpers: int
    """Processes of the gang's worker."""

    @classmethod
    async def of(cls, scene: Scene) -> AtRest:
        """No worker holds a block, a pin or a task; of the cluster, one group is held and its two places."""
        await scene.house.until_gateway_is_at_rest()
        idle = [await worker.until_idle(20.0) for worker in (*scene.others, scene.gang)]
        assert [status["pins"] for status in idle] == [0, 0, 0]
        (group,) = scene.nodes.groups()
        assert (group.state, group.strategy) == ("CREATED", "STRICT_SPREAD")
        assert sorted(group.nodes) == sorted(scene.nodes.ids[1:])
        assert scene.nodes.taken() == {"CPU": 2.0}
        assert len(scene.ranks()) == 2
        return cls([status["incarnation"] for status in idle[:-1]], len(descendants(scene.gang.process.pid)))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scene(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Scene]:
    folder = tmp_path_factory.mktemp("gang-deaths")
    model = write_model(folder / "model", CONFIGS["qwen3"])
    options = (str(model), "--dtype", "float32", "--threads", "1", "--transport", "tcp", "--no-self-measure")
    options += ("--block-tokens", "16", "--max-batch-tokens", "128", "--kv-blocks", "256", "--lost-after-ms", "5000")
    with RayNodes(NodeSize(cpus=0), ONE_DEVICE, ONE_DEVICE) as nodes:
        async with House(folder, *options) as house:
            scene = Scene(house, nodes, model)
            await scene.start()
            yield scene


async def test_a_killed_rank(scene: Scene) -> None:
    """All ranks end, the worker's membership with them; and all are started again."""
    before, was = await AtRest.of(scene), await scene.status()
    async with scene.load():
        ranks = scene.ranks()
        ranks[0].kill()
        await scene.until_serving(1)
        await asyncio.to_thread(until_gone, ranks)
        await scene.until_serving(2)
    status = await scene.status()
    assert (was["worker_id"], status["worker_id"]) == ("gang", "gang")
    assert status["incarnation"] != was["incarnation"]
    # In its new life it pulls from the prefill worker as before.
    assert await scene.gang.metric("antiphon_remote_prefills_total", result="complete") > 0
    assert await AtRest.of(scene) == before


@pytest.mark.exhaustive
async def test_a_removed_node_and_another_in_its_place(scene: Scene) -> None:
    """In between the ranks find no place, and the worker says why."""
    before = await AtRest.of(scene)
    async with scene.load():
        ranks, removed = scene.ranks(), scene.nodes.ids.pop()
        await asyncio.to_thread(scene.nodes.remove, removed)
        await scene.until_serving(1)
        await asyncio.to_thread(until_gone, ranks)
        # What the operator reads, and makes the Model's condition of.
        status = await scene.until(lambda status: status.get("problem", "").startswith(GANG_UNSCHEDULABLE))
        assert "stage 1 needs " in status["problem"]
        operator = OperatorView(port=scene.status_port)
        view = await operator.ask({"status": {"podIP": "127.0.0.1"}})
        await operator.close()
        assert view is not None
        assert (view.idle, view.problem) == (True, status["problem"])
        scene.nodes.ids.append(scene.nodes.add(ONE_DEVICE))  # Ray starts nodes from the main thread only
        await scene.until_serving(2)
        await asyncio.to_thread(scene.nodes.until_known_dead, removed)
    assert await AtRest.of(scene) == before


async def test_a_killed_driver_and_another_in_its_place(scene: Scene) -> None:
    """Its ranks and its placement group are nobody's then, in a cluster that goes on."""
    before = await AtRest.of(scene)
    async with scene.load():
        everything = [*scene.ranks(), *descendants(scene.gang.process.pid)]
        await scene.gang.kill()
        await asyncio.to_thread(until_gone, everything)
        await asyncio.to_thread(scene.nodes.until_nothing_is_left)
        (scene.gang,) = await scene.house.start_workers(scene.gang_options())
        await scene.until_serving(2)
    assert await AtRest.of(scene) == before


async def test_ranks_that_can_never_be_placed(scene: Scene, tmp_path: Path) -> None:
    """The worker's exit code and its last words are what a pod's would be."""
    options = ("--tensor-parallel", "2", *scene.ray_options, "--ray-wait-s", "1")
    log = tmp_path / "log"
    with log.open("wb") as file:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "antiphon", "worker", str(scene.model), *options), stdout=file, stderr=file
        )
    async with asyncio.timeout(WAIT_S):
        assert await process.wait() == ExitCode.UNAVAILABLE
    last = log.read_text().splitlines()[-1]
    assert f"{GANG_UNSCHEDULABLE}stage 0 needs 2 CPU on one node; the node with most (" in last
    assert last.endswith("of 1: no node is that large; choose a smaller tensor size, or larger nodes (waited 1 s)")
