"""The operator process: status pages, the Lease, and how it ends.

    starting ──▶ standby ──(the Lease is ours)──▶ listing ──▶ acting ──(SIGTERM, SIGINT)──▶ released, exit 0
                                                                │
                                              the Lease is lost └──▶ ends at once, exit 1

A standby answers its pages, is ready, and watches nothing: it costs the API server one small request a second. What
acts holds the Lease; every writing request asks for that right before it is sent, so that a process that was frozen
past its Lease writes nothing when it goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import enum
import importlib.metadata
import logging
import os
import secrets
import signal
import socket
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import msgspec
from antiphon_kvtransfer import RedisAccess, RedisUrlError
from antiphon_telemetry.exit import ExitCode
from antiphon_telemetry.status import StatusServer

from antiphon_operator.kube.client import KubeClient
from antiphon_operator.kube.election import LeaseTiming
from antiphon_operator.kube.errors import AccessError, ApiError, Forbidden, KubeError, NotFound, Unauthorized
from antiphon_operator.kube.kubeconfig import find_access
from antiphon_operator.kube.lease import Leadership
from antiphon_operator.kube.resources import MODELS
from antiphon_operator.options import OperatorContext, OperatorOptions
from antiphon_operator.plan.planner import plan
from antiphon_operator.runtime.gateways import Gateways, GatewayUrlError
from antiphon_operator.runtime.kinds import NotAllowedError, Watched, allowed_kinds, watched_kinds
from antiphon_operator.runtime.metrics import OperatorMetrics
from antiphon_operator.runtime.process import ActingOperator, Surroundings
from antiphon_operator.runtime.reconcile import Planner
from antiphon_operator.runtime.redis_records import RecordWriter
from antiphon_operator.runtime.scaling_store import ScalingStore
from antiphon_operator.runtime.sources import ClusterSources
from antiphon_operator.runtime.workers import Workers

log = logging.getLogger("antiphon.operator")

_NO_OBJECT = "metadata.name=."
"""A field selector that no name fulfils: asks whether one may list, and lists nothing."""
_RETRY_S = 1.0


class Role(enum.Enum):
    STARTING = "starting"
    STANDBY = "standby"
    LISTING = "listing"
    ACTING = "acting"
    ENDING = "ending"


class StartError(Exception):
    """The process cannot do its work. `code` says of what kind that is."""

    def __init__(self, code: ExitCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class ReadyRecord(msgspec.Struct):
    """What `--ready-file` holds."""

    status_address: str
    pid: int


class OperatorStatus(msgspec.Struct):
    """The `/status` page."""

    role: str
    identity: str
    lease: str
    version: str
    models: int
    cached_objects: int
    queue_depth: int


def run_operator(options: OperatorOptions, *, planner: Planner = plan) -> int:
    """Run until a signal; the exit code. Logs are the caller's to configure, and so is leaving the process."""
    try:
        operator = OperatorProcess(options, planner)
        with asyncio.Runner() as runner:
            return runner.run(operator.run())
    except StartError as error:
        log.error("%s", error)
        return error.code


