"""What prompts on decode workers bring and cost: Antiphon as it is, and with such prompts priced out.

    python -m benchmarks.routing.no_local --traces DIR

They are priced out by telling the policy that decode workers compute prompts in chunks of 8 tokens (few remain: those
that are nearly all cached, and those that no prefill worker would compute in time).
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from antiphon_policy.route_records import WorkerRole, WorkerView
from antiphon_simulate.cluster import simulate
from antiphon_simulate.figures import figures
from antiphon_simulate.policies.antiphon import AntiphonPolicy
from antiphon_simulate.records import ClusterShape, Sla, WorkerState
from antiphon_simulate.timings import DEFAULT, read_timing
from antiphon_simulate.workload import make_workload

from benchmarks.routing.rows import head_of
from benchmarks.routing.study import ROOMY_BLOCKS, SHAPES

CASES = (
    ("arxiv", 4, 0.45, 1.189, 0),
    ("arxiv", 8, 0.45, 2.378, 2),
    ("synthetic", 4, 0.45, 1.272, 0),
    ("agentic", 4, 1.1, 2.055, 0),
    ("synthetic", 8, 0.85, 2.544, 0),
)
"""Trace, workers, rate (share of the reach), reach, seed."""


class NoLocalPolicy(AntiphonPolicy):
    def _view(self, worker: WorkerState) -> WorkerView:
        view = super()._view(worker)
        return view if worker.role is WorkerRole.PREFILL else replace(view, chunk_tokens=8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True, metavar="DIR")
    given = parser.parse_args()
    timing = read_timing(DEFAULT)
    print("| trace | workers | rate | seed | prompts on decode workers | inside (%) | late: first token, further |")
    print("|---|---|---|---|---|---|---|")
    for trace, workers, share, reach, seed in CASES:
        workload = make_workload(head_of(given.traces, trace), rate_scale=reach * share, seed=seed)
        for policy in (AntiphonPolicy(), NoLocalPolicy()):
            result = simulate(workload, ClusterShape(*SHAPES[workers], ROOMY_BLOCKS), timing, policy, Sla(), seed=seed)
            found = figures(result, timing)
            local = sum(one.placement is not None and one.placement.prefill is None for one in result.outcomes)
            print(
                f"| {trace} | {workers} | {share:g} | {seed} | {local} | {100 * (found.inside_sla_share or 0):.1f} "
                f"| {found.late_ttft}, {found.late_tpot} |"
            )


if __name__ == "__main__":
    main()
