"""Workers as an operator starts them: each with an address of its own, a revision, and options of a cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.eventually import eventually
from tests.support.installed import has_nixl
from tests.support.workers import AttachClient, Workers, prompt_of

TRANSPORTS = [
    "tcp",
    pytest.param("ucx", marks=pytest.mark.skipif(not has_nixl(), reason="NIXL is not installed")),
]


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_workers_on_addresses_of_their_own_reach_each_other(tmp_path: Path, transport: str) -> None:
    """Equal ports on two addresses, as pods have them; nothing listens elsewhere."""
    common = ("--engine", "timed", "--timed-block-bytes", "512", "--transport", transport, "--name", "chat/qwen")
    async with Workers(tmp_path, *common, "--revision", "4f2a1c") as workers:
        prefill = await workers.start("--role", "prefill", "--host", "127.0.0.21", "--advertise-host", "127.0.0.21")
        port, status_port = (
            address.rpartition(":")[2] for address in (prefill.peer.address, prefill.ready.status_address)
        )
        decode = await workers.start(
            *("--role", "decode", "--host", "127.0.0.22", "--advertise-host", "127.0.0.22"),
            *("--port", port, "--status-port", status_port),
        )
        assert decode.ready.address == f"127.0.0.22:{port}"
        assert decode.ready.status_address == f"127.0.0.22:{status_port}"
        async with AttachClient(prefill), AttachClient(decode) as client:
            assert client.welcome is not None
            assert client.welcome.revision == "4f2a1c"
            await client.wire_up(prefill)
            answer = await client.run(client.submission(prompt_of(400), prefill=[prefill], max_tokens=4))
            assert answer.usage is not None
            assert answer.usage.prefill_worker_id == prefill.worker_id
            assert answer.usage.pulled_blocks > 0
        status = await decode.until_idle()
        [link] = status["links"]
        assert (link["transport"], link["up"]) == (transport, True)
        assert (status["revision"], status["model"]) == ("4f2a1c", "chat/qwen")
        assert status["active_requests"] == status["pins"] == (await prefill.status())["prefill_runs"] == 0
        assert await decode.page("/ready") == "ready\n"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--tensor-parallel", "2"), "the timed engine computes nothing that tensor 2 could share"),
        (("--tensor-parallel", "0"), "tensor parallel size 0: it has to be 1 or more"),
        (("--engine", "torch", "--expert-parallel", "2"), "set it to 1"),
        (("--ray-head",), "--ray-head: a replica of one rank needs no Ray"),
        (("--ray-join", "head.workers.chat.svc"), "it has to be HOST:PORT"),
        (("--redis-url", "redis://:word@127.0.0.1:1", "--redis-username", "worker"), "--redis-url"),
    ],
)
async def test_what_cannot_be_done_is_one_sentence_and_exit_code_2(
    tmp_path: Path, options: tuple[str, ...], words: str
) -> None:
    async with Workers(tmp_path) as workers:
        with pytest.raises(AssertionError, match="the worker ended") as raised:
            await workers.start(*options)
        assert workers._processes[-1].returncode == 2
        assert words in str(raised.value)
        assert "Traceback" not in str(raised.value)


async def test_a_worker_is_ready_whatever_becomes_of_redis(tmp_path: Path) -> None:
    async with Workers(tmp_path) as workers:
        worker = await workers.start("--redis-url", "redis://127.0.0.1:1", "--redis-password-file", "/nowhere/password")
        await eventually(lambda: "/nowhere/password" in worker.log)
        assert await worker.page("/ready") == "ready\n"