class OperatorProcess:
    """See the module's docstring."""

    def __init__(self, options: OperatorOptions, planner: Planner) -> None:
        """Raises StartError."""
        self._options = options
        self._planner = planner
        try:
            self._access = find_access(options.kubeconfig)
        except AccessError as error:
            raise StartError(ExitCode.BAD_INPUT, str(error)) from error
        try:
            self._lease_timing = LeaseTiming.lasting(options.lease_s)
        except ValueError as error:
            raise StartError(ExitCode.BAD_INPUT, f"--lease-s: {error}") from error
        _check_urls(options)
        self._credentials_key = _read_key(options)
        self._lease_namespace = options.lease_namespace or os.environ.get("POD_NAMESPACE") or self._access.namespace
        name = os.environ.get("POD_NAME") or socket.gethostname()
        self._identity = options.identity or f"{name}-{secrets.token_hex(3)}"
        self._metrics = OperatorMetrics()
        self._version = importlib.metadata.version("antiphon")
        self._role = Role.STARTING
        self._acting: ActingOperator | None = None
        self._stop = asyncio.Event()

    async def run(self) -> int:
        """Raises StartError."""
        options = self._options
        pages = StatusServer(options.host, options.status_port, ready=self._ready, detail=self._status)
        try:
            await pages.start()
        except OSError as error:
            raise StartError(
                ExitCode.UNAVAILABLE,
                f"the status pages cannot listen on {options.host} port {options.status_port}: {error}",
            ) from error
        try:
            with self._signals():
                log.info("operator %s: status pages on port %d", self._identity, pages.port)
                if options.ready_file:
                    _write_ready_file(Path(options.ready_file), f"{options.host}:{pages.port}")
                await self._live()
        finally:
            await pages.close()
        return ExitCode.OK

    async def _live(self) -> None:
        leadership = Leadership(
            self._options.kubeconfig,
            self._lease_namespace,
            self._options.lease_name,
            self._identity,
            on_lost=_end_at_once,
            timing=self._lease_timing,
        )
        client = KubeClient(self._access, may_write=leadership.may_write)
        try:
            if not await self._unless_stopped(self._reach(client)):
                return
            self._role = Role.STANDBY
            log.info("waiting for the Lease %s/%s", self._lease_namespace, self._options.lease_name)
            if not await self._unless_stopped(leadership.acquire()):
                return
            self._role = Role.LISTING
            self._metrics.leader.set(1)
            await self._act(client, leadership)
        finally:
            self._role = Role.ENDING
            self._metrics.leader.set(0)
            await leadership.release()
            await client.close()

    async def _act(self, client: KubeClient, leadership: Leadership) -> None:
        options = self._options
        wanted = watched_kinds(pod_monitors=options.pod_monitors)
        try:
            kinds = await allowed_kinds(wanted, lambda watched: _may_list(client, watched, options))
        except NotAllowedError as error:
            raise StartError(ExitCode.BAD_INPUT, str(error)) from error
        except ApiError as error:
            raise StartError(ExitCode.UNAVAILABLE, f"the API server does not answer: {error}") from error
        watched = {kind.kind for kind in kinds}
        context = dataclasses.replace(
            operator_context(options, self._version), pod_monitors=options.pod_monitors and "PodMonitor" in watched
        )
        gateways = Gateways(options.gateway_url) if options.gateway_url else None
        workers = Workers()
        records = scaling = None
        if options.redis_url:
            scaling = ScalingStore(
                RedisAccess(options.redis_url, options.redis_username, options.redis_password_file),
                may_write=leadership.may_write,
            )
            records = RecordWriter(
                options.redis_url,
                options.redis_username,
                options.redis_password_file,
                may_write=leadership.may_write,
            )
        self._acting = ActingOperator(
            Surroundings(
                options=options,
                context=context,
                access=self._access,
                client=client,
                kinds=kinds,
                metrics=self._metrics,
                plan=self._planner,
                sources=ClusterSources(client, workers, gateways),
                records=records,
                scaling=scaling,
                credentials_key=self._credentials_key,
            )
        )
        try:
            if not await self._acting.run(self._identity, self._stop, self._listen_to_signals):
                raise StartError(ExitCode.UNAVAILABLE, "this operator ends, and a fresh one is to take over")
        finally:
            await workers.close()
            if scaling is not None:
                await scaling.close()
            if gateways is not None:
                await gateways.close()

    async def _reach(self, client: KubeClient) -> None:
        """Wait for an API server that knows Models. Raises StartError."""
        try:
            async with asyncio.timeout(self._options.start_deadline_s):
                await self._until_reached(client)
        except TimeoutError:
            raise StartError(
                ExitCode.UNAVAILABLE,
                f"{self._access.server} did not serve Models within {self._options.start_deadline_s:g} s: is the API "
                "server there, and are the chart's CustomResourceDefinitions installed?",
            ) from None

    async def _until_reached(self, client: KubeClient) -> None:
        said = ""
        while True:
            try:
                await _may_list(client, Watched(MODELS), self._options)
            except (Forbidden, Unauthorized, AccessError) as error:
                raise StartError(ExitCode.BAD_INPUT, f"Models cannot be listed: {error}") from error
            except NotFound:
                trouble = "there are no Models in this cluster: install the chart's CustomResourceDefinitions"
            except KubeError as error:
                trouble = str(error)
            else:
                return
            if trouble != said:
                log.warning("%s; trying again", trouble)
                said = trouble
            await asyncio.sleep(_RETRY_S)

    async def _unless_stopped(self, waiting: Coroutine[Any, Any, None]) -> bool:
        """Wait for it, or for a signal to end: False."""
        task = asyncio.create_task(waiting)
        stop = asyncio.create_task(self._stop.wait(), name="signal")
        try:
            await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                await task
                return not self._stop.is_set()
            return False
        finally:
            stop.cancel()
            task.cancel()

    # -- pages

    def _ready(self) -> tuple[bool, str]:
        if self._role is Role.LISTING and self._acting is not None and self._acting.feed.complete:
            self._role = Role.ACTING
        ready = self._role in (Role.STANDBY, Role.ACTING)
        return ready, f"ready, {self._role.value}" if ready else self._role.value

    def _status(self) -> OperatorStatus:
        self._ready()
        acting = self._acting
        return OperatorStatus(
            role=self._role.value,
            identity=self._identity,
            lease=f"{self._lease_namespace}/{self._options.lease_name}",
            version=self._version,
            models=0 if acting is None else len(acting.caches.model_keys()),
            cached_objects=0 if acting is None else acting.caches.size(),
            queue_depth=0 if acting is None else acting.queue.depth(),
        )

    # -- signals

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        self._listen_to_signals()
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().remove_signal_handler(number)

    def _listen_to_signals(self) -> None:
        """Also called when kopf has put its own handlers in the place of ours."""
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._stop.set)


