"""A Ray cluster of three nodes: where a gang's bundles land, why they find no place, and what stands still in it.

Where ranks are is read from Ray's head, not from the product. Ranks compute nothing here. What is killed under load is
in `e2e/test_gang_deaths.py`.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import psutil
import pytest
from antiphon_engine import ExecutorLost
from antiphon_engine.gang import ClusterKind, ClusterSettings, GangExecutor, GangUnschedulable, RayCluster
from antiphon_engine.gang.gathering import PLACER_MODULE

from tests.support.fake_rank import HANG
from tests.support.gang import Told, gang, gang_settings, one_step, start_gang, until, until_gone
from tests.support.ray_nodes import NodeSize, RayNodes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

WAIT_S = 60.0


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    with RayNodes(NodeSize(cpus=2), NodeSize(cpus=2, gpus=2), NodeSize(cpus=2, gpus=1)) as three:
        yield three


@pytest.fixture
def there(nodes: RayNodes) -> Iterator[RayCluster]:
    """The cluster as a worker knows it: by its address. After a test nothing of a gang may be left in it."""
    yield RayCluster(ClusterSettings(ClusterKind.EXISTING, address=nodes.address, token_file=nodes.token_file))
    nodes.until_nothing_is_left()


def test_tensor_ranks_of_a_stage_share_a_node(nodes: RayNodes, there: RayCluster) -> None:
    with gang(there, gang_settings(2, 2)) as executor:
        (group,) = nodes.groups()
        assert (group.state, group.strategy) == ("CREATED", "PACK")
        assert group.bundles == [{"CPU": 2.0}, {"CPU": 2.0}]
        first, second = group.nodes
        assert first != second  # no node has room for both
        node_of = {rank.pid: rank.node for rank in nodes.ranks()}
        # Rank by rank: stage 0 is ranks 0 and 1.
        assert [node_of[pid] for pid in executor.pids] == [first, first, second, second]
        assert list(executor.nodes) == [first, first, second, second]
        assert nodes.taken() == {"CPU": 4.0}


@pytest.mark.parametrize("spread", [False, True])
def test_stages_are_packed_unless_they_are_to_be_spread(nodes: RayNodes, there: RayCluster, spread: bool) -> None:
    with gang(there, gang_settings(1, 2, spread=spread)):
        (group,) = nodes.groups()
        assert group.strategy == ("STRICT_SPREAD" if spread else "PACK")
        assert group.bundles == [{"CPU": 1.0}, {"CPU": 1.0}]
        assert len(set(group.nodes)) == (2 if spread else 1)
        assert Counter(rank.node for rank in nodes.ranks()) == Counter(group.nodes)


def test_ranks_on_gpus_take_gpus_alone(nodes: RayNodes, there: RayCluster) -> None:
    """The nodes only claim to have some. Of three GPUs on two nodes, a stage of two has one node to go to."""
    _, large, _ = nodes.ids
    with gang(there, replace(gang_settings(2), device="GPU")):
        (group,) = nodes.groups()
        assert (group.strategy, group.bundles, group.nodes) == ("STRICT_PACK", [{"GPU": 2.0}], [large])
        assert [rank.node for rank in nodes.ranks()] == [large, large]
        assert nodes.taken() == {"GPU": 2.0}


@pytest.mark.parametrize(
    ("tensor", "pipeline", "device", "sentence"),
    [
        (3, 1, "CPU", "stage 0 needs 3 CPU on one node; the node with most (*, one of 3) has 2 free of 2: no node is "
         "that large; choose a smaller tensor size, or larger nodes"),
        (2, 2, "GPU", "stage 1 needs 2 GPU on one node; the node with most (*, one of 3) has 1 free of 1: free some, "
         "or add nodes"),
    ],
)  # fmt: skip
def test_a_group_that_cannot_be_placed_says_which_bundle_lacks_what(
    nodes: RayNodes, there: RayCluster, tensor: int, pipeline: int, device: str, sentence: str
) -> None:
    """At once, while it waits, and as its last words."""
    told = Told()
    with pytest.raises(GangUnschedulable) as caught:
        start_gang(there, replace(gang_settings(tensor, pipeline, place_s=1.0), device=device), told)
    expected = sentence.replace("*", nodes.address.partition(":")[0])
    assert told.problems == [expected]
    assert str(caught.value) == f"{expected} (waited 1 s)"


class Load:
    """One step after the other, until the executor is lost."""

    def __init__(self, executor: GangExecutor) -> None:
        self._executor = executor
        self._done = 0
        self._lost: ExecutorLost | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        until(lambda: self._done > 10)

    def until_lost(self) -> str:
        self._thread.join(WAIT_S)
        assert self._lost is not None
        return str(self._lost)

    def _run(self) -> None:
        try:
            while True:
                self._executor.begin([one_step(self._done % 900)]).result(WAIT_S)
                self._done += 1
        except ExecutorLost as lost:
            self._lost = lost


def test_a_rank_that_stands_still_is_given_up_and_killed(nodes: RayNodes, there: RayCluster) -> None:
    """Its connection stays as it is: only its silence tells. It cannot end by itself, so Ray has to end it."""
    with gang(there, replace(gang_settings(2), silent_s=3.0)) as executor:
        ranks = [psutil.Process(pid) for pid in executor.pids]
        load = Load(executor)
        ranks[1].suspend()
        assert load.until_lost() == "the ranks are lost: rank 1 has said nothing for 3 s"
    until_gone(ranks)


def test_a_machine_that_stands_still_is_given_up_and_its_rank_ends_when_it_goes_on(
    nodes: RayNodes, there: RayCluster
) -> None:
    """Nothing on it can be asked to end anything."""
    with gang(there, replace(gang_settings(1, 3, spread=True), silent_s=3.0)) as executor:
        ranks = [psutil.Process(pid) for pid in executor.pids]
        away = executor.nodes.index(nodes.ids[-1])
        load = Load(executor)
        with nodes.stopped(nodes.ids[-1]):
            assert load.until_lost() == f"the ranks are lost: rank {away} has said nothing for 3 s"
            executor.close()
            until_gone(ranks[:away] + ranks[away + 1 :])
            assert ranks[away].is_running()
    until_gone(ranks)


def test_a_killed_driver_of_rays_ends_the_gang(there: RayCluster) -> None:
    """Ray ends what its driver has started. The worker's own connections tell that the ranks are gone."""
    with gang(there, gang_settings(2)) as executor:
        ranks = [psutil.Process(pid) for pid in executor.pids]
        load = Load(executor)
        (placer,) = [one for one in psutil.Process().children() if PLACER_MODULE in one.cmdline()]
        placer.kill()
        assert "the ranks are lost: rank " in load.until_lost()
    until_gone(ranks)


def test_a_step_that_does_not_end_is_given_up(there: RayCluster) -> None:
    """Where no rank says why, although all are alive."""
    with gang(there, replace(gang_settings(1, 2), step_s=2.0)) as executor:
        ranks = [psutil.Process(pid) for pid in executor.pids]
        steps = [executor.begin([one_step(HANG)]), executor.begin([one_step(1)])]
        for step in steps:
            with pytest.raises(ExecutorLost, match="step 0 is not done after 2 s, and no rank says why"):
                step.result(WAIT_S)
    until_gone(ranks)
