"""What this gateway tells of a Model, put together from what its parts know anyway. Nothing is kept here.

    demand (`scaling_demand`)      requests of the window, and those that run
    dispatcher                     what waits: in the lines of the Model's groups, and in the lobby
    fleet                          each worker's last word

What waits in a line waits for whoever computes prompts: prefill workers where the group has some.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

from antiphon_policy.route_records import WorkerRole
from antiphon_policy.scaling.news import GatewayNews, PoolNews, WorkerNews
from antiphon_policy.scaling.records import RequestSample

from antiphon_gateway.dispatch import Dispatcher
from antiphon_gateway.fleet import Fleet
from antiphon_gateway.flight import Flight
from antiphon_gateway.groups import Group
from antiphon_gateway.load import WorkerLoad
from antiphon_gateway.scaling_demand import Demand
from antiphon_gateway.scaling_window import WINDOW_MS


class NewsDesk:
    """See the module. `flights`: those that run."""

    def __init__(
        self,
        gateway_id: str,
        fleet: Fleet,
        dispatcher: Dispatcher,
        demand: Demand,
        flights: Callable[[], Iterable[Flight]],
    ) -> None:
        self._gateway_id = gateway_id
        self._fleet = fleet
        self._dispatcher = dispatcher
        self._demand = demand
        self._flights = flights
        self._recorded: set[str] = set()
        """Models that had a record at the last look, or still have workers."""

    def models(self) -> set[str]:
        """Keys of the Models that there is something to tell of: with a record, with workers, or asked for lately. What
        was asked of one that is deleted is forgotten with it: nobody will size it any more."""
        fleet, demand, now_ms = self._fleet, self._demand, self._demand.now_ms
        served = fleet.served_models()
        recorded = {record.model for record in fleet.catalogue if not record.deleted}
        for model in self._recorded - recorded - served:
            demand.forget(model)
        self._recorded = recorded | (self._recorded & served)
        known = recorded | served | set(self._dispatcher.lobby)
        for model in demand.models():
            if model not in known and demand.window(model).is_empty(now_ms):
                demand.forget(model)
        return known | set(demand.models())

    def news(self) -> Mapping[str, GatewayNews]:
        """Of all Models, by key."""
        running = self._demand.running(self._flights())
        streams = self._streams()
        return {model: self._of(model, running.get(model, ()), streams.get(model, 0)) for model in self.models()}

    def news_of(self, model: str) -> GatewayNews:
        """Of one that sleeps: nothing of it runs."""
        return self._of(model, (), 0)

    def _of(self, model: str, running: Iterable[RequestSample], streams: int) -> GatewayNews:
        window, now_ms = self._demand.window(model), self._demand.now_ms
        held_requests, held_tokens = self._dispatcher.lobby.waiting_for(model)
        return GatewayNews(
            gateway_id=self._gateway_id,
            model=model,
            at_ms=now_ms,
            window_s=WINDOW_MS / 1e3,
            since_ms=window.since_ms,
            samples=window.samples(now_ms, running),
            arrivals=window.arrivals(now_ms),
            pools=self._pools(model),
            workers=self._workers(model, now_ms),
            held_requests=held_requests,
            held_tokens=held_tokens,
            streams=streams,
        )

    def _streams(self) -> Mapping[str, int]:
        """Answers that have begun and not ended, by model."""
        found: dict[str, int] = {}
        for flight in self._flights():
            model = flight.target.group.model
            begun = sum(1 for choice in flight.choices if choice.first_token_at and not choice.ended)
            found[model] = found.get(model, 0) + begun
        return found

    def _pools(self, model: str) -> tuple[PoolNews, ...]:
        found: dict[WorkerRole, list[int]] = {}
        for group, queue in self._dispatcher.queues.items():
            if group.model == model and len(queue):
                sums = found.setdefault(self._prompts_role(group), [0, 0])
                sums[0] += len(queue)
                sums[1] += queue.line.waiting_tokens
        return tuple([PoolNews(role, requests, tokens) for role, (requests, tokens) in found.items()])

    def _prompts_role(self, group: Group) -> WorkerRole:
        """Of those who compute the prompts of the group's requests."""
        clients = self._fleet.workers_of(group)
        roles = {client.attachment.role for client in clients if client.attachment is not None}
        for role in (WorkerRole.PREFILL, WorkerRole.BOTH):
            if role in roles:
                return role
        return WorkerRole.DECODE if roles else WorkerRole.BOTH

    def _workers(self, model: str, now_ms: float) -> tuple[WorkerNews, ...]:
        draining = self._fleet.catalogue.draining(model)
        hits = self._demand.window(model).hits(now_ms)
        now = time.monotonic()
        return tuple(
            [
                self._worker(load, now_ms - (now - load.said_at) * 1e3, draining, hits)
                for load in self._dispatcher.loads()
                if load.group.model == model
            ]
        )

    def _worker(
        self, load: WorkerLoad, said_ms: float, draining: frozenset[str], hits: Mapping[str, int]
    ) -> WorkerNews:
        queue, card = load.client.queue, self._fleet.models.by_digest(load.group.card_digest)
        attachment = load.client.attachment
        return WorkerNews(
            worker_id=load.worker_id,
            role=load.role,
            revision=load.group.revision,
            said_ms=said_ms,
            step=load.client.step_model if load.says_its_speed else None,
            hardware=attachment.hardware if attachment is not None else "",
            chunk_tokens=load.chunk_tokens,
            max_sequences=queue.max_sequences,
            block_tokens=card.block_tokens if card is not None else 0,
            total_blocks=queue.total_blocks,
            empty_blocks=queue.empty_blocks,
            waiting_tokens=queue.waiting_tokens,
            running=queue.running,
            kv_tokens=queue.kv_tokens,
            draining=queue.draining or load.worker_id in draining,
            hit_tokens=hits.get(load.worker_id, 0),
        )
