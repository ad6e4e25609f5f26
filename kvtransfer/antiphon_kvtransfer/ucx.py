"""The `ucx` transport: one-sided reads by UCX through NIXL (RDMA where there is RDMA, shared memory elsewhere).

The reader's hardware or kernel fetches from the holder's memory; the holder's process does nothing for it. NIXL's
agent belongs to one thread, which runs all its calls: the event loop puts commands into a queue and gets futures back.
While transfers run the thread polls them, first without a pause, then less and less often.

How a read ends was found by trying, with NIXL 1.5 and UCX 1.23, and the rules below follow from it:

* Between processes of one host a read is a copy by the kernel (CMA). It runs inside the call that posts it, with the
  GIL released, and goes through even when the holder is stopped (SIGSTOP): a stopped peer is for heartbeats to notice.
* Over UCX's TCP the holder's progress thread sends the data. With the holder stopped the read stays unfinished, and
  it *still lands* when the holder runs on: after NIXL's "release" of the transfer said that it was cancelled, and also
  after the remote agent was removed. So a given-up read is neither released nor its remote agent removed; it is polled
  until NIXL says done or failed, and only then has it `ended`. `disconnect` waits (in the background) for the same.
* A killed holder makes reads fail with a disconnect within milliseconds, and NIXL marks the remote agent unusable:
  it must be removed and added again before the next connection.

A process that made a NIXL UCX backend crashes at interpreter exit, in a bundled library: leave it by `os._exit`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from antiphon_kvtransfer._memory import SCRATCH_BYTES, LocalMemory, check_ranges, total_bytes
from antiphon_kvtransfer.transport import (
    PeerKey,
    ReadHandle,
    ReadRange,
    Region,
    Transport,
    TransportError,
    TransportUnavailable,
)

_log = logging.getLogger("antiphon.kvtransfer.ucx")

_T = TypeVar("_T")
_Descriptor = tuple[int, int, int]
"""NIXL's: (address, length, device)."""

_SPIN_S = 50e-6
_FIRST_PAUSE_S = 20e-6
_LONGEST_PAUSE_S = 1e-3
_GIVEN_UP_PAUSE_S = 20e-3
_CLOSE_S = 2.0
_SETTLE_S = 2 * _CLOSE_S
"""For the agent's thread to take notice of a disconnect or a close."""
_START_S = 60.0
_WIRE_UP_BYTES = 64
_PROGRESS_PAUSE_US = 100
"""Between two looks of NIXL's own thread, which serves peers over TCP and wire-ups. With 0 it burns a whole core."""


class UcxMetadata(msgspec.Struct, frozen=True):
    """What a peer needs: NIXL's own metadata, and where the pool lies in the holder's address space."""

    agent: str
    nixl: bytes
    address: int
    region_bytes: int


class UcxTransport(Transport):
    """`owner` (worker and incarnation) with a random suffix is the agent's name, which must never come twice."""

    name = "ucx"

    def __init__(self, region: Region, *, owner: str) -> None:
        self._memory = LocalMemory(region, SCRATCH_BYTES)
        self._agent_name = f"{owner}/{secrets.token_hex(8)}"
        self._metadata: bytes | None = None
        self._thread: _AgentThread | None = None
        self._peers: dict[PeerKey, UcxMetadata] = {}

    @property
    def scratch_bytes(self) -> int:
        return self._memory.scratch_bytes

    async def start(self) -> None:
        thread = _AgentThread(self._agent_name, self._memory, asyncio.get_running_loop())
        try:
            async with asyncio.timeout(_START_S):
                nixl_metadata = await thread.call(thread.open)
        except TimeoutError as error:
            raise TransportUnavailable(f"NIXL did not start within {_START_S:g} s") from error
        region = self._memory.region
        self._thread = thread
        self._metadata = msgspec.msgpack.encode(
            UcxMetadata(self._agent_name, nixl_metadata, region.address, region.length_bytes)
        )

    def metadata(self) -> bytes:
        if self._metadata is None:
            raise TransportError("the ucx transport is not started")
        return self._metadata

    async def connect(self, peer: PeerKey, metadata: bytes, deadline_s: float) -> None:
        thread = self._running()
        try:
            decoded = msgspec.msgpack.decode(metadata, type=UcxMetadata)
        except msgspec.DecodeError as error:
            raise TransportError(f"{peer} sent ucx metadata that cannot be read: {error}") from error
        await self.disconnect(peer)
        loop = asyncio.get_running_loop()
        end = loop.time() + deadline_s
        try:
            async with asyncio.timeout_at(end):
                await thread.call(lambda: thread.add_remote(decoded))
        except TimeoutError as error:
            raise TransportError(f"NIXL did not load the metadata of {peer} within {deadline_s:g} s") from error
        # UCX wires up with the first transfer, which may take a tenth of a second: do it now, into scratch memory.
        length = min(_WIRE_UP_BYTES, decoded.region_bytes)
        wire_up = _UcxRead(f"wiring up to {peer} over ucx", thread)
        thread.post(decoded, wire_up, [ReadRange(0, self._memory.region.length_bytes, length)])
        try:
            await wire_up.wait(max(0.0, end - loop.time()))
        except BaseException:
            thread.drop(decoded.agent)
            raise
        self._peers[peer] = decoded

    def read(self, peer: PeerKey, ranges: Sequence[ReadRange]) -> ReadHandle:
        thread = self._running()
        known = self._peers.get(peer)
        if known is None:
            raise TransportError(f"not connected to {peer} over ucx: connect first")
        check_ranges(self._memory, ranges, known.region_bytes)
        handle = _UcxRead(f"a ucx read of {total_bytes(ranges)} bytes from {peer}", thread)
        thread.post(known, handle, ranges)
        return handle

    async def disconnect(self, peer: PeerKey) -> None:
        known = self._peers.pop(peer, None)
        if known is not None and self._thread is not None:
            await self._thread.forget(known.agent)

    async def close(self) -> None:
        thread, self._thread = self._thread, None
        self._peers.clear()
        if thread is not None:
            await thread.close()

    def _running(self) -> _AgentThread:
        if self._thread is None:
            raise TransportError("the ucx transport is not running")
        return self._thread


