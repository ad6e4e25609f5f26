"""What only the `ucx` transport does. Its parts run in processes of their own, which leave without interpreter exit."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import numpy as np
import pytest
from antiphon_kvtransfer.transport import Region, TransportUnavailable
from antiphon_kvtransfer.ucx import UcxTransport

needs_nixl = pytest.mark.skipif(importlib.util.find_spec("nixl_cu12") is None, reason="NIXL is not installed")


def _run(script: str, **environment: str) -> str:
    """Run the body of an async function in a process that leaves in time. Returns what it printed."""
    body = "\n".join("    " + line for line in script.strip().splitlines())
    program = (
        "import asyncio, numpy as np, pytest\n"
        "from antiphon_kvtransfer.transport import *\n"
        "from antiphon_telemetry.exit import leave\n"
        "from tests.support.transport_peer import *\n"
        f"async def main():\n{body}\n"
        "asyncio.run(main())\n"
        "leave(0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


async def test_without_nixl_it_is_unavailable_and_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl_cu12", None)
    pool = np.zeros(4096, np.uint8)
    transport = UcxTransport(Region(pool.ctypes.data, pool.nbytes), owner="worker/1")
    with pytest.raises(TransportUnavailable, match="pip install --no-deps nixl-cu12"):
        await transport.start()
    await transport.close()


def test_importing_the_transport_does_not_import_nixl() -> None:
    check = "import sys, antiphon_kvtransfer.ucx; sys.exit(any(name.startswith('nixl') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", check], timeout=60, check=False).returncode == 0


@needs_nixl
def test_a_thread_that_is_stuck_in_nixl_keeps_nobody_waiting() -> None:
    """Nor does one whose command failed: who asked is told, and the thread goes on."""
    printed = _run(
        """
import logging, threading
from antiphon_kvtransfer import ucx
ucx._SETTLE_S = 0.2
logging.getLogger("antiphon.kvtransfer.ucx").setLevel(logging.ERROR)
pool = np.zeros(4096, np.uint8)
transport = ucx.UcxTransport(Region(pool.ctypes.data, pool.nbytes), owner="worker/1")
await transport.start()
with pytest.raises(ZeroDivisionError):
    await transport._thread.call(lambda: 1 / 0)
release = threading.Event()
stuck = transport._thread.call(release.wait)
async with asyncio.timeout(10):
    await transport._thread.forget("nobody")
    await transport.close()
print("closed", stuck.done())
release.set()
"""
    )
    assert printed == "closed False\n"


@needs_nixl
def test_a_read_given_up_on_a_stopped_peer_has_not_ended_until_the_peer_runs_on() -> None:
    """Over UCX's TCP the data of a given-up read still lands, long after: only `ended` says when it cannot any more.

    Neither NIXL's release of the transfer nor removing the remote agent prevents that, so `disconnect` must not do
    either before the end.
    """
    printed = _run(
        """
pool = empty_pool()
reader = make_transport("ucx", pool, "reader/1")
await reader.start()
with TransportPeer("ucx") as peer:
    await reader.connect(peer.key, peer.metadata, 20)
    peer.stop()
    handle = reader.read(peer.key, [ReadRange(0, 0, POOL_BYTES)])
    with pytest.raises(TransportError, match="within 0.3 s"):
        await handle.wait(0.3)
    await reader.disconnect(peer.key)
    assert not handle.ended.done()
    peer.go_on()
    await asyncio.wait_for(handle.ended, 20)
    assert np.array_equal(pool, pattern())
    # And the peer, by now forgotten, can be used again.
    pool[:] = 0
    await reader.connect(peer.key, peer.metadata, 20)
    await reader.read(peer.key, [ReadRange(0, 0, 4096)]).wait(20)
    assert np.array_equal(pool[:4096], pattern()[:4096])
await reader.close()
print("passed")
""",
        UCX_TLS="tcp",
    )
    assert printed == "passed\n"


@needs_nixl
def test_a_read_given_up_on_a_stopped_peer_ends_when_the_peer_is_killed() -> None:
    printed = _run(
        """
pool = empty_pool()
reader = make_transport("ucx", pool, "reader/1")
await reader.start()
with TransportPeer("ucx") as peer:
    await reader.connect(peer.key, peer.metadata, 20)
    peer.stop()
    handle = reader.read(peer.key, [ReadRange(0, 0, POOL_BYTES)])
    with pytest.raises(TransportError, match="within 0.3 s"):
        await handle.wait(0.3)
    assert not handle.ended.done()
    peer.kill()
    await asyncio.wait_for(handle.ended, 20)
await reader.close()
print("passed")
""",
        UCX_TLS="tcp",
    )
    assert printed == "passed\n"


@needs_nixl
def test_agents_of_one_owner_never_share_a_name() -> None:
    printed = _run(
        """
import msgspec
names = set()
for _ in range(2):
    transport = make_transport("ucx", np.zeros(4096, np.uint8), "worker/1")
    await transport.start()
    names.add(msgspec.msgpack.decode(transport.metadata())["agent"])
    await transport.close()
assert all(name.startswith("worker/1/") for name in names)
print(len(names))
"""
    )
    assert printed == "2\n"


@needs_nixl
def test_an_idle_transport_leaves_the_processor_to_others() -> None:
    """NIXL's progress thread spins unless it is told to pause: the engine would lose a core to it."""
    printed = _run(
        """
import resource
def used_s():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
transport = make_transport("ucx", empty_pool(), "worker/1")
await transport.start()
began_s = used_s()
await asyncio.sleep(1)
assert used_s() - began_s < 0.25
await transport.close()
print("passed")
"""
    )
    assert printed == "passed\n"
