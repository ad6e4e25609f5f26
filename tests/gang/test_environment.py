"""How every Ray of ours is set, and where a cluster is: on this machine alone, or where Ray would look for it."""

from __future__ import annotations

import socket

import pytest
from antiphon_engine.gang import environment
from antiphon_engine.gang.environment import is_on_loopback_alone


@pytest.mark.parametrize(("listens_on", "alone"), [("127.0.0.1", True), ("0.0.0.0", False)])
def test_a_cluster_that_listens_on_loopback_alone_is_told_from_rays_own(
    listens_on: str, alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "_outer_address", lambda: "127.0.0.2")
    with socket.create_server((listens_on, 0)) as server:
        port = server.getsockname()[1]
        assert is_on_loopback_alone(f"127.0.0.1:{port}") is alone
        assert is_on_loopback_alone(f"localhost:{port}") is alone


def test_another_machines_cluster_is_not_on_loopback() -> None:
    assert not is_on_loopback_alone("ray-head.example:6380")


def test_what_was_exported_for_another_ray_is_not_obeyed_and_none_kills_ranks_for_memory() -> None:
    """Ray's watch over memory kills processes where the machine's is nearly full, whoever has filled it."""
    found = {"PATH": "/bin", "RAY_ADDRESS": "10.0.0.1:6379", "RAY_memory_usage_threshold": "0.1"}
    environment.prepare(found, "token", "10.0.0.2")
    assert found["PATH"] == "/bin"
    assert "RAY_ADDRESS" not in found
    assert "RAY_memory_usage_threshold" not in found
    assert found["RAY_memory_monitor_refresh_ms"] == "0"
    assert found["RAY_AUTH_TOKEN_PATH"] == "token"
