"""What the driver knows of a model before there are ranks. Real ones: `test_same_tokens`."""

from __future__ import annotations

from pathlib import Path

import pytest
from antiphon_engine.gang.torch_ranks import look_at_model
from antiphon_engine.parallel import ParallelShape, ShapeRefused
from antiphon_engine.torch_engine.factory import TorchSettings

from tests.torch_engine.parallel.tiny_models import CONFIGS, write_model


def test_a_shape_that_the_model_cannot_have_is_refused_before_a_process_is_started(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", CONFIGS["qwen3"])
    with pytest.raises(ShapeRefused, match="tensor parallel size 3 does not divide the model's 8 query heads"):
        look_at_model(TorchSettings(model=str(folder)), ParallelShape(tensor=3), print)
