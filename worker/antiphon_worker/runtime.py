"""One worker process, from its options to its exit code.

The order of starting is the order of what may be promised: the engine is loaded, then transports can be read from,
then the engine runs and knows its own speed, then the gRPC server answers, then the cluster hears of it, and only then
it is ready. Ending runs the other way: nothing new is taken, what runs may end or goes on elsewhere (`leave`), the
record is withdrawn, and everything is closed. Everything but the engine's thread lives on one event loop, which this
module owns.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import msgspec
import uvloop
from antiphon_engine import BlockEngine, ExecutorLost
from antiphon_engine.interface import BlocksChanged, IntegrityError
from antiphon_kvtransfer import RedisAccess, RedisUrlError
from antiphon_kvtransfer.announcer import WorkerAnnouncer
from antiphon_kvtransfer.cards import LocalWorker
from antiphon_kvtransfer.data_plane import DataPlane
from antiphon_kvtransfer.identity import contents_digest
from antiphon_kvtransfer.links import PeerLinks
from antiphon_kvtransfer.records import WorkerRecord
from antiphon_kvtransfer.transport import TransportError
from antiphon_proto.worker_pb2_grpc import add_KvBlocksServicer_to_server
from antiphon_telemetry.exit import ExitCode
from antiphon_telemetry.status import StatusServer
from prometheus_client import REGISTRY, CollectorRegistry
from tokenizers import Tokenizer

from antiphon_worker.bridge import EngineBridge
from antiphon_worker.card import model_card
from antiphon_worker.channels import ChannelPool, server_options
from antiphon_worker.end_requests import EndRequests
from antiphon_worker.engines import create_engine, step_model_prior
from antiphon_worker.errors import EngineLost, WorkerStartError
from antiphon_worker.hardware import hardware_name
from antiphon_worker.identity import WorkerIdentity, new_identity
from antiphon_worker.join import run_join
from antiphon_worker.leave import leave
from antiphon_worker.load import LoadReport
from antiphon_worker.metrics import WorkerMetrics
from antiphon_worker.options import WorkerOptions
from antiphon_worker.parallel import checked_shape
from antiphon_worker.ranks import run_with_ranks
from antiphon_worker.role import CurrentRole, role_of
from antiphon_worker.self_measure import begin_measuring, measured_steps
from antiphon_worker.service import Drain, ServiceFactory, WorkerContext, WorkerService
from antiphon_worker.transports import transport_offer

log = logging.getLogger("antiphon.worker")

SERVER_STOP_S = 1.0
ENGINE_CLOSE_S = 10.0


def run_worker(options: WorkerOptions, roles: Sequence[ServiceFactory]) -> int:
    """Run one worker until it is told to end; the exit code. `roles` make the services, all in every process.

    The caller has configured logs and traces, and ends the process by `antiphon_telemetry.exit.leave`.
    """
    try:
        # Before a model is loaded, which takes a while.
        _check_redis(redis_access(options))
        shape = checked_shape(options)
        if options.ray_join:
            return run_join(options)
        if shape.ranks > 1:
            return run_with_ranks(options, roles, shape)
        engine = create_engine(options)
    except WorkerStartError as error:
        log.error("%s", error)
        return error.exit_code
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(live(options, roles, engine))
    except WorkerStartError as error:
        log.error("%s", error)
        return error.exit_code
    finally:
        engine.close(ENGINE_CLOSE_S)


def redis_access(options: WorkerOptions) -> RedisAccess | None:
    """None: no Redis."""
    if not options.redis_url:
        return None
    return RedisAccess(options.redis_url, options.redis_username, options.redis_password_file)


def _check_redis(access: RedisAccess | None) -> None:
    if access is not None:
        try:
            access.check()
        except RedisUrlError as error:
            raise WorkerStartError(f"--redis-url: {error}", ExitCode.BAD_INPUT) from error


@dataclass(frozen=True, slots=True)
class _Ready:
    """What a ready file holds."""

    worker_id: str
    incarnation: str
    role: str
    address: str
    status_address: str
    pid: int


async def live(
    options: WorkerOptions, roles: Sequence[ServiceFactory], engine: BlockEngine, requests: EndRequests | None = None
) -> int:
    """One life of a worker, with an engine that is loaded and not started: from its first promise to its last.

    The exit code. `requests`: signals that somebody listens to already; None: it does so itself. Raises
    WorkerStartError, and EngineLost once nobody is told of the worker any more: what computes has to be made anew.
    """
    async with contextlib.AsyncExitStack() as closing:
        worker = await _Worker.start(options, roles, engine, closing)
        (requests or EndRequests()).heard_by(worker.ask_to_end)
        return await worker.run()


class _Worker:
    """A started worker. What it owns is closed by the exit stack that `start` was given, in reverse order."""

    def __init__(
        self,
        context: WorkerContext,
        services: Sequence[WorkerService],
        announcer: WorkerAnnouncer | None,
        record: WorkerRecord,
        end: asyncio.Future[ExitCode | EngineLost],
    ) -> None:
        self._context = context
        self._services = services
        self._announcer = announcer
        self._record = record
        self._end = end
        self._asked = 0
        self._asked_to_end = asyncio.Event()
        self._asked_to_hurry = asyncio.Event()
        context.role.on_change.append(self._announce)

    @classmethod
    async def start(
        cls,
        options: WorkerOptions,
        roles: Sequence[ServiceFactory],
        engine: BlockEngine,
        closing: contextlib.AsyncExitStack,
    ) -> _Worker:
        loop = asyncio.get_running_loop()
        if options.host in ("", "0.0.0.0", "::") and not options.advertise_host:
            raise WorkerStartError(
                f"--host {options.host} is no address that peers can connect to: name one by --advertise-host",
                ExitCode.BAD_INPUT,
            )
        identity = new_identity(options)
        role = CurrentRole(role_of(options.role))
        end: asyncio.Future[ExitCode | EngineLost] = loop.create_future()
        announce: list[WorkerAnnouncer] = []

        def on_blocks(change: BlocksChanged) -> None:
            for announcer in announce:
                announcer.block_change(change.sequence, change.stored, change.removed)

        def on_failure(error: BaseException) -> None:
            lost = isinstance(error, ExecutorLost)
            if lost:
                log.error("%s", error)
            else:
                log.critical("the engine's thread died; this worker ends", exc_info=error)
            if not end.done():
                end.set_result(EngineLost(str(error)) if lost else ExitCode.FAILURE)

        bridge = EngineBridge(on_blocks=on_blocks, on_failure=on_failure)
        closing.callback(bridge.close)

        memory, info = engine.kv, engine.info
        local = LocalWorker(
            worker_id=identity.worker_id,
            incarnation=identity.incarnation,
            kv_format=info.kv_format,
            block_bytes=info.kv_block_bytes,
            layers=info.layers,
            kv_heads=info.kv_heads,
        )
        links = PeerLinks(
            local,
            DataPlane(engine.planes(transport_offer(options, identity))),
            engine,
            heartbeat_ms=options.heartbeat_ms,
            lost_after_ms=options.lost_after_ms,
        )
        closing.push_async_callback(links.close)
        try:
            await links.start()
        except TransportError as error:
            raise WorkerStartError(str(error), ExitCode.UNAVAILABLE) from error

        drain = Drain()
        # A registry of this life's own, as a worker of several ranks may live more than once in a process.
        registry = CollectorRegistry()
        REGISTRY.register(registry)
        closing.callback(REGISTRY.unregister, registry)
        metrics = WorkerMetrics(registry)
        metrics.watch(engine.load, links.statuses, lambda: engine.preemptions, lambda: engine.rank_times)
        load = LoadReport(
            engine, role, prior=step_model_prior(options), links=links.statuses, draining=lambda: drain.on
        )
        bridge.observe(metrics.observe_step)
        metrics.watch_predictions(load.fit)
        bridge.observe(load.observe)
        channels = ChannelPool()
        closing.push_async_callback(channels.close)
        context = WorkerContext(
            options=options,
            identity=identity,
            role=role,
            engine=engine,
            bridge=bridge,
            links=links,
            tokenizer=Tokenizer.from_buffer(info.tokenizer_json),
            load=load,
            channels=channels,
            metrics=metrics,
            drain=drain,
            hardware=hardware_name(options),
        )
        services = [create(context) for create in roles]
        for service in services:
            closing.push_async_callback(service.close)

        closing.push_async_callback(asyncio.to_thread, engine.close, ENGINE_CLOSE_S)
        measuring = begin_measuring(options, engine)
        engine.start(bridge)
        load.learn_first(await measured_steps(measuring))

        server = grpc.aio.server(options=server_options(options.lost_after_ms))
        for service in services:
            service.register(server)
        add_KvBlocksServicer_to_server(links.servicer(), server)
        port = _bind(server, options.host, options.port)
        await server.start()
        closing.push_async_callback(_stop_server, server, services, links)

        advertise = options.advertise_host or options.host
        status = StatusServer(
            options.host,
            options.status_port,
            ready=lambda: (False, "draining") if drain.on else (True, ""),
            detail=functools.partial(_status, context, services),
            pages={"/blocks": functools.partial(_blocks, context)},
        )
        try:
            await status.start()
        except OSError as error:
            raise WorkerStartError(
                f"the status port {options.host}:{options.status_port} is not to be had ({error.strerror}): "
                "choose another --status-port",
                ExitCode.UNAVAILABLE,
            ) from error
        closing.push_async_callback(status.close)

        record = WorkerRecord(
            worker_id=identity.worker_id,
            revision=options.revision,
            incarnation=identity.incarnation,
            role=role.name,
            role_version=role.version,
            model=info.model,
            card_digest=model_card(info).digest,
            address=host_port(advertise, port),
            status_address=host_port(advertise, status.port),
            total_blocks=memory.num_blocks,
            block_tokens=info.block_tokens,
            started_at_ms=time.time_ns() // 1_000_000,
        )
        announcer: WorkerAnnouncer | None = None
        access = redis_access(options)
        if access is not None:
            announcer = WorkerAnnouncer(access, record, engine.indexed_blocks, list_model=options.list_model)
            announce.append(announcer)
            task = loop.create_task(announcer.run(), name="announcer")
            task.add_done_callback(functools.partial(_announcer_ended, end))
            closing.push_async_callback(_cancel, task)

        worker = cls(context, services, announcer, record, end)
        log.info(
            "worker ready worker_id=%s role=%s address=%s status=%s model=%s",
            identity.worker_id,
            role.name,
            record.address,
            record.status_address,
            info.model,
        )
        if options.ready_file:
            _write_ready(Path(options.ready_file), identity, record)
        return worker

    def ask_to_end(self) -> None:
        """SIGTERM or SIGINT: the first drains, the second does not wait for what runs, the third ends at once."""
        self._asked += 1
        if self._asked == 1:
            self._asked_to_end.set()
        elif self._asked == 2:
            self._asked_to_hurry.set()
        elif not self._end.done():
            log.warning("told to end a third time: ending as things are")
            self._end.set_result(ExitCode.OK)

    async def run(self) -> int:
        """Until told to end and drained, or until something failed; the exit code. Raises EngineLost."""
        asked = asyncio.ensure_future(self._asked_to_end.wait())
        drain: asyncio.Task[None] | None = None
        try:
            await _first_of(asked, self._end)
            if not self._end.done():
                drain = asyncio.ensure_future(self._drain())
                await _first_of(drain, self._end)
            code = self._end.result() if self._end.done() else ExitCode.OK
            if self._announcer is not None and code is not ExitCode.FAILURE:
                await self._announcer.withdraw()
            if isinstance(code, EngineLost):
                raise code
            return code
        finally:
            await _cancel(asked)
            if drain is not None:
                await _cancel(drain)

    async def _drain(self) -> None:
        self._context.drain.begin()
        self._announce()
        await leave(self._context, self._services, self._asked_to_hurry)

    def _announce(self) -> None:
        """Role and draining, as they are now."""
        role = self._context.role
        log.info("role=%s role_version=%d draining=%s", role.name, role.version, self._context.drain.on)
        if self._announcer is not None:
            self._announcer.update(
                msgspec.structs.replace(
                    self._record, role=role.name, role_version=role.version, draining=self._context.drain.on
                )
            )


def host_port(host: str, port: int) -> str:
    """An address as gRPC and URLs write it: IPv6 in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _bind(server: grpc.aio.Server, host: str, port: int) -> int:
    try:
        bound = server.add_insecure_port(host_port(host, port))
    except RuntimeError as error:
        bound = 0
        cause: BaseException | None = error
    else:
        cause = None
    if bound == 0:
        raise WorkerStartError(
            f"the port {host_port(host, port)} is not to be had: choose another --port, or 0 for any free one",
            ExitCode.UNAVAILABLE,
        ) from cause
    return bound


