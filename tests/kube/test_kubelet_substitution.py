"""Paths and Service names of a container become those of this machine, or the test hears of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.kube.kubelets.runtime import TestFault
from tests.support.kube.kubelets.substitution import (
    Mount,
    Mounts,
    ServiceName,
    from_table,
    services_named,
    services_substituted,
)


@pytest.fixture
def mounts(tmp_path: Path) -> Mounts:
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "password").write_text("x")
    return Mounts(
        "worker",
        [
            Mount("/etc/redis", tmp_path / "secret", fixed=True),
            Mount("/models", tmp_path / "models", fixed=False),
            Mount("/models/shared", tmp_path / "shared", fixed=False),
            Mount("/tmp", tmp_path / "scratch", fixed=False),
        ],
        frozenset({"/tmp"}),
    )


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("/etc/redis/password", "{}/secret/password"),
        ("--file=/etc/redis/password", "--file={}/secret/password"),
        ("/models", "{}/models"),
        ("/models/", "{}/models/"),
        ("/models/a/b.bin", "{}/models/a/b.bin"),
        ("/models/shared/a", "{}/shared/a"),
        ("/models/a:/models/shared", "{}/models/a:{}/shared"),
        ("cat /models/a > '/tmp/b'", "cat {}/models/a > '{}/scratch/b'"),
        ("/models2/a", "/models2/a"),
        ("http://host/models/a", "http://host/models/a"),
        ("/usr/bin/true", "/usr/bin/true"),
    ],
)
def test_a_path_is_replaced_by_whole_prefix(mounts: Mounts, tmp_path: Path, text: str, wanted: str) -> None:
    assert mounts.substitute(text) == wanted.replace("{}", str(tmp_path))


def test_a_path_that_a_secret_does_not_have_is_an_error(mounts: Mounts) -> None:
    with pytest.raises(TestFault, match="/etc/redis/passwrd"):
        mounts.substitute("--file=/etc/redis/passwrd")


def test_a_mount_that_nothing_names_is_an_error(mounts: Mounts) -> None:
    mounts.substitute("/models/a /etc/redis/password")
    with pytest.raises(TestFault, match=r"'/models/shared'\]"):
        mounts.check_all_used()
    mounts.substitute("/models/shared")
    mounts.check_all_used()


def test_service_names_are_found_and_replaced() -> None:
    text = "redis://me@valkey.infra.svc:6379/0 gang-0.workers.chat.svc.cluster.local other.svc.example.com"
    named = services_named(text)
    assert named == {ServiceName("valkey.infra", 6379), ServiceName("gang-0.workers.chat", None)}
    addresses = {
        ServiceName("valkey.infra", 6379): "127.0.0.1:7000",
        ServiceName("gang-0.workers.chat", None): "127.1.2.3",
    }
    assert services_substituted(text, addresses) == "redis://me@127.0.0.1:7000/0 127.1.2.3 other.svc.example.com"


def test_the_tests_table_answers_by_name_and_port() -> None:
    table = {"valkey.infra.svc:6379": "127.0.0.1:7000", "gateway.infra.svc": "127.0.0.1"}
    assert from_table(table, ServiceName("valkey.infra", 6379)) == "127.0.0.1:7000"
    assert from_table(table, ServiceName("gateway.infra", 80)) == "127.0.0.1:80"
    assert from_table(table, ServiceName("valkey.infra", 1)) is None
