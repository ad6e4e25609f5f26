"""What is measured, in order: all Models at once, an edit of each, silence, a restart, an image change of each.

Each phase ends when nothing has been written for three seconds. The bare watcher goes through the phases that mean
something for it.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from antiphon.model_file import read_models
from antiphon.render import children_of, default_context

from benchmarks.operator import bare
from benchmarks.operator.stage import MODELS, POLL_S, USER, Stage, Usage, a_stage, namespace
from tests.support.kube.operator_process import OperatorProcess

SPEC = {"source": {"uri": "demo"}, "prefill": {}, "decode": {}, "rollout": {"drainTimeout": "30s"}}
"""One worker in each pool, and no accelerator."""
_PODS_PER_MODEL = 2
_AT_ONCE = 32
_METRIC = "antiphon_operator"
_PYTHON = (sys.executable, "-m")


@dataclass(slots=True)
class Phase:
    """One phase of one watcher. Seconds count from its beginning."""

    name: str
    wall_s: dict[str, float] = field(default_factory=dict)
    """What was reached when."""
    calls: dict[str, int] = field(default_factory=dict)
    cpu_s: float = 0.0
    rss_mib: float = 0.0
    peak_rss_mib: float = 0.0
    status_writes: int = 0
    """Of Models."""
    same_pods: bool | None = None
    looks: dict[str, float] = field(default_factory=dict)
    """By how they ended."""
    plan_ms: dict[str, float] = field(default_factory=dict)
    """`count`, `sum`, and `le ...` cumulative."""
    reconcile_ms: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Options:
    models: int
    quiet_s: float
    rollout: bool


class Run:
    """One watcher on one stage."""

    def __init__(self, stage: Stage, process: OperatorProcess, options: Options, *, is_bare: bool) -> None:
        self._stage, self._process, self._options, self._bare = stage, process, options, is_bare
        self.phases: list[Phase] = []

    async def all(self) -> list[Phase]:
        view, count = self._stage.view, self._options.models
        await self._phase("start", self._start)
        await self._phase("create", self._create)
        if not self._bare:
            await self._phase("edit the SLA", lambda phase: self._edit(phase, {"sla": {"ttft": {"p95": "750ms"}}}))
        if self._options.quiet_s:
            await self._phase("silence", self._silence)
        await self._phase("restart", self._restart)
        if self._options.rollout and not self._bare:
            await self._phase("change the image", lambda phase: self._edit(phase, {"engine": {"image": "worker:2"}}))
        assert len(view.models) == count
        return self.phases

    async def _phase(self, name: str, act: Callable[[Phase], Awaitable[None]]) -> None:
        phase, since = Phase(name), self._stage.mark()
        writes = self._stage.view.status_writes
        fresh = name in ("start", "restart")
        cpu_s, before = (0.0, {}) if fresh else (self._usage().cpu_s, await self._metrics())
        await act(phase)
        usage, after = self._usage(), await self._metrics()
        phase.cpu_s, phase.rss_mib, phase.peak_rss_mib = usage.cpu_s - cpu_s, usage.rss_mib, usage.peak_rss_mib
        phase.calls = dict(sorted(self._stage.calls(since).items()))
        phase.status_writes = self._stage.view.status_writes - writes
        passed = {key: value - before.get(key, 0.0) for key, value in after.items()}
        phase.looks = _labelled(passed, f"{_METRIC}_reconciles_total", "outcome")
        phase.plan_ms, phase.reconcile_ms = (
            _histogram(passed, f"{_METRIC}_{what}_milliseconds") for what in ("plan", "reconcile")
        )
        self.phases.append(phase)

    # -- the phases

    async def _start(self, phase: Phase) -> None:
        began_at = time.perf_counter()
        await self._process.start()
        if not self._bare:
            await self._process.until_acting()
        phase.wall_s["acting"] = time.perf_counter() - began_at
        if not self._bare:
            # Every Model has had its first look.
            while (await self._process.status())["queue_depth"]:  # noqa: ASYNC110 - it is another process
                await asyncio.sleep(POLL_S)
            phase.wall_s["all looked at"] = time.perf_counter() - began_at
        await self._stage.settled(self._stage.mark())

    async def _create(self, phase: Phase) -> None:
        view, count, since = self._stage.view, self._options.models, self._stage.mark()
        began_at = time.perf_counter()
        slots = asyncio.Semaphore(_AT_ONCE)

        async def create(number: int) -> None:
            metadata = {"name": f"model-{number}", "namespace": namespace(number)}
            body = {"apiVersion": f"{MODELS.group}/{MODELS.version}", "kind": MODELS.kind, "metadata": metadata}
            async with slots:
                await self._stage.cluster.create(MODELS, body | {"spec": SPEC})

        await asyncio.gather(*map(create, range(count)))
        phase.wall_s["created"] = time.perf_counter() - began_at
        pods = count * _PODS_PER_MODEL
        phase.wall_s["all pods ready"] = (
            await self._stage.until(lambda: len(view.ready_pods) == pods, f"{pods} pods are ready")
        ) - began_at
        await self._all_serve(phase, began_at, since)

    async def _edit(self, phase: Phase, spec: dict[str, Any]) -> None:
        view, since, pods = self._stage.view, self._stage.mark(), set(self._stage.view.pods)
        began_at = time.perf_counter()
        slots = asyncio.Semaphore(_AT_ONCE)

        async def edit(key: str) -> None:
            inside, name = key.split("/")
            async with slots:
                await self._stage.cluster.client.merge_patch(MODELS, inside, name, {"spec": spec})

        await asyncio.gather(*map(edit, tuple(view.models)))
        phase.wall_s["edited"] = time.perf_counter() - began_at
        await self._all_serve(phase, began_at, since)
        phase.same_pods = pods == set(view.pods)

    async def _silence(self, phase: Phase) -> None:
        phase.wall_s["silence"] = self._options.quiet_s
        await asyncio.sleep(self._options.quiet_s)

    async def _restart(self, phase: Phase) -> None:
        pods = set(self._stage.view.pods)
        await self._process.stop()
        await self._start(phase)
        phase.same_pods = pods == set(self._stage.view.pods)

    async def _all_serve(self, phase: Phase, began_at: float, since: int) -> None:
        view, count = self._stage.view, self._options.models
        await self._stage.until(lambda: len(view.serving) == count, f"{count} Models serve")
        phase.wall_s["all Models Ready"] = max(view.served_at.values()) - began_at
        phase.wall_s["settled"] = await self._stage.settled(since) - began_at

    # -- reading

    def _usage(self) -> Usage:
        assert self._process.process is not None
        return Usage.of(self._process.process.pid)

    async def _metrics(self) -> dict[str, float]:
        if self._bare:
            return {}
        lines = (await self._process.page("/metrics"))[1].splitlines()
        samples = (line.rpartition(" ") for line in lines if line.startswith(_METRIC))
        return {name: float(value) for name, _, value in samples}


async def run_operator(folder: Path, options: Options) -> list[Phase]:
    async with a_stage(folder, options.models) as stage:
        process = OperatorProcess(stage.cluster.kubeconfig_for(USER), folder)
        return await _run(stage, process, options, is_bare=False)


async def run_bare(folder: Path, options: Options) -> list[Phase]:
    async with a_stage(folder, options.models) as stage:
        children = folder / "children.json"
        children.write_text(canned_children())
        program = (*_PYTHON, "benchmarks.operator.bare", "--children", str(children))
        process = OperatorProcess(stage.cluster.kubeconfig_for(USER), folder, name="bare", program=program)
        return await _run(stage, process, options, is_bare=True)


async def _run(stage: Stage, process: OperatorProcess, options: Options, *, is_bare: bool) -> list[Phase]:
    run = Run(stage, process, options, is_bare=is_bare)
    try:
        return await run.all()
    except Exception as error:
        error.add_note(process.last_lines())
        raise
    finally:
        if process.is_running:
            process.kill()
            await process.ended()


def canned_children() -> str:
    """What the operator makes at first, of a Model with the name and uid that `bare` puts its own in place of."""
    about = {"name": bare.NAME, "namespace": "default"}
    body = {"apiVersion": f"{MODELS.group}/{MODELS.version}", "kind": MODELS.kind, "metadata": about, "spec": SPEC}
    (document,) = read_models(json.dumps(body), "benchmark", "default").models
    children = children_of(document, default_context())
    uid = children[0]["metadata"]["ownerReferences"][0]["uid"]
    return json.dumps(children).replace(uid, bare.UID)


def _labelled(samples: dict[str, float], metric: str, label: str) -> dict[str, float]:
    start = f'{metric}{{{label}="'
    found = {name.removeprefix(start).removesuffix('"}'): n for name, n in samples.items() if name.startswith(start)}
    return {name: value for name, value in found.items() if value}


def _histogram(samples: dict[str, float], metric: str) -> dict[str, float]:
    found = {f"le {le}": count for le, count in _labelled(samples, f"{metric}_bucket", "le").items()}
    return {what: samples[f"{metric}_{what}"] for what in ("count", "sum") if f"{metric}_{what}" in samples} | found
