"""What an `antiphon serve` command line means, in processes."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
from antiphon.configuration import load, specs, values
from antiphon.deployment import Deployment, ProcessPlan, handed_on, plan
from antiphon.options import ServeOptions
from antiphon_gateway.options import GatewayOptions
from antiphon_worker.options import WorkerOptions


def planned(environment: dict[str, str] | None = None, cores: int = 8, **own: Any) -> Deployment:
    environment = environment or {}
    return plan(
        ServeOptions(**own),
        values(handed_on(), argparse.Namespace(), environment),
        redis_url="unix:///r/valkey.sock",
        folder=Path("/r"),
        cores=cores,
        environment=environment,
    )


def worker(process: ProcessPlan) -> WorkerOptions:
    """The options as the child will read them."""
    return load(WorkerOptions, argparse.Namespace(), process.environment)


def test_one_worker_of_each_role_by_default() -> None:
    deployment = planned(port=8123)
    assert [process.name for process in deployment.workers] == ["prefill-0", "decode-0"]
    prefill, decode = (worker(process) for process in deployment.workers)
    assert (prefill.role, decode.role) == ("prefill", "decode")
    assert (prefill.worker_id, decode.worker_id) == ("prefill-0", "decode-0")
    assert prefill.redis_url == decode.redis_url == "unix:///r/valkey.sock"
    assert Path(prefill.ready_file) == deployment.workers[0].ready_file

    gateway = load(GatewayOptions, argparse.Namespace(), deployment.gateway.environment)
    assert (gateway.port, gateway.redis_url) == (8123, "unix:///r/valkey.sock")


def test_without_prefill_workers_the_others_do_both() -> None:
    deployment = planned(prefill=0, decode=2)
    assert [worker(process).role for process in deployment.workers] == ["both", "both"]


@pytest.mark.parametrize(("cores", "threads"), [(8, 2), (4, 1), (1, 1)])
def test_the_cores_are_shared_out_among_the_workers(cores: int, threads: int) -> None:
    deployment = planned(prefill=2, decode=2, cores=cores)
    assert {worker(process).threads for process in deployment.workers} == {threads}


def test_threads_that_were_asked_for_are_kept() -> None:
    assert {worker(process).threads for process in planned(threads=3).workers} == {3}


def test_options_of_workers_and_gateway_are_handed_on_and_nothing_else_of_ours() -> None:
    given = {"ANTIPHON_ENGINE": "timed", "ANTIPHON_QUEUE_SIZE": "7", "ANTIPHON_PORT": "1", "PATH": "/bin"}
    deployment = planned(given)
    assert worker(deployment.workers[0]).engine == "timed"
    assert worker(deployment.workers[0]).port == 0
    gateway = load(GatewayOptions, argparse.Namespace(), deployment.gateway.environment)
    assert gateway.queue_size == 7
    assert deployment.gateway.environment["PATH"] == "/bin"


def test_workers_can_be_told_apart_by_their_command_line() -> None:
    assert planned().workers[1].command[-5:] == ("demo", "--worker-id", "decode-0", "--role", "decode")


def test_secrets_are_not_on_any_command_line() -> None:
    deployment = planned()
    for process in (*deployment.workers, deployment.gateway, deployment.prepare):
        assert "valkey" not in " ".join(process.command)


def test_every_option_of_workers_and_gateway_is_handed_on_or_decided_by_serve() -> None:
    decided = {"role", "worker", "worker_id", "status_port", "advertise_host", "ready_file"}
    of_a_cluster = {"revision", "redis_username", "redis_password_file", "list_model", "ready_without_workers"}
    of_a_cluster |= {"ray_head", "ray_join", "ray_node_ranks"}
    known = {spec.field for spec in (*handed_on(), *specs(ServeOptions))} | decided | of_a_cluster
    assert {spec.field for spec in (*specs(WorkerOptions), *specs(GatewayOptions))} <= known


@pytest.mark.parametrize(
    "wrong", [{"prefill": -1}, {"decode": 0}, {"port": 65536}, {"start_timeout_s": 0.0}, {"threads": -1}]
)
def test_numbers_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="--"):
        ServeOptions(**wrong)


def test_prefill_and_decode_workers_may_have_shapes_of_their_own() -> None:
    given = {"ANTIPHON_TENSOR_PARALLEL": "2", "ANTIPHON_PIPELINE_PARALLEL": "2"}
    deployment = planned(given, prefill_tensor_parallel=4, decode_pipeline_parallel=1)
    shapes = [
        (record.role, record.tensor_parallel, record.pipeline_parallel)
        for record in (worker(process) for process in deployment.workers)
    ]
    assert shapes == [("prefill", 4, 2), ("decode", 2, 1)]
