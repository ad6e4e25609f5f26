"""The gateway process: sockets, HTTP server (and gRPC's, where it is asked for), signals, and how it ends.

    listening -> (SIGTERM, SIGINT) -> draining -> closed

While draining, `/ready` says 503 and new requests are answered 503 with Retry-After (the socket stays open, as load
balancers take a while to notice); running ones go on for up to `drain_timeout_s`, then they end with an error event.
A second signal ends them at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import resource
import signal
import socket
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import uvloop
from antiphon_kvtransfer import RedisUrlError
from antiphon_telemetry import tracing
from antiphon_telemetry.exit import ExitCode

from antiphon_gateway.app import Gateway
from antiphon_gateway.auth import ApiKeys, ApiKeysError
from antiphon_gateway.cors import CorsOriginInvalid
from antiphon_gateway.http_server import BACKLOG, HttpServer
from antiphon_gateway.options import GatewayOptions

if TYPE_CHECKING:
    from antiphon_gateway.grpc_front.server import GrpcFront

log = logging.getLogger("antiphon.gateway")

_GC_ALLOCATIONS = 20_000
"""Objects made, less those freed, before the youngest are looked at for cycles."""

_WANTED_FILES = 1_048_576
_FEW_FILES = 8192

_LAST_WORDS_S = 2.0
"""How long the error events of ended streams may take to leave."""


class ReadyRecord(msgspec.Struct):
    """What `--ready-file` holds."""

    address: str
    pid: int


def run_gateway(options: GatewayOptions) -> int:
    """Serve until a signal; the exit code. Logs are the caller's to configure, and so is leaving the process."""
    try:
        keys = ApiKeys.load(options.api_keys_file)
    except ApiKeysError as error:
        log.error("%s", error)
        return ExitCode.BAD_INPUT
    tracing.configure("antiphon-gateway")
    _collect_rarely()
    allow_many_connections()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(serve(options, keys))
    except CorsOriginInvalid as error:
        log.error("%s", error)
        return ExitCode.BAD_INPUT
    except RedisUrlError as error:
        log.error("--redis-url: %s", error)
        return ExitCode.BAD_INPUT
    finally:
        tracing.shutdown()


def allow_many_connections() -> int:
    """Raise this process's limit of open files as far as it may; how many there may be now. Each client needs one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _WANTED_FILES if hard == resource.RLIM_INFINITY else min(_WANTED_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    if soft != resource.RLIM_INFINITY and soft < _FEW_FILES:
        log.warning(
            "this process may open only %d files, and each client takes one: raise the hard limit (ulimit -Hn, or "
            "LimitNOFILE of the service) above %d for many streams at once",
            soft,
            _FEW_FILES,
        )
    return soft


def _collect_rarely() -> None:
    """What a request makes goes when it ends; the cyclic collector would look at it some twenty times before.

    What is loaded now stays for as long as the process: it is not looked at again.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GC_ALLOCATIONS, 10, 10)


async def serve(options: GatewayOptions, keys: ApiKeys) -> int:
    """`run_gateway` inside a loop. Raises CorsOriginInvalid and RedisUrlError."""
    gateway = Gateway(options, keys, gateway_id=f"gateway-{uuid.uuid4().hex[:12]}")
    try:
        listener = listen(options.host, options.port, reuse_port=options.reuse_port)
    except OSError as error:
        log.error("cannot listen on %s port %d: %s", options.host, options.port, error)
        return ExitCode.UNAVAILABLE
    server = create_server(gateway)
    stop = _Signals()
    gateway.start()
    serving = asyncio.create_task(server.serve(sockets=[listener]), name="http")
    host, port = listener.getsockname()[:2]
    address = f"{host}:{port}"
    front: GrpcFront | None = None
    try:
        if options.grpc_port:
            front = create_grpc_front(gateway)
            try:
                grpc_address = await front.start(host, options.grpc_port)
            except OSError as error:
                log.error("cannot listen for gRPC on %s port %d: %s", host, options.grpc_port, error)
                return ExitCode.UNAVAILABLE
            log.info("gateway listens for gRPC on %s", grpc_address)
        with stop.handled():
            log.info("gateway listens on http://%s", address)
            if options.ready_file:
                write_ready_file(Path(options.ready_file), address)
            first = asyncio.create_task(stop.first.wait(), name="signal")
            await asyncio.wait({first, serving}, return_when=asyncio.FIRST_COMPLETED)
            first.cancel()
            if not serving.done():
                await _drain(gateway, options.drain_timeout_s, stop)
            server.stop()
            await asyncio.gather(serving, *(() if front is None else (front.stop(),)))
    finally:
        serving.cancel()
        if front is not None:
            await front.stop()
        await gateway.close()
        listener.close()
    return ExitCode.OK


async def _drain(gateway: Gateway, timeout_s: float, stop: _Signals) -> None:
    gateway.drain()
    log.info("draining: %d requests run, for up to %g s", gateway.in_flight, timeout_s)
    drained = asyncio.create_task(gateway.drained(), name="drained")
    second = asyncio.create_task(stop.second.wait(), name="second signal")
    await asyncio.wait({drained, second}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    if not drained.done():
        log.warning("ending %d requests", gateway.in_flight)
        gateway.end_all()
        await asyncio.wait({drained}, timeout=_LAST_WORDS_S)
    drained.cancel()
    second.cancel()


class _Signals:
    """The first and the second SIGTERM or SIGINT."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        signals = (signal.SIGTERM, signal.SIGINT)
        for number in signals:
            loop.add_signal_handler(number, self._received)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)

    def _received(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


def create_server(gateway: Gateway) -> HttpServer:
    """The HTTP server of a gateway. It ends when `stop` is called."""
    return HttpServer(gateway.handle, last_words_s=_LAST_WORDS_S)


def create_grpc_front(gateway: Gateway) -> GrpcFront:
    """The gRPC server of a gateway; imported here, as most gateways have none."""
    from antiphon_gateway.grpc_front.server import GrpcFront

    return GrpcFront(gateway, last_words_s=_LAST_WORDS_S)


def listen(host: str, port: int, *, reuse_port: bool = False) -> socket.socket:
    """A listening socket. `reuse_port`: others may listen there as well; each gets a share. Raises OSError."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def write_ready_file(path: Path, address: str) -> None:
    """Appear whole or not at all."""
    record = ReadyRecord(address, os.getpid())
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.write_bytes(msgspec.json.encode(record))
    draft.replace(path)
