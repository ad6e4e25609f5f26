"""One operator acts at a time: by Leaderships in this process, and by real processes that are killed and stopped.

Time is scaled down (a Lease of 2 s); what is asserted is who held the Lease in which order and who wrote, not when.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest
from antiphon_operator.kube.client import KubeClient
from antiphon_operator.kube.election import LeaseTiming, LeaseWatch, new_lease, renewed, same_holding
from antiphon_operator.kube.errors import AccessError, NotLeader
from antiphon_operator.kube.lease import Leadership, boot_clock_s
from antiphon_operator.kube.resources import CONFIG_MAPS

from tests.operator.kube import lease_holder
from tests.operator.kube.lease_api import LeaseApi, serving
from tests.support.eventually import eventually

TIMING = lease_holder.TIMING


class Lost:
    """An `on_lost` that can be asked."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self) -> None:
        self.times += 1


@pytest.fixture
def api() -> LeaseApi:
    return LeaseApi()


@pytest.fixture
async def kubeconfig(api: LeaseApi, tmp_path: Path) -> AsyncIterator[str]:
    async with serving(api, tmp_path) as path:
        yield path


@contextlib.asynccontextmanager
async def candidate(
    kubeconfig: str, identity: str, lost: Lost | None = None, clock: Callable[[], float] = boot_clock_s
) -> AsyncIterator[Leadership]:
    leadership = Leadership(
        kubeconfig, "antiphon", "operator", identity, on_lost=lost or Lost(), timing=TIMING, clock=clock
    )
    try:
        yield leadership
    finally:
        await leadership.release()


async def test_the_first_holds_it_and_the_second_only_after_it_was_released(api: LeaseApi, kubeconfig: str) -> None:
    lost = Lost()
    async with candidate(kubeconfig, "one", lost) as first, candidate(kubeconfig, "two") as second:
        await first.acquire()
        waiting = asyncio.create_task(second.acquire())
        renewals = api.writes
        await eventually(lambda: api.writes > renewals + 20)  # Longer than a Lease that nobody renews.
        assert first.may_write()
        assert not second.may_write()
        assert not waiting.done()
        await first.release()
        assert not first.may_write()
        async with asyncio.timeout(10):
            await waiting
        assert second.may_write()
    assert api.holders == ["one", "", "two", ""]
    assert lost.times == 0, "giving it up is not losing it"


async def test_a_holder_that_cannot_renew_stops_before_another_may_begin(api: LeaseApi, kubeconfig: str) -> None:
    lost = Lost()
    async with candidate(kubeconfig, "one", lost) as leadership:
        await leadership.acquire()
        api.answering.clear()
        await eventually(lambda: lost.times == 1)
        assert not leadership.may_write()
    assert api.holders == ["one"], "what is lost is not released"


async def test_a_lease_that_another_took_is_lost_at_once(api: LeaseApi, kubeconfig: str) -> None:
    lost = Lost()
    async with candidate(kubeconfig, "one", lost) as leadership:
        await leadership.acquire()
        api.take("two")
        await eventually(lambda: lost.times == 1)
        assert not leadership.may_write()
    assert api.holders == ["one", "two"]


async def test_a_deleted_lease_is_lost(api: LeaseApi, kubeconfig: str) -> None:
    lost = Lost()
    async with candidate(kubeconfig, "one", lost) as leadership:
        await leadership.acquire()
        api.lease = None
        await eventually(lambda: lost.times == 1)


async def test_that_somebody_annotates_the_lease_does_no_harm(api: LeaseApi, kubeconfig: str) -> None:
    lost = Lost()
    async with candidate(kubeconfig, "one", lost) as leadership:
        await leadership.acquire()
        for _ in range(3):
            api.touch()
            renewals = api.writes
            await eventually(lambda: api.writes > renewals + 1)  # noqa: B023
        assert leadership.may_write()
    assert (api.holders, lost.times) == (["one", ""], 0)


async def test_time_that_the_machine_slept_counts(api: LeaseApi, kubeconfig: str) -> None:
    slept_s = 0.0
    lost = Lost()
    async with candidate(kubeconfig, "one", lost, clock=lambda: boot_clock_s() + slept_s) as leadership:
        await leadership.acquire()
        client = KubeClient.connect(kubeconfig, may_write=leadership.may_write)
        slept_s = 60.0
        with pytest.raises(NotLeader):
            await client.create(CONFIG_MAPS, "antiphon", {"metadata": {"name": "late"}})
        await eventually(lambda: lost.times == 1)
        await client.close()
    assert api.other_writes == []
    assert api.holders == ["one"]


