"""results/*.json as tables: results/table.md, and the part of the README between its two markers.

    python benchmarks/scaling/tables.py

Nothing in them is written by hand. What is asked for, load by load, is in the first table; every policy's figures are
in the second.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ORDER = (
    *("constant", "step", "ramp", "spike", "sawtooth", "azure_code", "azure_conv", "mooncake", "servegen"),
    "step_failures",
)
BEGIN, END = "<!-- results: written by tables.py -->", "<!-- end of results -->"
OURS = "antiphon"


def main() -> int:
    found = dict(_results())
    text = "\n".join([*_asked(found), "", *_all(found)]) + "\n"
    (HERE / "results" / "table.md").write_text(text)
    readme = HERE / "README.md"
    before, _, rest = readme.read_text().partition(BEGIN)
    readme.write_text(f"{before}{BEGIN}\n\n{text}\n{END}{rest.partition(END)[2]}")
    print(text)
    return 0


def _results() -> Iterator[tuple[str, dict[str, Any]]]:
    paths = {path.stem: path for path in (HERE / "results").glob("*.json")}
    for name in ORDER:
        for title in sorted(one for one in paths if one == name or one.startswith(f"{name}-")):
            yield title, json.loads(paths[title].read_text())


def _asked(found: dict[str, dict[str, Any]]) -> Iterator[str]:
    columns = (
        *("load", "oracle, GPU-hours (bound)", "jump, workers", "best causal", "asked: inside", "asked: GPU-hours"),
        *("antiphon inside", "GPU-hours", "inside kept", "cost kept", "baselines better or equal in both"),
        "decisions made again, equal",
    )
    yield f"| {' | '.join(columns)} |"
    yield "|" + "---|" * len(columns)
    for name, told in found.items():
        ours, oracle = told["policies"].get(OURS), told["oracle"]
        if ours is None:
            continue
        better = [
            policy
            for policy, one in told["policies"].items()
            if policy != OURS and one["attainment"] >= ours["attainment"] and one["gpu_hours"] <= ours["gpu_hours"]
        ]
        cells = (
            name,
            f"{oracle['gpu_hours']:.2f} ({oracle['bound_gpu_hours']:.2f})",
            f"{told.get('jump_workers', 0.0):.1f}",
            _percent(told["causal_attainment"]),
            _percent(told["asked_attainment"]),
            f"{told['allowed_gpu_hours']:.2f}",
            _percent(ours["attainment"]),
            f"{ours['gpu_hours']:.2f}",
            _yes(ours["attainment"] >= told["asked_attainment"]),
            _yes(ours["within_cost"]),
            ", ".join(better) or "none",
            _replayed(ours.get("replayed")),
        )
        yield f"| {' | '.join(cells)} |"


def _all(found: dict[str, dict[str, Any]]) -> Iterator[str]:
    yield (
        "| load | policy | attainment | infeasible_share | gpu_hours | gpu_hours_over_oracle | over the bound "
        "| mean_replicas | reversals_per_10_min (most) | seconds_back_in_sla |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for name, told in found.items():
        oracle = told["oracle"]
        for policy, one in told["policies"].items():
            yield _row(name, policy, one, one["gpu_hours_over_oracle"], one["gpu_hours_over_bound"])
        yield _row(name, "(oracle)", oracle, 1.0, oracle["gpu_hours"] / max(oracle["bound_gpu_hours"], 1e-9))


def _row(load: str, policy: str, one: dict[str, Any], over_oracle: float, over_bound: float) -> str:
    return (
        f"| {load} | {policy} | {_percent(one['attainment'])} | {_percent(one['infeasible_share'])} "
        f"| {one['gpu_hours']:.2f} | {over_oracle:.2f} | {over_bound:.2f} | {one['mean_replicas']:.2f} "
        f"| {one['reversals_per_10_min']:.2f} ({one['most_reversals_in_10_min']}) | {one['seconds_back_in_sla']:.0f} |"
    )


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100.0 * share:.2f} %"


def _replayed(found: dict[str, int] | None) -> str:
    if found is None:
        return "-"
    taken = "" if found["made_again"] == found["decisions"] else f" (taken from {found['decisions']})"
    return f"{found['equal']} of {found['made_again']}{taken}"


def _yes(is_so: bool) -> str:
    return "yes" if is_so else "no"


if __name__ == "__main__":
    sys.exit(main())
