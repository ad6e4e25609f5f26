"""Which operator acts: the holder of one Lease, renewed from a thread of its own.

The thread has its own event loop and its own connection, so a busy main loop never costs the Lease. It knows one
number, `held_until`: the start of the last renewal that succeeded, plus the renew deadline. Before it, this process may
write; after it, never again, on a clock that also counts the time that a machine was suspended. Others may take the
Lease only `lease_s` after they saw that renewal, which is later. So at no time do two processes write, and a process
that was stopped for long finds out at its first step.

`on_lost` is called on this thread, once, when the Lease is lost: the process has to end at once, and not in good order.
Nothing is compared between the clocks of two machines (see `election`).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import random
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime

from antiphon_operator.kube import election
from antiphon_operator.kube.client import KubeClient
from antiphon_operator.kube.election import LeaseTiming, LeaseWatch
from antiphon_operator.kube.errors import AlreadyExists, Conflict, KubeError, NotFound, NotLeader
from antiphon_operator.kube.kubeconfig import find_access
from antiphon_operator.kube.resources import LEASES, Object
from antiphon_operator.kube.transport import RetryPolicy

_log = logging.getLogger("antiphon.operator.lease")

RELEASE_DEADLINE_S = 3.0


def boot_clock_s() -> float:
    """Seconds that never go back and, where the system has such a clock, go on while the machine is suspended."""
    if hasattr(time, "CLOCK_BOOTTIME"):
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic()


class LeaseLost(KubeError):
    """The Lease is another's now, or could not be renewed in time."""


