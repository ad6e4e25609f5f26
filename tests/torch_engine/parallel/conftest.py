from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.rank_set import RankSet, rank_set
from tests.torch_engine.parallel.tiny_models import CONFIGS, write_model


@pytest.fixture(scope="package")
def ranks() -> Iterator[RankSet]:
    """Four rank processes for all tests that leave them alive."""
    with rank_set(4) as running:
        yield running


@pytest.fixture(scope="package")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every tiny model."""
    root = tmp_path_factory.mktemp("models")
    return {name: write_model(root / name, config) for name, config in CONFIGS.items()}