class _UcxRead(ReadHandle):
    """Its futures belong to the loop; the rest to the agent's thread."""

    def __init__(self, what: str, thread: _AgentThread) -> None:
        loop = asyncio.get_running_loop()
        self.what = what
        self._thread = thread
        self._result: asyncio.Future[None] = loop.create_future()
        self._result.add_done_callback(lambda done: done.exception())
        self._ended: asyncio.Future[None] = loop.create_future()

    async def wait(self, deadline_s: float) -> None:
        try:
            async with asyncio.timeout(deadline_s):
                await asyncio.shield(self._result)
        except TimeoutError as error:
            self.fail(TransportError(f"{self.what} was given up"))
            raise TransportError(f"{self.what} did not end within {deadline_s:g} s") from error
        except asyncio.CancelledError:
            self.fail(TransportError(f"{self.what} was given up"))
            raise

    @property
    def ended(self) -> asyncio.Future[None]:
        return self._ended

    @property
    def given_up(self) -> bool:
        return self._result.done()

    # On the loop's thread:

    def succeed(self) -> None:
        if not self._result.done():
            self._result.set_result(None)
        self._end()

    def fail(self, error: TransportError) -> None:
        """The waiter gets the error. The read may go on."""
        if not self._result.done():
            self._result.set_exception(error)

    def fail_and_end(self, error: TransportError) -> None:
        self.fail(error)
        self._end()

    def _end(self) -> None:
        if not self._ended.done():
            self._ended.set_result(None)


@dataclass(eq=False)
class _Transfer:
    handle: _UcxRead
    nixl: int
    """NIXL's handle."""


@dataclass(eq=False)
class _Remote:
    """A remote agent that NIXL knows."""

    agent: str
    metadata: bytes
    transfers: list[_Transfer] = field(default_factory=list)
    broken: bool = False
    """NIXL reported an error: no new transfer until it was removed and added again."""
    forgotten: bool = False
    """To be removed when its last transfer has ended."""


