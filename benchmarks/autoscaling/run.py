"""A load step in a cluster of real processes: what the operator's autoscaler makes of it, second by second.

The double of the API server runs pods as processes; operator, gateway, Valkey and workers are the real ones. Requests
come at a quiet rate, then at a high one, then not at all, whatever becomes of those before. Written down: each request
with its time to first token, the replicas wanted and ready at each second, and the decisions with their sentences.

    python -m benchmarks.autoscaling.run --engine timed --output benchmarks/autoscaling/results/timed_1.json
    python -m benchmarks.autoscaling.run --engine torch --output benchmarks/autoscaling/results/torch.json

The machine's own load is written down too: on a busy one, starts take longer and so does everything after them.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from antiphon_kvtransfer import RedisAccess
from antiphon_kvtransfer.scaling_decisions import read_decisions
from antiphon_operator import names
from antiphon_policy.scaling import ScalingDecision, decide
from antiphon_policy.scaling.remembered import decode_decision

from tests.cluster.history import POOLS, History
from tests.support.promised_models import ENGINE, NAMESPACE, PromisedModels, ready_replicas
from tests.support.served_cluster import ServedCluster
from tests.support.steady_load import Answer, SteadyLoad

MODEL = "step"
SETTLED_S = 20.0
"""The end of the high load: by then what was missing has been added, and what had queued is gone."""

PATIENCE_S = 150.0
"""A pool is idle after ten starts without a request, a minute at least."""


@dataclass(frozen=True)
class Scenario:
    engine: dict[str, Any]
    ttft_ms: float
    tpot_ms: float
    most: int
    prompt_tokens: int
    quiet: tuple[float, float]
    """Requests a second, and for how many seconds."""
    high: tuple[float, float]


SCENARIOS = {
    # Half a second for a prompt: 7 a second are 3.5 workers' work.
    "timed": Scenario(ENGINE, 2000.0, 500.0, 6, 320, (1.0, 20.0), (7.0, 80.0)),
    # The demo model on one thread each: a second worker for prompts is all that two cores can bear. Rates and promise
    # are in units of what one worker does on this machine now (`_in_units`).
    "torch": Scenario({"args": ["--threads=1", "--kv-memory-gb=0.2"]}, 4.0, 4.0, 2, 256, (0.3, 20.0), (1.5, 75.0)),
}


class Moment(msgspec.Struct, frozen=True):
    at_s: float
    wanted: dict[str, int]
    ready: dict[str, int]


class Step(msgspec.Struct, frozen=True):
    at_s: float
    action: str
    reason: str
    sentence: str


class Request(msgspec.Struct, frozen=True):
    asked_at_s: float
    ttft_ms: float


class Result(msgspec.Struct, frozen=True):
    engine: str
    begun: str
    machine: dict[str, Any]
    promised_ttft_ms: float
    quiet: tuple[float, float]
    high: tuple[float, float]
    requests: list[Request]
    failures: list[str]
    """What they said, each once."""
    failed: int
    inside_quiet: float
    inside_high: float
    """Share of all that came while the load was high."""
    inside_settled: float
    """Of those that came in its last `SETTLED_S`."""
    most_ready: dict[str, int]
    seconds_to_floor: float | None
    """From the end of the load until the pools have one replica each; None: not within `PATIENCE_S`."""
    decisions: int
    decided_again_otherwise: int
    steps: list[Step]
    timeline: list[Moment]


class Watch:
    """Looks at the pools each second."""

    def __init__(self, models: PromisedModels, began: float) -> None:
        self._models, self._began = models, began
        self.seen: list[Moment] = []

    async def run(self) -> None:
        while True:
            model = await self._models.model(MODEL)
            wanted: dict[str, int] = {}
            for role in names.ROLES:
                pool = await self._models.cluster.get(POOLS, NAMESPACE, names.pool_name(MODEL, role))
                wanted[role] = int(pool["spec"]["replicas"]) if pool else 0
            ready: dict[str, int] = {role: ready_replicas(model, role) for role in names.ROLES}
            self.seen.append(Moment(round(time.monotonic() - self._began, 2), wanted, ready))
            await asyncio.sleep(1.0)


async def measured(name: str, scenario: Scenario) -> Result:
    loads = [os.getloadavg()[0]]
    with tempfile.TemporaryDirectory() as folder:
        async with ServedCluster(Path(folder)) as served, History.of(served.cluster) as history:
            await served.cluster.namespace(NAMESPACE)
            models = PromisedModels(served, history)
            bounds = {"min": 1, "max": scenario.most}
            autoscaling = {"mode": "Enforce", "prefill": bounds, "decode": bounds}
            await models.create(MODEL, engine=scenario.engine, prefill={}, sla=_sla(scenario), autoscaling=autoscaling)
            await models.until_serving(MODEL, prefill=1, decode=1)
            if name == "torch":
                scenario = _in_units(scenario, await _alone_s(served.url, scenario.prompt_tokens))
                await models.edit(MODEL, sla=_sla(scenario))
            began, unix_ms = time.monotonic(), time.time() * 1000.0
            watch = Watch(models, began)
            watching = asyncio.create_task(watch.run())
            answers: list[Answer] = []
            failures: list[str] = []
            marks = [began]
            for per_s, for_s in (scenario.quiet, scenario.high):
                load = SteadyLoad(served.url, MODEL, per_s=per_s, prompt_tokens=scenario.prompt_tokens, max_tokens=6)
                async with load:
                    await asyncio.sleep(for_s)  # the length of the load is what is asked
                    marks.append(time.monotonic())
                answers += load.answers
                failures += [failure.what for failure in load.failures]
                loads.append(os.getloadavg()[0])
            ended = time.monotonic()
            to_floor_s = await _until_floor(models, ended)
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            key = names.model_key(NAMESPACE, MODEL)
            decisions = [decode_decision(raw) for raw in await read_decisions(RedisAccess(served.redis_url), key)]
    return Result(
        engine=name,
        begun=datetime.now(UTC).isoformat(timespec="seconds"),
        machine={
            "python": platform.python_version(),
            "cores": os.cpu_count(),
            "load": [round(one, 1) for one in loads],
        },
        promised_ttft_ms=scenario.ttft_ms,
        quiet=scenario.quiet,
        high=scenario.high,
        requests=[Request(round(one.asked_at - began, 2), round(one.ttft_ms, 1)) for one in answers],
        failures=sorted(set(failures)),
        failed=len(failures),
        inside_quiet=_inside(answers, scenario, marks[0], marks[1]),
        inside_high=_inside(answers, scenario, marks[1], marks[2]),
        inside_settled=_inside(answers, scenario, marks[2] - SETTLED_S, marks[2]),
        most_ready={role: max(moment.ready[role] for moment in watch.seen) for role in names.ROLES},
        seconds_to_floor=to_floor_s,
        decisions=len(decisions),
        decided_again_otherwise=sum(not _same(decision) for decision in decisions),
        steps=[
            Step(round((one.at_ms - unix_ms) / 1000.0, 1), one.action.value, one.reason.value, one.sentence)
            for one in decisions
            if one.action.value != "none"
        ],
        timeline=watch.seen,
    )


def _sla(scenario: Scenario) -> dict[str, Any]:
    return {"ttft": {"p95": f"{scenario.ttft_ms:.0f}ms"}, "tpot": {"p95": f"{scenario.tpot_ms:.0f}ms"}}


async def _alone_s(url: str, prompt_tokens: int) -> float:
    """Until the first token of a request that has the workers for itself: the middle one of three."""
    async with SteadyLoad(url, MODEL, per_s=0.1, prompt_tokens=prompt_tokens, max_tokens=6) as load:
        await load.until(lambda: len(load.answers) + len(load.failures) >= 3)
    assert load.failures == [], load.failures
    return sorted(answer.ttft_ms for answer in load.answers)[len(load.answers) // 2] / 1000.0


def _in_units(scenario: Scenario, alone_s: float) -> Scenario:
    """`alone_s` is the unit."""
    return replace(
        scenario,
        ttft_ms=scenario.ttft_ms * alone_s * 1000.0,
        tpot_ms=scenario.tpot_ms * alone_s * 1000.0,
        quiet=(scenario.quiet[0] / alone_s, scenario.quiet[1]),
        high=(scenario.high[0] / alone_s, scenario.high[1]),
    )


async def _until_floor(models: PromisedModels, ended: float) -> float | None:
    try:
        await models.until_serving(MODEL, PATIENCE_S, prefill=1, decode=1)
    except AssertionError:
        return None
    return round(time.monotonic() - ended, 1)


def _same(decision: ScalingDecision) -> bool:
    return decision.inputs is not None and decide(decision.inputs) == decision


def _inside(answers: Sequence[Answer], scenario: Scenario, since: float, until: float) -> float:
    asked = [one for one in answers if since <= one.asked_at < until]
    return round(sum(one.ttft_ms <= scenario.ttft_ms for one in asked) / max(1, len(asked)), 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=sorted(SCENARIOS), required=True)
    parser.add_argument("--output", type=Path, required=True)
    given = parser.parse_args()
    result = asyncio.run(measured(given.engine, SCENARIOS[given.engine]))
    given.output.parent.mkdir(parents=True, exist_ok=True)
    given.output.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    told = msgspec.to_builtins(result)
    for field in ("requests", "timeline"):
        told.pop(field)
    print(msgspec.json.format(msgspec.json.encode(told), indent=1).decode())


if __name__ == "__main__":
    main()
