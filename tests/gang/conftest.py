from __future__ import annotations

from collections.abc import Iterator

import pytest
from antiphon_engine.gang import ClusterSettings, RayCluster


@pytest.fixture(scope="package")
def cluster() -> Iterator[RayCluster]:
    """One Ray for all tests that do not break it; with room for two ranks."""
    ray = RayCluster(ClusterSettings(node_ranks=2))
    try:
        yield ray
    finally:
        ray.close()


@pytest.fixture(scope="package")
def roomy_cluster() -> Iterator[RayCluster]:
    """With room for all ranks of a module."""
    ray = RayCluster(ClusterSettings(node_ranks=16))
    try:
        yield ray
    finally:
        ray.close()
