"""The cluster, the operator and a namespace for each test.

By default the cluster is the double with nodes whose pods pretend. With ANTIPHON_TEST_KUBECONFIG the same tests run
against that API server, which needs controllers and a scheduler of its own, and to which the tests add nodes. All
tests of this folder share one event loop, one cluster and one operator; tests that hurt either make their own with
`tests.cluster.stage.a_cluster` and `OperatorProcess`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.cluster.history import LONGEST_LIE_S, MODELS, History, longest_lies_s
from tests.cluster.stage import Stage, a_namespace, a_stage
from tests.cluster.support import Desk
from tests.support.kube.cluster import Cluster, FakeCluster
from tests.support.kube.operator_process import OperatorProcess


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "double: needs what only the double of the API server can do")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    own = Path(__file__).parent
    for item in items:
        if own in item.path.parents:
            item.add_marker(pytest.mark.cluster)
            if pytest_asyncio.is_async_test(item):
                item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def stage(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    async with a_stage(tmp_path_factory.mktemp("cluster")) as stage:
        yield stage


@pytest_asyncio.fixture(loop_scope="session")
async def cluster(stage: Stage, request: pytest.FixtureRequest) -> Cluster:
    if request.node.get_closest_marker("double") and not isinstance(stage.cluster, FakeCluster):
        pytest.skip("needs the double of the API server")
    return stage.cluster


@pytest_asyncio.fixture(loop_scope="session")
async def operator(stage: Stage) -> OperatorProcess:
    """The one that all share, started again if a test before has ended it."""
    if stage.operator.was_ended:
        await stage.operator.start()
    await stage.operator.until_acting()
    return stage.operator


@pytest_asyncio.fixture(loop_scope="session")
async def history(stage: Stage) -> History:
    return stage.history


@pytest_asyncio.fixture(loop_scope="session")
async def desk(
    cluster: Cluster, operator: OperatorProcess, history: History, request: pytest.FixtureRequest
) -> AsyncIterator[Desk]:
    """A namespace of its own, whose Models are deleted afterwards. Whatever a test was about: no status may have said
    for long that a Model is Ready when it could answer nothing."""
    namespace = await a_namespace(cluster, request.node.name)
    desk = Desk(cluster, operator, history, namespace)
    yield desk
    lies = longest_lies_s(await desk.worlds())
    assert all(lie_s < LONGEST_LIE_S for lie_s in lies.values()), f"seconds of Ready=True without a ready pair: {lies}"
    for model in await desk.all(MODELS):
        await desk.delete(model["metadata"]["name"])