def operator_context(options: OperatorOptions, version: str) -> OperatorContext:
    return OperatorContext(
        version=version,
        worker_image=options.worker_image,
        worker_redis_url=options.worker_redis_url,
        endpoint=options.endpoint or options.gateway_url,
        otlp_endpoint=options.otlp_endpoint,
        gateway_configured=bool(options.gateway_url),
        redis_configured=bool(options.redis_url),
        pod_monitors=options.pod_monitors,
        network_policies=options.network_policies,
    )


async def _may_list(client: KubeClient, watched: Watched, options: OperatorOptions) -> None:
    """Raises Forbidden, NotFound, ..."""
    for namespace in options.namespaces if watched.resource.namespaced and options.namespaces else (None,):
        await client.list(watched.resource, namespace, fields=_NO_OBJECT)


def _check_urls(options: OperatorOptions) -> None:
    """Raises StartError."""
    try:
        if options.redis_url:
            RedisAccess(options.redis_url, options.redis_username, options.redis_password_file).check()
        if options.gateway_url:
            Gateways(options.gateway_url)
    except (RedisUrlError, GatewayUrlError) as error:
        raise StartError(ExitCode.BAD_INPUT, str(error)) from error


def _read_key(options: OperatorOptions) -> bytes:
    """Empty: no access is handed out. Raises StartError."""
    if not options.credentials_key_file:
        if options.redis_url:
            log.warning("no --credentials-key-file: Models get no Redis users of their own")
        return b""
    try:
        key = Path(options.credentials_key_file).read_bytes().strip()
    except OSError as error:
        raise StartError(ExitCode.BAD_INPUT, f"--credentials-key-file cannot be read: {error}") from error
    if len(key) < 16:
        raise StartError(ExitCode.BAD_INPUT, "--credentials-key-file: the key needs at least 16 bytes")
    return key


def _end_at_once() -> None:
    """On the Lease's thread: another operator may act any moment, so nothing is tidied up."""
    os._exit(ExitCode.FAILURE)


def _write_ready_file(path: Path, address: str) -> None:
    """Appear whole or not at all."""
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.write_bytes(msgspec.json.encode(ReadyRecord(address, os.getpid())))
    draft.replace(path)
