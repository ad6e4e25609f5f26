"""What a scenario plays on: a cluster with nodes and CRDs, the history of it, and an operator."""

from __future__ import annotations

import contextlib
import itertools
import re
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cluster.history import History
from tests.support.kube.cluster import Cluster, FakeCluster
from tests.support.kube.operator_process import PATIENT, OperatorProcess
from tests.support.kube.real_cluster import KubeconfigCluster, given_kubeconfig

OPERATOR_USER = "operator"
_RUN = secrets.token_hex(2)
"""On a real cluster the names of an earlier run may still be there."""
_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Stage:
    cluster: Cluster
    history: History
    operator: OperatorProcess


@contextlib.asynccontextmanager
async def a_cluster(folder: Path) -> AsyncIterator[Cluster]:
    """The double, or the real one that was given; with two nodes without devices, and the CRDs."""
    given = given_kubeconfig()
    made: FakeCluster | KubeconfigCluster = FakeCluster(folder) if given is None else KubeconfigCluster(given, folder)
    async with made as cluster:
        for _ in range(2):
            await cluster.add_node(unique("plain"))
        await cluster.install_crds()
        yield cluster


@contextlib.asynccontextmanager
async def a_stage(folder: Path) -> AsyncIterator[Stage]:
    async with (
        a_cluster(folder) as cluster,
        History.of(cluster) as history,
        OperatorProcess(operator_kubeconfig(cluster, folder), folder, *PATIENT, revived=True) as operator,
    ):
        await operator.until_acting()
        yield Stage(cluster, history, operator)


def operator_kubeconfig(cluster: Cluster, folder: Path, user: str = OPERATOR_USER) -> Path:
    """On the double the operator is a user of its own, so that its requests can be told from others."""
    if isinstance(cluster, FakeCluster):
        return cluster.server.write_kubeconfig(folder / f"kubeconfig-{user}", user=user)
    return cluster.kubeconfig


async def a_namespace(cluster: Cluster, called: str) -> str:
    """A new one, named after a test."""
    words = re.sub(r"[^a-z0-9]+", "-", called.lower().removeprefix("test_")).strip("-")
    name = unique(words[:40].strip("-"))
    await cluster.namespace(name)
    return name


def unique(name: str) -> str:
    return f"{name}-{_RUN}-{next(_numbers)}"


def device() -> str:
    """An extended resource that no other test's nodes have."""
    return f"test.antiphon.dev/{unique('gpu')}"


@contextlib.asynccontextmanager
async def another_operator(stage: Stage, folder: Path, *options: str, **known: Any) -> AsyncIterator[OperatorProcess]:
    """In the place of the shared one, which ends first: both would want the same Lease. `options` and `known` as of
    OperatorProcess. The shared one comes back with the next test that asks for it."""
    if stage.operator.is_running:
        await stage.operator.stop()
    kubeconfig = operator_kubeconfig(stage.cluster, folder)
    async with OperatorProcess(kubeconfig, folder, *PATIENT, *options, **known) as operator:
        await operator.until_acting()
        try:
            yield operator
        finally:
            if operator.is_running:
                await operator.stop()
