"""One rank: a process that Ray starts on a device, and that lives as long as the driver's connection to it.

It connects to the driver twice and says who it is, meets the other ranks, loads its part of the model, and computes
what it is told. Three threads: this one computes, in the order in which steps came; one reads, so that the end of the
connection is noticed in the middle of a step; one serves the data plane (`serve_plane`) on an event loop of its own.

What may fail: the driver. A rank whose connection closes has nobody to compute for and ends at once. It ends by
`os._exit`, as every process of ours that may have loaded UCX has to, and as no collective can be interrupted otherwise.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import queue
import socket
import sys
import threading
import time
from typing import NoReturn

import msgspec
from antiphon_kvtransfer.local_plane import LocalRankPlane
from antiphon_kvtransfer.offer import TransportOffer
from antiphon_kvtransfer.serve_plane import serve_rank_plane
from antiphon_kvtransfer.transport import Region

from antiphon_engine.gang import messages
from antiphon_engine.gang.channel import connect, framed, greet, read_frame
from antiphon_engine.gang.histories import KeptHistories
from antiphon_engine.gang.runner import Meeting, RankMaker, Runner, maker_factory
from antiphon_engine.gang.start import RankStart

CONNECT_S = 20.0
MEET_S = 120.0
"""For the ranks to find each other, all of them being connected to the driver already."""
ALIVE_S = 1.0
FAILURE = 1

logger = logging.getLogger("antiphon.engine.gang")


class RankProcess:
    """Made by Ray in a process of its own; `run` is its life."""

    def __init__(self, start: RankStart) -> None:
        self._start = start

    def run(self) -> None:
        start = self._start
        steps = connect(start.driver_host, start.driver_port, CONNECT_S)
        own_address = str(steps.getsockname()[0])
        meeting: socket.socket | None = None
        if start.rank == 0:
            meeting = socket.socket(steps.family, socket.SOCK_STREAM)
            meeting.bind((own_address, 0))
        port = 0 if meeting is None else int(meeting.getsockname()[1])
        greet(steps, _hello(start, "steps", port))
        transfers = connect(start.driver_host, start.driver_port, CONNECT_S)
        greet(transfers, _hello(start, "transfers", 0))
        _Rank(start, _Driver(steps), transfers, own_address, meeting).live()


def _hello(start: RankStart, channel: str, meeting_port: int) -> messages.Hello:
    return messages.Hello(start.secret, start.rank, channel, os.getpid(), _node_id(), meeting_port)


def _node_id() -> str:
    import ray

    return str(ray.get_runtime_context().get_node_id())


class _Driver:
    """The driver, seen from here. Sends from any thread."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self.said: queue.SimpleQueue[messages.ToRank] = queue.SimpleQueue()

    def listen(self) -> None:
        """Until it is gone, in a thread of its own."""
        try:
            while (frame := read_frame(self._connection)) is not None:
                message = messages.TO_RANK.decode(frame)
                if isinstance(message, messages.End):
                    _leave(0)
                self.said.put(message)
        except (OSError, msgspec.DecodeError):
            pass
        # No step can be interrupted, and nobody wants its result.
        _leave(0)

    def tell(self, message: messages.FromRank) -> None:
        data = framed(messages.ENCODER.encode(message))
        try:
            with self._lock:
                self._connection.sendall(data)
        except OSError:
            _leave(0)

    def keep_telling(self) -> None:
        while True:
            time.sleep(ALIVE_S)
            self.tell(messages.Alive())