class Leadership:
    """One try at holding the Lease: `acquire`, work, `release`. For another try make another one."""

    def __init__(
        self,
        kubeconfig: str,
        namespace: str,
        name: str,
        identity: str,
        *,
        on_lost: Callable[[], None],
        timing: LeaseTiming | None = None,
        clock: Callable[[], float] = boot_clock_s,
    ) -> None:
        self._kubeconfig = kubeconfig
        self._namespace = namespace
        self._name = name
        self._identity = identity
        self._on_lost = on_lost
        self._timing = timing or LeaseTiming()
        self._clock = clock
        self._held_until = 0.0
        self._holding = False
        self._given_up = False
        self._client: KubeClient | None = None
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self._acquired: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._trouble = ""

    async def acquire(self) -> None:
        """Return once the Lease is ours. Waits as long as another holds it. Raises AccessError.

        When cancelled, `release` is still to be called.
        """
        assert self._thread is None, "a Leadership is used once"
        # One try a request: the loop here is what tries again, and by a clock of its own.
        self._client = KubeClient(
            find_access(self._kubeconfig),
            may_write=lambda: not self._holding or self.may_write(),
            retries=RetryPolicy(tries=1),
            deadline_s=self._timing.renew_deadline_s / 2,
        )
        self._thread = threading.Thread(target=self._main, name="lease", daemon=True)
        self._thread.start()
        await asyncio.wrap_future(self._acquired)

    def may_write(self) -> bool:
        """The guard of every request that changes something. From any thread."""
        return not self._given_up and self._clock() < self._held_until

    @property
    def held_until(self) -> float:
        """On `clock` (by default `boot_clock_s`); 0: not held."""
        return self._held_until

    async def release(self) -> None:
        """Nothing may be written from now on; give the Lease up if it is held. Takes a few seconds at most."""
        self._given_up = True
        thread, loop = self._thread, self._loop
        if thread is None:
            return
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # The loop is closed: the thread has ended.
                loop.call_soon_threadsafe(self._stop.set)
        await asyncio.to_thread(thread.join, RELEASE_DEADLINE_S)

    # -- the thread

    def _main(self) -> None:
        lost = True
        try:
            asyncio.run(self._life())
            lost = False
        except (LeaseLost, NotLeader) as error:
            _log.error("%s: this operator ends, another acts", error)
        finally:
            # Also when this thread failed by a fault of its own, which Python then prints.
            self._held_until = 0.0
            if not self._acquired.done():
                self._acquired.set_exception(LeaseLost("the thread that holds the Lease ended: its log says why"))
            if lost and self._holding:
                self._on_lost()

    async def _life(self) -> None:
        self._loop = asyncio.get_running_loop()
        assert self._client is not None
        try:
            lease = await self._campaign(self._client)
            if lease is not None:
                await self._hold(self._client, lease)
        finally:
            await self._client.close()

    async def _campaign(self, client: KubeClient) -> Object | None:
        """The Lease once it is ours; None: told to stop before that."""
        watch = LeaseWatch()
        while not self._stop.is_set():
            began = self._clock()
            try:
                lease = await self._try_to_take(client, watch)
                self._in_order()
                if lease is not None:
                    self._held_until = began + self._timing.renew_deadline_s
                    self._holding = True
                    _log.info("this operator acts: it holds the Lease %s/%s", self._namespace, self._name)
                    # Cancelled: whoever waited is gone; what follows is `release`.
                    with contextlib.suppress(concurrent.futures.InvalidStateError):
                        self._acquired.set_result(None)
                    return lease
            except (Conflict, AlreadyExists):
                pass  # Another was faster: look again.
            except KubeError as error:
                self._in_trouble(str(error))
            await self._told_to_stop(within_s=self._retry_s())
        return None

    async def _try_to_take(self, client: KubeClient, watch: LeaseWatch) -> Object | None:
        """One look; the Lease as it is if it is ours now."""
        now = datetime.now(UTC)
        try:
            lease = await client.get(LEASES, self._namespace, self._name)
        except NotFound:
            fresh = election.new_lease(self._namespace, self._name, self._identity, self._timing, now)
            return await client.create(LEASES, self._namespace, fresh)
        if not watch.free(lease, self._clock(), self._timing.lease_s):
            return None
        mine = election.taken(lease, self._identity, self._timing, now)
        return await client.replace(LEASES, self._namespace, self._name, mine)

    async def _hold(self, client: KubeClient, lease: Object) -> None:
        """Renew until told to stop, then release. Raises LeaseLost."""
        while not await self._told_to_stop(within_s=min(self._retry_s(), self._held_until - self._clock())):
            began = self._clock()
            left_s = self._held_until - began
            if left_s <= 0:
                raise LeaseLost(f"the Lease was not renewed for {self._timing.renew_deadline_s:g} s")
            try:
                async with asyncio.timeout(left_s):
                    lease = await self._renew(client, lease)
                self._held_until = began + self._timing.renew_deadline_s
                self._in_order()
            except NotFound as error:
                raise LeaseLost("the Lease was deleted") from error
            except (LeaseLost, NotLeader):
                raise
            except (KubeError, TimeoutError) as error:
                self._in_trouble(str(error) or "no answer in time")
        self._held_until, self._holding = 0.0, False
        with contextlib.suppress(KubeError, TimeoutError):  # It runs out by itself.
            async with asyncio.timeout(RELEASE_DEADLINE_S / 2):
                free = election.released(lease, datetime.now(UTC))
                await client.replace(LEASES, self._namespace, self._name, free)
                _log.info("the Lease %s/%s is released", self._namespace, self._name)

    async def _renew(self, client: KubeClient, held: Object) -> Object:
        try:
            mine = election.renewed(held, self._identity, self._timing, datetime.now(UTC))
            return await client.replace(LEASES, self._namespace, self._name, mine)
        except Conflict:
            # Somebody annotated it, or an answer to us was lost; or it is another's.
            lease = await client.get(LEASES, self._namespace, self._name)
            if not election.same_holding(held, lease):
                raise LeaseLost("another operator took the Lease") from None
            mine = election.renewed(lease, self._identity, self._timing, datetime.now(UTC))
            return await client.replace(LEASES, self._namespace, self._name, mine)

    async def _told_to_stop(self, *, within_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                return await self._stop.wait()
        return self._stop.is_set()

    def _retry_s(self) -> float:
        return self._timing.retry_s * random.uniform(1.0, 2.0)

    # -- said once per outage

    def _in_trouble(self, what: str) -> None:
        if not self._trouble:
            _log.warning("the Lease cannot be read or written, tried again: %s", what)
        self._trouble = what

    def _in_order(self) -> None:
        if self._trouble:
            _log.info("the Lease can be read and written again")
        self._trouble = ""
