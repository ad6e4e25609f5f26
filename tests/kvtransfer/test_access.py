"""Redis users with rights of their own: what a worker may do, and passwords that change under a running process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from antiphon_kvtransfer import ClusterMirror, RedisAccess, RedisUrlError
from antiphon_kvtransfer.announcer import WorkerAnnouncer
from antiphon_kvtransfer.keys import ModelKeys
from antiphon_operator.runtime.redis_access import CONNECTION_COMMANDS, WORKER_COMMANDS

from tests.support.membership import FakeEngine, block, record, until
from tests.support.model_records import KEY, OperatorVoice, model_record
from tests.support.valkey import Valkey

USER = "antiphon-qwen"


@pytest.fixture
def server() -> Iterator[Valkey]:
    with Valkey() as running:
        yield running


def connect(server: Valkey) -> Any:
    return redis.Redis.from_url(server.url, protocol=2)


def set_password(server: Valkey, password: str) -> None:
    """Of a user with the rights that the operator gives to one Model's workers."""
    keys = ModelKeys(KEY)
    patterns = (keys.workers, keys.events, keys.record("*"), keys.index("*"), keys.blocks("*"))
    rules = ["reset", "on", f">{password}", *(f"~{pattern}" for pattern in patterns), "-@all"]
    rules += [f"+{command}" for command in (*WORKER_COMMANDS, *CONNECTION_COMMANDS)]
    with connect(server) as client:
        client.execute_command("ACL", "SETUSER", USER, *rules)


async def test_a_worker_needs_no_more_than_its_models_user_may_do(server: Valkey, tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("first\n")
    set_password(server, "first")
    engine = FakeEngine()
    access = RedisAccess(server.url, USER, str(file))
    OperatorVoice(server).put(model_record())
    mirror = ClusterMirror(server.url, on_change=lambda: None, look_ms=100)
    announcer = WorkerAnnouncer(access, record(model=KEY), engine.snapshot, list_model=False)
    engine.announcer = announcer
    tasks = [asyncio.create_task(announcer.run()), asyncio.create_task(mirror.run())]
    try:
        await until(lambda: announcer.healthy and len(mirror.workers()) == 1)
        engine.change({block(1)})
        await until(lambda: mirror.blocks.contents(KEY, "w0") == {block(1)})
        await announcer.withdraw()
        await until(lambda: not mirror.workers())
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_rotated_password_needs_no_restart_and_a_wrong_one_is_said_once(
    server: Valkey, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    file = tmp_path / "password"
    file.write_text("s3cret-1")
    set_password(server, "s3cret-1")
    access = RedisAccess(server.url, USER, str(file))
    announcer = WorkerAnnouncer(access, record(model=KEY), FakeEngine().snapshot, list_model=False, ttl_ms=400)
    task = asyncio.create_task(announcer.run())
    try:
        await until(lambda: announcer.healthy)
        set_password(server, "s3cret-2")
        with connect(server) as client:
            client.execute_command("CLIENT", "KILL", "TYPE", "normal")
        await until(lambda: not announcer.healthy)
        await until(lambda: "refuses the user name or the password" in caplog.text)
        # It is tried again and again, and said once.
        await asyncio.sleep(1.0)
        assert caplog.text.count("refuses the user name or the password") == 1
        file.write_text("s3cret-2")
        await until(lambda: announcer.healthy)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert "s3cret" not in caplog.text


async def test_a_gateways_mirror_has_a_user_too_and_a_missing_file_is_an_outage(
    server: Valkey, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with connect(server) as client:
        client.execute_command("ACL", "SETUSER", "gateway", "on", ">word", "~antiphon:*", "+@all")
    OperatorVoice(server).put(model_record())
    file = tmp_path / "password"
    mirror = ClusterMirror(RedisAccess(server.url, "gateway", str(file)), on_change=lambda: None, look_ms=100)
    task = asyncio.create_task(mirror.run())
    try:
        await until(lambda: str(file) in caplog.text)
        file.write_text("word")
        await until(lambda: mirror.healthy and bool(mirror.model_records()))
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def test_credentials_may_not_be_given_twice() -> None:
    for access in (RedisAccess("redis://:word@host", "user"), RedisAccess("redis://u@host", "", "/file")):
        with pytest.raises(RedisUrlError, match="leave it out of the URL") as raised:
            access.check()
        assert "word" not in str(raised.value).replace("password", "")