class _Rank:
    def __init__(
        self,
        start: RankStart,
        driver: _Driver,
        transfers: socket.socket,
        own_address: str,
        meeting: socket.socket | None,
    ) -> None:
        self._start = start
        self._driver = driver
        self._transfers = transfers
        self._own_address = own_address
        self._meeting = meeting
        self._histories = KeptHistories()
        self._maker: RankMaker | None = None
        self._runner: Runner | None = None
        self._samples = start.rank == start.shape.sampling_rank
        self._prepared = messages.Prepare("", 0, 1, logging.INFO)

    def live(self) -> NoReturn:
        for work in (self._driver.listen, self._driver.keep_telling):
            threading.Thread(target=work, name=work.__name__, daemon=True).start()
        while True:
            message = self._driver.said.get()
            match message:
                case messages.Step():
                    self._step(message)
                case messages.Prepare() | messages.Load():
                    self._starting(message)
                case messages.ServeTransfers(offer):
                    threading.Thread(target=self._serve, args=(offer,), name="transfers", daemon=True).start()
                case messages.End():
                    _leave(0)

    def _starting(self, message: messages.Prepare | messages.Load) -> None:
        try:
            if isinstance(message, messages.Prepare):
                self._prepare(message)
            else:
                self._load(message)
        except Exception as error:  # noqa: BLE001 - told to the driver, which ends the gang
            code = getattr(error, "exit_code", FAILURE)
            text = str(error) if code != FAILURE else f"{type(error).__name__}: {error}"
            self._driver.tell(messages.StartFailed(int(code), text))

    def _prepare(self, message: messages.Prepare) -> None:
        self._prepared = message
        house = logging.getLogger("antiphon")
        house.setLevel(message.log_level)
        house.addHandler(_ToDriver(self._driver))
        start = self._start
        self._maker = maker_factory(start.maker)(start.maker_settings, start.shape, start.rank)
        self._driver.tell(messages.Possible(self._maker.possible_blocks(message.ranks_here)))

    def _load(self, message: messages.Load) -> None:
        maker = self._maker
        if maker is None:
            raise RuntimeError("told to load before it was told what")
        meeting = Meeting(
            self._prepared.meeting_host, self._prepared.meeting_port, self._own_address, self._meeting, MEET_S
        )
        self._runner = runner = maker.make(message.num_blocks, meeting)
        info = runner.info
        ready = messages.Ready(
            runner.part, runner.kv.block_bytes, runner.kv.num_blocks, info if self._samples else None, info.revision
        )
        self._driver.tell(ready)

    def _step(self, step: messages.Step) -> None:
        runner = self._runner
        try:
            if runner is None:
                raise RuntimeError("told to compute before it was told to load")
            specs = self._histories.unpack(messages.HOW_TO_SAMPLE.decode(step.how)) if self._samples else ()
            batch = messages.unpack_batch(step)
            begun_s, exchanged_s = time.perf_counter(), runner.exchanged_s
            tokens = runner.step(batch, specs)
            busy_s, exchange_s = time.perf_counter() - begun_s, runner.exchanged_s - exchanged_s
        except Exception as error:
            logger.error("rank %d failed in step %d", self._start.rank, step.number, exc_info=error)
            self._driver.tell(messages.StepFailed(step.number, f"{type(error).__name__}: {error}"))
            return
        if self._samples:
            self._driver.tell(messages.Sampled(step.number, tokens or [], busy_s, exchange_s))

    def _serve(self, offer: TransportOffer) -> None:
        """The data plane, on a loop of its own, until the driver has done with it."""
        runner = self._runner
        assert runner is not None  # the driver asks for planes of a gang that has started

        async def serve() -> None:
            memory = runner.kv
            region = Region(memory.address, memory.length_bytes)
            here = dataclasses.replace(offer, host=self._own_address, advertise=())
            plane = LocalRankPlane(
                self._start.rank,
                runner.part,
                region,
                memory.block_bytes,
                memory.num_blocks,
                here.transports(region),
            )
            reader, writer = await asyncio.open_connection(sock=self._transfers)
            await serve_rank_plane(plane, reader, writer)

        try:
            asyncio.run(serve())
        except Exception as error:
            logger.critical("rank %d's data plane failed", self._start.rank, exc_info=error)
            _leave(FAILURE)


class _ToDriver(logging.Handler):
    """The rank's log lines, told in the worker's log."""

    def __init__(self, driver: _Driver) -> None:
        super().__init__()
        self._driver = driver

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)
        except Exception:  # noqa: BLE001 - logging's own way with a line that cannot be written
            self.handleError(record)
            return
        self._driver.tell(messages.Said(record.levelno, record.name, text))


def _leave(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            pass  # nobody reads it
    os._exit(code)