class _AgentThread:
    """Owns the NIXL agent. Methods marked so run on the thread, the others on the loop."""

    def __init__(self, agent_name: str, memory: LocalMemory, loop: asyncio.AbstractEventLoop) -> None:
        self._agent_name = agent_name
        self._memory = memory
        self._loop = loop
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="antiphon-ucx", daemon=True)
        # The thread's own:
        self._nixl: Any = None
        self._agent: Any = None
        self._backend: Any = None
        self._registered: Any = None
        self._remotes: dict[str, _Remote] = {}
        self._thread.start()

    # ---------------------------------------------------------------- called on the loop

    def call(self, function: Callable[[], _T]) -> asyncio.Future[_T]:
        """Run `function` on the thread. Raises what it raises."""
        future: asyncio.Future[_T] = self._loop.create_future()

        def command() -> None:
            try:
                result = function()
            except Exception as error:  # noqa: BLE001 - told to who asked; the thread goes on for the others
                self._tell(_set_exception, future, error)
            else:
                self._tell(_set_result, future, result)

        self._commands.put(command)
        return future

    def post(self, peer: UcxMetadata, handle: _UcxRead, ranges: Sequence[ReadRange]) -> None:
        local = [(self._memory.address(r.local_offset_bytes, r.length_bytes), r.length_bytes, 0) for r in ranges]
        remote = [(peer.address + r.remote_offset_bytes, r.length_bytes, 0) for r in ranges]
        self._commands.put(lambda: self._post(peer.agent, handle, local, remote))

    def drop(self, agent: str) -> None:
        """Forget the remote agent, before anything that is asked of the thread later."""
        self._commands.put(lambda: self._forget(agent))

    async def forget(self, agent: str) -> None:
        """As `drop`, and wait for it, though not for ever."""
        await self._settle(self.call(lambda: self._forget(agent)), f"to forget {agent}")

    async def close(self) -> None:
        await self._settle(self.call(self._close), "to close")

    async def _settle(self, done: asyncio.Future[None], what: str) -> None:
        """Wait for the thread, which may be inside NIXL for longer than anybody should wait."""
        try:
            async with asyncio.timeout(_SETTLE_S):
                await asyncio.shield(done)
        except TimeoutError:
            _log.warning("NIXL is busy for more than %g s; not waiting for it %s", _SETTLE_S, what)

    # ---------------------------------------------------------------- called on the thread

    def open(self) -> bytes:
        """Make the agent and register the memory. Returns NIXL's metadata. Raises TransportUnavailable."""
        nixl = _import_nixl()
        region = self._memory.region
        memory = [
            (region.address, region.length_bytes, 0, b""),
            (self._memory.scratch_address, self._memory.scratch_bytes, 0, b""),
        ]
        try:
            config = nixl.nixlAgentConfig()
            config.useProgThread = True
            config.pthrDelay = _PROGRESS_PAUSE_US
            config.useListenThread = False
            config.syncMode = nixl.NIXL_THREAD_SYNC_NONE
            self._agent = nixl.nixlAgent(self._agent_name, config)
            self._backend = self._agent.createBackend("UCX", {})
            self._registered = nixl.nixlRegDList(nixl.DRAM_SEG, memory)
            self._agent.registerMem(self._registered, [self._backend])
            # Peers get the metadata of the pool alone: what they do not know of, they cannot read.
            pool = nixl.nixlRegDList(nixl.DRAM_SEG, memory[:1])
            metadata = self._agent.getLocalPartialMD(pool, True, [self._backend])
        except Exception as error:
            self._stopping = True
            raise TransportUnavailable(f"NIXL's UCX backend does not start here: {error!r}") from error
        self._nixl = nixl
        return bytes(metadata)

    def add_remote(self, peer: UcxMetadata) -> None:
        known = self._remotes.get(peer.agent)
        if known is not None:
            if not known.transfers:
                self._remove(known)
            elif known.broken or known.metadata != peer.nixl:
                raise TransportError(f"earlier reads from {peer.agent} over ucx have not ended yet: connect later")
            else:
                known.forgotten = False
                return
        try:
            name = self._agent.loadRemoteMD(peer.nixl)
        except Exception as error:
            raise TransportError(f"NIXL does not take the metadata of {peer.agent}: {error!r}") from error
        name = name.decode() if isinstance(name, bytes) else str(name)
        if name != peer.agent:
            self._agent.invalidateRemoteMD(name)
            raise TransportError(f"NIXL's metadata is of agent {name}, not of {peer.agent} as was said")
        self._remotes[name] = _Remote(name, peer.nixl)

    def _post(self, agent: str, handle: _UcxRead, local: list[_Descriptor], remote: list[_Descriptor]) -> None:
        known = self._remotes.get(agent)
        if known is None or known.broken or known.forgotten:
            self._tell(handle.fail_and_end, TransportError(f"{handle.what} failed: not connected any more"))
            return
        try:
            transfer = self._agent.createXferReq(
                self._nixl.NIXL_READ,
                self._nixl.nixlXferDList(self._nixl.DRAM_SEG, local),
                self._nixl.nixlXferDList(self._nixl.DRAM_SEG, remote),
                agent,
                b"",
                [self._backend],
            )
        except Exception as error:  # noqa: BLE001 - reported through the handle
            self._tell(handle.fail_and_end, TransportError(f"{handle.what} could not be prepared: {error!r}"))
            return
        running = _Transfer(handle, transfer)
        known.transfers.append(running)
        try:
            state = self._agent.postXferReq(transfer, b"")
        except Exception as error:  # noqa: BLE001 - reported through the handle
            self._failed(known, running, repr(error))
        else:
            self._advance(known, running, state)

    def _forget(self, agent: str) -> None:
        known = self._remotes.get(agent)
        if known is None:
            return
        known.forgotten = True
        for running in known.transfers:
            self._tell(running.handle.fail, TransportError(f"{running.handle.what} failed: disconnected"))
        if not known.transfers:
            self._remove(known)

    def _close(self) -> None:
        for agent in list(self._remotes):
            self._forget(agent)
        end = time.monotonic() + _CLOSE_S
        while self._remotes and time.monotonic() < end:
            self._poll()
            time.sleep(_LONGEST_PAUSE_S)
        self._stopping = True
        if self._remotes:
            # Deregistering memory under a running transfer would be worse than to keep it registered.
            _log.warning("closed with unfinished reads from %s; the memory stays registered", list(self._remotes))
            return
        try:
            self._agent.deregisterMem(self._registered, [self._backend])
        except Exception as error:  # noqa: BLE001 - the process is about to end; what stays registered ends with it
            _log.warning("NIXL does not deregister the pool: %r", error)

    def _run(self) -> None:
        pause_s = 0.0
        spinning_until = 0.0
        while not self._stopping:
            try:
                if not any(known.transfers for known in self._remotes.values()):
                    command = self._commands.get()
                elif pause_s > 0.0:
                    command = self._commands.get(timeout=pause_s)
                else:
                    command = self._commands.get_nowait()
            except queue.Empty:
                if self._poll():
                    spinning_until, pause_s = time.monotonic() + _SPIN_S, 0.0
                elif time.monotonic() >= spinning_until:
                    longest_s = _LONGEST_PAUSE_S if self._somebody_waits() else _GIVEN_UP_PAUSE_S
                    pause_s = min(max(2 * pause_s, _FIRST_PAUSE_S), longest_s)
            else:
                command()
                spinning_until, pause_s = time.monotonic() + _SPIN_S, 0.0

    def _somebody_waits(self) -> bool:
        return any(not running.handle.given_up for known in self._remotes.values() for running in known.transfers)

    def _poll(self) -> bool:
        """Ask NIXL for the state of all transfers. True if one has ended."""
        ended = False
        for known in list(self._remotes.values()):
            for running in list(known.transfers):
                try:
                    state = self._agent.getXferStatus(running.nixl)
                except Exception as error:  # noqa: BLE001 - reported through the handle
                    self._failed(known, running, repr(error))
                    ended = True
                else:
                    ended = self._advance(known, running, state) or ended
        return ended

    def _advance(self, known: _Remote, running: _Transfer, state: Any) -> bool:
        if state == self._nixl.NIXL_IN_PROG:
            return False
        if state != self._nixl.NIXL_SUCCESS:
            self._failed(known, running, f"NIXL says {state}")
            return True
        self._release(known, running)
        self._tell(running.handle.succeed)
        return True

    def _failed(self, known: _Remote, running: _Transfer, reason: str) -> None:
        known.broken = True
        self._release(known, running)
        self._tell(running.handle.fail_and_end, TransportError(f"{running.handle.what} failed: {reason}"))

    def _release(self, known: _Remote, running: _Transfer) -> None:
        known.transfers.remove(running)
        try:
            self._agent.releaseXferReq(running.nixl)
        except Exception as error:  # noqa: BLE001 - the transfer is over; NIXL frees the rest with the agent
            _log.warning("NIXL does not release a transfer of %s: %r", known.agent, error)
        if known.forgotten and not known.transfers:
            self._remove(known)

    def _remove(self, known: _Remote) -> None:
        del self._remotes[known.agent]
        try:
            self._agent.invalidateRemoteMD(known.agent)
        except Exception as error:  # noqa: BLE001 - nothing of it is used any more
            _log.warning("NIXL does not remove the remote agent %s: %r", known.agent, error)

    def _tell(self, callback: Callable[..., None], *args: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            # The loop was closed before the transport: nobody is left who could wait.
            _log.debug("the event loop is closed; %r is told to nobody", callback)


def _set_result(future: asyncio.Future[_T], result: _T) -> None:
    if not future.done():
        future.set_result(result)


def _set_exception(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)


def _import_nixl() -> Any:
    """NIXL's bindings. Not its Python agent, which lets the progress thread spin without a pause."""
    # Both write to the console on their own, NIXL an error for every poll of a lost peer. What matters of it comes as
    # an exception and is logged by who gets it. Whoever sets these variables sees the rest.
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
    os.environ.setdefault("UCX_LOG_LEVEL", "fatal")
    raise_exceptions = logging.raiseExceptions
    try:
        from nixl_cu12 import _bindings
    except (ImportError, OSError) as error:
        raise TransportUnavailable(
            f"NIXL is not installed ({error}); install it with `pip install --no-deps nixl-cu12`, or use tcp"
        ) from error
    finally:
        logging.raiseExceptions = raise_exceptions  # Its import turns this off for the whole process.
    return _bindings
