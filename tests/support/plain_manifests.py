"""Plain manifests for those who do not use Helm: the chart, rendered once. `make docs` writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from tests.support import chart

FOLDER = chart.ROOT / "deploy" / "kubernetes"
_HEAD = """# Rendered from charts/antiphon by `make docs`: do not edit.
# It needs the namespace `antiphon` and in it the Secret `antiphon-redis`: docs/installation.md has both commands.
"""
_VALUES: dict[str, Any] = {"valkey": {"secret": "antiphon-redis"}}


def rendered() -> dict[Path, str]:
    """Each file with its text."""
    objects = [one for one in chart.render(_VALUES) if "helm.sh/hook" not in one["metadata"].get("annotations", {})]
    for one in objects:
        _without_helm(one)
    crds = [one for one in objects if one["kind"] == "CustomResourceDefinition"]
    rest = [one for one in objects if one["kind"] != "CustomResourceDefinition"]
    return {FOLDER / "crds.yaml": _text(crds), FOLDER / "antiphon.yaml": _HEAD + _text(rest)}


def _without_helm(one: dict[str, Any]) -> None:
    metadata = one["metadata"]
    metadata.get("annotations", {}).pop("helm.sh/resource-policy", None)
    if not metadata.get("annotations", {"some": "left"}):
        del metadata["annotations"]
    template = one.get("spec", {}).get("template", {}).get("metadata", {})
    for labels in (metadata.get("labels", {}), template.get("labels", {})):
        labels.pop("helm.sh/chart", None)
        if "app.kubernetes.io/managed-by" in labels:
            labels["app.kubernetes.io/managed-by"] = "kubectl"


def _text(objects: list[dict[str, Any]]) -> str:
    return "---\n".join(yaml.safe_dump(one, sort_keys=False, width=120) for one in objects)


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for path, text in rendered().items():
        path.write_text(text)


if __name__ == "__main__":
    main()