async def _stop_server(server: grpc.aio.Server, services: Sequence[WorkerService], links: PeerLinks) -> None:
    """End the streams: gateways hear it from the stream, callers of runs from theirs, peers from their links."""
    for service in services:
        service.break_off("the worker ends")
    links.servicer().close()
    await server.stop(SERVER_STOP_S)


async def _first_of(*futures: asyncio.Future[Any]) -> None:
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)


async def _cancel(task: asyncio.Future[Any]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _announcer_ended(end: asyncio.Future[ExitCode | EngineLost], task: asyncio.Task[None]) -> None:
    """The announcer rides out what Redis does; if it ends by itself, something is wrong here."""
    if task.cancelled():
        return
    error = task.exception()
    log.critical("the announcer ended; this worker ends", exc_info=error)
    if not end.done():
        end.set_result(ExitCode.FAILURE)


def _write_ready(path: Path, identity: WorkerIdentity, record: WorkerRecord) -> None:
    ready = _Ready(
        worker_id=identity.worker_id,
        incarnation=identity.incarnation,
        role=record.role,
        address=record.address,
        status_address=record.status_address,
        pid=os.getpid(),
    )
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_bytes(msgspec.json.encode(ready) + b"\n")
    part.replace(path)


@dataclass(frozen=True, slots=True)
class _Blocks:
    """The page of what the engine's index holds."""

    incarnation: str
    sequence: int
    """Of the last change that is in `blocks`."""
    digest: str
    """SHA-256 of all hashes in order, in hexadecimal digits: what a gateway's index page is compared with."""
    blocks: list[str]
    """Hashes in hexadecimal digits, sorted."""


async def _blocks(context: WorkerContext) -> _Blocks:
    def page() -> _Blocks:
        sequence, indexed = context.engine.indexed_blocks()
        hashes = sorted(block.hex() for block in indexed)
        return _Blocks(context.identity.incarnation, sequence, contents_digest(indexed), hashes)

    return await asyncio.to_thread(page)


async def _status(context: WorkerContext, services: Sequence[WorkerService]) -> Mapping[str, object]:
    """The status page: what is true now, with the pool's books counted anew."""
    engine, identity = context.engine, context.identity
    try:
        report = await asyncio.to_thread(engine.check_integrity)
        integrity = "ok"
        used_blocks, cached_blocks, requests = report.used_blocks, report.cached_blocks, report.requests
    except IntegrityError as error:
        integrity = str(error)
        used_blocks = cached_blocks = requests = -1
    load = engine.load()
    sequence, indexed = engine.indexed_blocks()
    fit = context.load.fit
    model = fit.model()
    detail: dict[str, object] = {
        "worker_id": identity.worker_id,
        "incarnation": identity.incarnation,
        "role": context.role.name,
        "role_version": context.role.version,
        "model": engine.info.model,
        "revision": context.options.revision,
        "draining": context.drain.on,
        "integrity": integrity,
        "running": load.running,
        "waiting": load.waiting,
        "waiting_tokens": load.waiting_tokens,
        "kv_tokens": load.kv_tokens,
        "free_blocks": load.free_blocks,
        "total_blocks": load.total_blocks,
        "retained_blocks": load.retained_blocks,
        "used_blocks": used_blocks,
        "cached_blocks": cached_blocks,
        "requests": requests,
        "indexed_blocks": len(indexed),
        "index_sequence": sequence,
        "step_model": {
            "base_ms": model.base_ms,
            "per_new_token_ms": model.per_new_token_ms,
            "per_token_context_ms": model.per_token_context_ms,
            "per_sequence_ms": model.per_sequence_ms,
            "per_kv_token_ms": model.per_kv_token_ms,
            "samples": fit.samples,
            "relative_error": fit.relative_error,
            "observed": fit.observed,
        },
        "hardware": context.hardware,
        "pins": context.links.held_blocks,
        "links": [
            {
                "peer_worker_id": link.peer_worker_id,
                "transport": link.transport,
                "gigabytes_per_s": link.gigabytes_per_s,
                "up": link.up,
                "detail": link.detail,
            }
            for link in context.links.statuses()
        ],
        "active_requests": sum(service.active_requests for service in services),
        "open_tasks": sum(service.open_tasks for service in services),
    }
    for service in services:
        detail.update(service.status())
    return detail