async def test_an_outage_of_the_server_only_delays_a_candidate(api: LeaseApi, kubeconfig: str) -> None:
    api.answering.clear()
    async with candidate(kubeconfig, "one") as leadership:
        waiting = asyncio.create_task(leadership.acquire())
        await asyncio.wait([waiting], timeout=0.4)
        assert not waiting.done()
        api.answering.set()
        async with asyncio.timeout(10):
            await waiting
        assert leadership.may_write()


async def test_a_candidate_that_is_told_to_stop_leaves_the_lease_alone(api: LeaseApi, kubeconfig: str) -> None:
    async with candidate(kubeconfig, "one") as first, candidate(kubeconfig, "two") as second:
        await first.acquire()
        waiting = asyncio.create_task(second.acquire())
        await asyncio.wait([waiting], timeout=0.2)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await second.release()
        assert first.may_write()
    assert api.holders == ["one", ""]


async def test_access_that_does_not_work_is_said_at_once(tmp_path: Path) -> None:
    async with candidate(str(tmp_path / "nothing"), "one") as leadership:
        with pytest.raises(AccessError, match="cannot be read"):
            await leadership.acquire()


# -- real processes


@contextlib.asynccontextmanager
async def operator(kubeconfig: str, identity: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, lease_holder.__file__, kubeconfig, identity, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_killed_stopped_and_terminated_processes(api: LeaseApi, kubeconfig: str) -> None:
    """kill -9; SIGSTOP past expiry, then SIGCONT; SIGTERM: among processes that write all the time, never two do."""
    async with asyncio.timeout(60), operator(kubeconfig, "a") as a:
        await eventually(lambda: "a" in api.other_writes)
        async with operator(kubeconfig, "b") as b:
            a.kill()
            await eventually(lambda: api.holder == "b" and api.other_writes[-1] == "b")

            async with operator(kubeconfig, "c") as c:
                b.send_signal(signal.SIGSTOP)
                await eventually(lambda: api.holder == "c" and api.other_writes[-1] == "c")
                by_b = api.other_writes.count("b")
                b.send_signal(signal.SIGCONT)
                assert await b.wait() == lease_holder.LOST
                assert api.other_writes.count("b") == by_b, "nothing was written after it went on"

                c.send_signal(signal.SIGTERM)
                assert await c.wait() == 0
    assert api.holders == ["a", "b", "c", ""]
    in_turn = [
        writer for number, writer in enumerate(api.other_writes) if api.other_writes[number - 1 : number] != [writer]
    ]
    assert in_turn == ["a", "b", "c"]


# -- the pure part


def lease(holder: str, renewed_at: str, duration_s: int = 8, **metadata: str) -> dict[str, object]:
    spec = {"holderIdentity": holder, "renewTime": renewed_at, "leaseDurationSeconds": duration_s}
    return {"metadata": metadata, "spec": spec}


def test_a_lease_runs_out_by_standing_still_on_our_own_clock() -> None:
    watch = LeaseWatch()
    # Its holder's clock is years behind: that does not matter.
    assert not watch.free(lease("x", "1999"), 100.0, 8.0)
    assert not watch.free(lease("x", "1999"), 107.9, 8.0)
    assert not watch.free(lease("x", "1998"), 108.5, 8.0), "it changed, so somebody lives"
    assert not watch.free(lease("x", "1998", resourceVersion="7"), 116.0, 8.0)
    assert watch.free(lease("x", "1998", resourceVersion="8"), 116.5, 8.0), "annotating it is not renewing it"


def test_a_holder_is_given_the_time_that_it_promised_and_not_ours() -> None:
    watch = LeaseWatch()
    assert not watch.free(lease("x", "t", duration_s=30), 0.0, 8.0)
    assert not watch.free(lease("x", "t", duration_s=30), 29.0, 8.0)
    assert watch.free(lease("x", "t", duration_s=30), 30.0, 8.0)


def test_two_processes_that_were_given_one_name_are_told_apart() -> None:
    first = new_lease("n", "l", "same", LeaseTiming(), datetime(2026, 1, 1, tzinfo=UTC))
    second = new_lease("n", "l", "same", LeaseTiming(), datetime(2026, 1, 2, tzinfo=UTC))
    assert not same_holding(first, second)
    assert same_holding(first, renewed(first, "same", LeaseTiming(), datetime(2026, 1, 3, tzinfo=UTC)))
    assert not LeaseWatch().free(first, 0.0, 8.0)


def test_durations_under_which_a_lease_could_not_be_kept_are_refused() -> None:
    with pytest.raises(ValueError, match="renew_deadline_s"):
        LeaseTiming(lease_s=8, renew_deadline_s=9)
