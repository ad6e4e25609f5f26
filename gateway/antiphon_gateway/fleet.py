"""All workers this gateway can use: found in Redis, named on the command line, or both.

Redis says who may exist; the stream to a worker says whether it lives. So a worker counts while its stream stands,
whatever Redis says, and stops counting the moment it breaks. When membership changes, every worker is told its peers,
so that they wire up before the first request needs it; peers are those of its own group (`groups`).

Owned by the server. Owns one `WorkerClient` and its task per address, and the mirror of Redis.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import grpc.aio
from antiphon_kvtransfer.access import RedisAccess
from antiphon_kvtransfer.cluster import ClusterMirror
from antiphon_kvtransfer.ghost import EvictionGhost
from antiphon_kvtransfer.identity import BlockHash
from antiphon_policy.routing import WorkerRole
from antiphon_proto import worker_pb2 as pb

from antiphon_gateway.catalogue import Catalogue
from antiphon_gateway.equals import EqualWorkers
from antiphon_gateway.groups import Group
from antiphon_gateway.models import Model, ModelRegistry
from antiphon_gateway.options import GatewayOptions
from antiphon_gateway.templating import TemplateInvalid
from antiphon_gateway.tokenization import TokenizerInvalid
from antiphon_gateway.worker_client import CARD_DEADLINE_S, Timing, WorkerClient, WorkerUnavailable

log = logging.getLogger("antiphon.gateway")


class FleetListener(Protocol):
    """What the dispatcher is told. Plain calls that return at once."""

    def worker_attached(self, client: WorkerClient) -> None: ...

    def worker_detached(self, client: WorkerClient) -> None: ...

    def worker_load_changed(self, client: WorkerClient) -> None: ...

    def worker_role_changed(self, client: WorkerClient) -> None: ...

    def records_changed(self) -> None:
        """What the operator says of its Models, or who is announced."""


class Fleet:
    """See the module."""

    def __init__(self, options: GatewayOptions, gateway_id: str, models: ModelRegistry) -> None:
        self.models = models
        self.catalogue = Catalogue()
        self.listener: FleetListener | None = None
        self._equals = EqualWorkers()
        self._gateway_id = gateway_id
        self._timing = Timing(options.heartbeat_ms, options.lost_after_ms)
        self._static = tuple(options.worker)
        self._mirror: ClusterMirror | None = None
        self._ghosts: dict[str, EvictionGhost] = defaultdict(EvictionGhost)
        """Of models that workers have evicted blocks of."""
        if options.redis_url:
            access = RedisAccess(options.redis_url, options.redis_username, options.redis_password_file)
            self._mirror = ClusterMirror(access, on_change=self._mirror_changed)
            blocks = self._mirror.blocks
            blocks.on_last_removed = lambda model, hashes: self._ghosts[model].evicted(hashes)
            blocks.on_stored = lambda model, hashes: self._returned(model, hashes)
        self._mirror_task: asyncio.Task[None] | None = None
        self._clients: dict[str, tuple[WorkerClient, asyncio.Task[None]]] = {}
        self._retired: set[asyncio.Task[None]] = set()
        self._live: dict[str, WorkerClient] = {}
        self._groups: dict[str, dict[Group, list[WorkerClient]]] = {}
        """Those of `_live`, by model and group."""
        self._settled = False
        self._card_locks: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._peers_due = False

    # -- life

    def start(self) -> None:
        """Begin to look for workers. Needs a running loop."""
        if self._mirror is not None:
            self._mirror_task = asyncio.create_task(self._mirror.run(), name="cluster-mirror")
            self._mirror_task.add_done_callback(_report_end)
        self._reconcile()

    async def close(self) -> None:
        tasks = [task for _, task in self._clients.values()] + list(self._retired)
        if self._mirror_task is not None:
            tasks.append(self._mirror_task)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._clients.clear()

    # -- for everybody

    def worker(self, worker_id: str) -> WorkerClient | None:
        return self._live.get(worker_id)

    def workers(self) -> Mapping[str, WorkerClient]:
        """Those with a standing stream, by worker id."""
        return self._live

    def groups_of(self, model: str) -> Sequence[Group]:
        """The model's groups that have a worker with a standing stream."""
        return tuple(self._groups.get(model, ()))

    def workers_of(self, group: Group) -> Sequence[WorkerClient]:
        """Those with a standing stream."""
        return self._groups.get(group.model, {}).get(group, ())

    def served_models(self) -> set[str]:
        """Models that have a worker with a standing stream."""
        return set(self._groups)

    def announced_models(self) -> set[str]:
        """Names of models that some worker announced, whether or not it could be attached to yet."""
        records = self._mirror.workers().values() if self._mirror is not None else ()
        return {record.model for record in records}

    def leading_blocks(self, model: Model, chain: Sequence[BlockHash]) -> Mapping[str, int]:
        """Worker id -> how many leading blocks of the chain it holds; only those that hold some."""
        if self._mirror is None or not chain:
            return {}
        return self._mirror.blocks.leading_blocks(model.name, chain)

    def asked(self, model: Model, chain: Sequence[BlockHash], known_blocks: int) -> None:
        """A request wants the chain, of which so many leading blocks are held where it goes."""
        ghost = self._ghosts.get(model.name)
        if ghost is not None:
            ghost.asked(chain, known_blocks)

    def evicted_reuse(self, model: str) -> float:
        """The share of evicted blocks that are wanted again; 0 where nothing was evicted yet."""
        ghost = self._ghosts.get(model)
        return ghost.reuse if ghost is not None else 0.0

    def _returned(self, model: str, hashes: Sequence[BlockHash]) -> None:
        ghost = self._ghosts.get(model)
        if ghost is not None:
            ghost.stored(hashes)

    def peer(self, worker_id: str) -> pb.Peer | None:
        client = self._live.get(worker_id)
        return None if client is None else _peer(client)

    @property
    def mirror(self) -> ClusterMirror | None:
        """None without Redis."""
        return self._mirror

    @property
    def mirror_healthy(self) -> bool | None:
        """None without Redis."""
        return None if self._mirror is None else self._mirror.healthy

    @property
    def settled(self) -> bool:
        """Redis has told who there is, and every worker that it named was attached to or could not be. Once true, it
        stays: what comes later is no reason to hold back a gateway that serves."""
        if not self._settled and self._mirror is not None and self._mirror.healthy:
            self._settled = all(client.tried for client, _ in self._clients.values())
        return self._settled

    # -- membership

    def _mirror_changed(self) -> None:
        if self._mirror is not None:
            self.catalogue.update(self._mirror.model_records())
        self._reconcile()
        if self.listener is not None:
            self.listener.records_changed()

    def _reconcile(self) -> None:
        """Make the clients those that are wanted."""
        records = self._mirror.workers().values() if self._mirror is not None else ()
        wanted = {*self._static, *(record.address for record in records)}
        for address in wanted - self._clients.keys():
            client = WorkerClient(address, self._gateway_id, self._timing, self)
            task = asyncio.create_task(client.run(), name=f"worker {address}")
            task.add_done_callback(_report_end)
            self._clients[address] = (client, task)
        for address in self._clients.keys() - wanted:
            client, _ = self._clients[address]
            # A stream that stands is a better witness than a record that is gone.
            if client.attachment is None:
                self._retire(address)

    def _retire(self, address: str) -> None:
        _, task = self._clients.pop(address)
        task.cancel()
        self._retired.add(task)
        task.add_done_callback(self._retired.discard)

    def _wanted(self, address: str) -> bool:
        if address in self._static or self._mirror is None:
            return address in self._static
        return any(record.address == address for record in self._mirror.workers().values())

    # -- FleetEvents: what the clients say

    async def prepare(self, client: WorkerClient, welcome: pb.Welcome, stub: Any) -> str:
        async with self._card_locks[welcome.card_digest]:
            known = self.models.by_digest(welcome.card_digest)
            if known is not None:
                return known.name
            try:
                card = await stub.GetModelCard(pb.GetModelCardRequest(), timeout=CARD_DEADLINE_S)
                model = await asyncio.to_thread(Model, card, self.models.encodings)
            except grpc.aio.AioRpcError as error:
                raise WorkerUnavailable(f"its model card cannot be read: {error.details()}") from error
            except (TokenizerInvalid, TemplateInvalid) as error:
                raise WorkerUnavailable(f"its model card cannot be used: {error}") from error
            if model.digest != welcome.card_digest:
                raise WorkerUnavailable("its model card is not the one that it spoke of")
            self.models.add(model)
            log.info("model %s is known (card %s)", model.name, model.digest)
            return model.name

    def attached(self, client: WorkerClient) -> None:
        attachment = client.attachment
        if attachment is None:
            return
        other = self._live.get(attachment.worker_id)
        if other is not None and other.attachment is not None:
            if other.attachment.incarnation == attachment.incarnation:
                log.info("worker %s is attached at two addresses; %s rests", attachment.worker_id, client.address)
                return
            self._drop(attachment.worker_id, other)
        self._add(client, attachment.worker_id)

    def detached(self, client: WorkerClient, why: str) -> None:
        self._equals.forget(client)
        attachment = client.attachment
        if attachment is not None and self._live.get(attachment.worker_id) is client:
            self._drop(attachment.worker_id, client)
            for other, _ in self._clients.values():
                if (
                    other is not client
                    and other.attachment is not None
                    and other.attachment.worker_id == attachment.worker_id
                ):
                    self._add(other, attachment.worker_id)
                    break
        if not self._wanted(client.address) and client.address in self._clients:
            self._retire(client.address)

    def load_changed(self, client: WorkerClient) -> None:
        self._equals.heard(client)
        if self.listener is not None:
            self.listener.worker_load_changed(client)

    def role_changed(self, client: WorkerClient) -> None:
        """It is the same worker with the same blocks: peers and index stay."""
        # Its equals are others now.
        self._equals.forget(client)
        self._equals.heard(client)
        attachment = client.attachment
        if attachment is not None and self._live.get(attachment.worker_id) is client and self.listener is not None:
            self.listener.worker_role_changed(client)

    def _add(self, client: WorkerClient, worker_id: str) -> None:
        self._equals.heard(client)
        self._live[worker_id] = client
        if client.attachment is not None:
            group = client.attachment.group
            self._groups.setdefault(group.model, {}).setdefault(group, []).append(client)
        self._membership_changed()
        if self.listener is not None:
            self.listener.worker_attached(client)

    def _drop(self, worker_id: str, client: WorkerClient) -> None:
        del self._live[worker_id]
        if client.attachment is not None:
            self._leave(client, client.attachment.group)
        self._membership_changed()
        if self.listener is not None:
            self.listener.worker_detached(client)

    def _leave(self, client: WorkerClient, group: Group) -> None:
        groups = self._groups[group.model]
        groups[group].remove(client)
        if not groups[group]:
            del groups[group]
        if not groups:
            del self._groups[group.model]

    def _membership_changed(self) -> None:
        self.models.prefer(group.card_digest for groups in self._groups.values() for group in groups)
        if not self._peers_due:
            self._peers_due = True
            asyncio.get_running_loop().call_soon(self._send_peers)

    def _send_peers(self) -> None:
        self._peers_due = False
        for groups in self._groups.values():
            for clients in groups.values():
                for client in clients:
                    client.send_peers(_peer(other) for other in clients if other is not client)


def can_decode(role: WorkerRole) -> bool:
    return role is not WorkerRole.PREFILL


def _peer(client: WorkerClient) -> pb.Peer:
    attachment = client.attachment
    if attachment is None:
        raise AssertionError("only attached workers are peers")
    return pb.Peer(worker_id=attachment.worker_id, incarnation=attachment.incarnation, address=client.address)


def _report_end(task: asyncio.Task[None]) -> None:
    """A task that should run until cancelled ended by itself: say so, loudly."""
    if not task.cancelled() and task.exception() is not None:
        log.critical("%s died: %r", task.get_name(), task.exception(), exc_info=task.exception())
