"""The Helm chart, rendered by the Helm SDK without a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import helm_python
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "antiphon"


def render(
    values: dict[str, Any] | None = None, *, name: str = "antiphon", namespace: str = "antiphon"
) -> list[dict[str, Any]]:
    """All objects of a release with these values, in the order of their files. Raises helm_python.HelmError."""
    with helm_python.Chart.load(CHART) as chart:
        chart.validate_schema(chart.merge_values(values or {}))
        files = chart.render(values or {}, name=name, namespace=namespace)
    return [
        document
        for path in sorted(files)
        if path.endswith(".yaml")
        for document in yaml.safe_load_all(files[path])
        if document
    ]


def find(objects: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    """The one object of that kind and name."""
    (found,) = [one for one in objects if one["kind"] == kind and one["metadata"]["name"] == name]
    return found
