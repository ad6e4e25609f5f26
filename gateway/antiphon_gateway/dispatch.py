"""Which worker serves which choice, when: the one waiting queue of this gateway.

    enqueue -> WAITING -> submitted -> accepted -> tokens ... -> ended
                  ^            |            |
                  +- refused --+            +- lost or failed before a token: once more, elsewhere

Workers accept only what they will start soon, so everything that waits, waits here: bounded, tenants in turn, with a
deadline. Placing is a pure decision (`antiphon_policy.routing.route`) over what is known now. Everything runs on the
event loop as plain calls without waiting; the handler of a flight withdraws it in a `finally`, and then nothing of it
is left here or on any worker.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import time
from collections.abc import Mapping

from antiphon_policy.routing import (
    NoWorker,
    RouteDecision,
    RouteRequest,
    RoutingSnapshot,
    WorkerRole,
    WorkerView,
    route,
)
from antiphon_proto import worker_pb2 as pb

from antiphon_gateway import errors
from antiphon_gateway.fleet import Fleet, can_decode
from antiphon_gateway.flight import Choice, Flight
from antiphon_gateway.load import Pledge, WorkerLoad
from antiphon_gateway.metrics import GatewayMetrics
from antiphon_gateway.models import Model
from antiphon_gateway.options import GatewayOptions
from antiphon_gateway.waiting import WaitingQueue
from antiphon_gateway.worker_client import WorkerClient

log = logging.getLogger("antiphon.gateway")

MAX_FAILURES = 2
"""Workers that may fail on one choice before its first token: it is tried elsewhere once."""

_LINKS_FOR_S = 1.0


class Attempt:
    """One choice on one worker: the `Submission` that the worker's stream calls."""

    __slots__ = ("_dispatcher", "answered", "choice", "heard_at", "load", "pledges", "ref")

    def __init__(self, dispatcher: Dispatcher, choice: Choice, load: WorkerLoad) -> None:
        self.choice = choice
        self.load = load
        self.pledges: tuple[tuple[WorkerLoad, Pledge], ...] = ()
        self.ref = 0
        self.answered = False
        self.heard_at = time.monotonic()
        self._dispatcher = dispatcher

    def accepted(self) -> None:
        self._dispatcher.accepted(self)

    def refused(self, reason: pb.RefusalReason.ValueType, message: str) -> None:
        self._dispatcher.refused(self, reason, message)

    def step(self, step: pb.RequestStep) -> None:
        self._dispatcher.stepped(self, step)

    def lost(self, why: str) -> None:
        self._dispatcher.failed(self, f"the stream to it broke ({why})")


class Dispatcher:
    """See the module."""

    def __init__(self, fleet: Fleet, options: GatewayOptions, metrics: GatewayMetrics) -> None:
        self._fleet = fleet
        self._options = options
        self._metrics = metrics
        self._loads: dict[WorkerClient, WorkerLoad] = {}
        self._queues: dict[str, WaitingQueue] = {}
        self._orders = itertools.count(1)
        self._links: Mapping[tuple[str, str], float] = {}
        self._links_at = float("-inf")
        fleet.listener = self

    @property
    def waiting(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    @property
    def pledges(self) -> int:
        """Loads counted for requests whose worker has not said so itself yet."""
        return sum(len(load.pledges) for load in self._loads.values())

    # -- for handlers

    def enqueue(self, flight: Flight) -> None:
        """Take a flight over. Raises ApiError (429, 503) if there is no place or no worker for it."""
        if not any(can_decode(client.attachment.role) for client in self._usable(flight.model) if client.attachment):
            raise errors.no_worker(flight.model.name)
        queue = self._queues.setdefault(flight.model.digest, WaitingQueue())
        for choice in flight.choices:
            choice.order = next(self._orders)
            queue.append(choice)
        self._pump(flight.model)
        if self.waiting > self._options.queue_size:
            waiting = [choice for choice in flight.choices if choice.attempt is None and not choice.ended]
            if waiting:
                self.withdraw(flight)
                raise errors.queue_full(self._options.queue_size)
        if any(choice.attempt is None and not choice.ended for choice in flight.choices):
            self._set_deadline(flight)

    def withdraw(self, flight: Flight) -> bool:
        """Nobody waits for the flight any more: leave the queue, cancel what runs. Idempotent.

        Whether anything was left to withdraw.
        """
        if flight.deadline_timer is not None:
            flight.deadline_timer.cancel()
            flight.deadline_timer = None
        left = False
        queue = self._queues.get(flight.model.digest)
        for choice in flight.choices:
            if queue is not None and queue.remove(choice):
                left = True
            attempt = choice.attempt
            if attempt is not None:
                left = True
                self._close(attempt)
                attempt.load.client.cancel(attempt.ref)
        if queue is not None and not queue:
            del self._queues[flight.model.digest]
        if left:
            self._pump(flight.model)
        return left

    def sweep(self, flight: Flight, now: float) -> None:
        """Fail the choices that no token came for in too long."""
        limit_s = self._options.stall_timeout_s
        for choice in flight.choices:
            attempt = choice.attempt
            if attempt is not None and now - attempt.heard_at > limit_s:
                self._close(attempt)
                attempt.load.client.cancel(attempt.ref)
                choice.fail(errors.stalled(limit_s))

    # -- FleetListener

    def worker_attached(self, client: WorkerClient) -> None:
        self._loads[client] = WorkerLoad(client)
        self._links_at = float("-inf")
        self._pump_for(client)

    def worker_detached(self, client: WorkerClient) -> None:
        # Its requests hear `lost` one by one, after this.
        self._loads.pop(client, None)
        self._metrics.worker_lost()

    def worker_load_changed(self, client: WorkerClient) -> None:
        load = self._loads.get(client)
        if load is not None:
            load.settle(time.monotonic())
            self._pump_for(client)

    # -- what attempts hear

    def accepted(self, attempt: Attempt) -> None:
        now = attempt.heard_at = time.monotonic()
        self._answered(attempt)
        attempt.choice.flight.ticket.span.add_event("accepted", {"choice": attempt.choice.index})
        for _, pledge in attempt.pledges:
            pledge.accepted_at = now

    def refused(self, attempt: Attempt, reason: pb.RefusalReason.ValueType, message: str) -> None:
        choice = attempt.choice
        client = attempt.load.client
        name = pb.RefusalReason.Name(reason) if reason in pb.RefusalReason.values() else "REFUSAL_UNSPECIFIED"
        self._metrics.refused(name)
        self._close(attempt)
        if reason == pb.REFUSAL_INVALID:
            choice.fail(errors.invalid(f"The worker refused the request: {message}"))
            return
        if reason == pb.REFUSAL_CAPACITY:
            attempt.load.full_since = time.monotonic()
        elif client.attachment is not None:
            log.info("worker %s turned a request away (%s): %s", client.attachment.worker_id, name, message)
            choice.excluded.add(client.attachment.worker_id)
        self._wait_again(choice)

    def stepped(self, attempt: Attempt, step: pb.RequestStep) -> None:
        choice = attempt.choice
        now = time.monotonic()
        previous, attempt.heard_at = attempt.heard_at, now
        if step.finish in (pb.FINISH_ERROR, pb.FINISH_CANCELLED):
            if step.token_ids or step.text:
                choice.put(_without_finish(step))
            self.failed(attempt, step.error or "it gave the request up without a word")
            return
        if step.token_ids:
            self._measure(choice, now, previous)
            if attempt.pledges:
                self._release(attempt)
        if not attempt.answered:
            self._answered(attempt)
        kept = choice.put(step)
        if not kept:
            self._metrics.slow_client()
            attempt.load.client.cancel(attempt.ref)
        if not kept or step.finish:
            self._close(attempt)
            attempt.load.full_since = None
            self._pump(choice.flight.model)

    def _measure(self, choice: Choice, now: float, previous: float) -> None:
        flight = choice.flight
        if choice.completion_tokens:
            flight.metrics.inter_token_s.observe(now - previous)
        elif not flight.has_token:
            flight.has_token = True
            flight.ticket.span.add_event("first token")
            flight.metrics.first_token_s.observe(now - flight.began_at)

    def failed(self, attempt: Attempt, why: str) -> None:
        """The worker failed on the request, or was lost with it."""
        choice = attempt.choice
        attachment = attempt.load.client.attachment
        self._close(attempt)
        choice.failures += 1
        if attachment is not None:
            choice.excluded.add(attachment.worker_id)
        log.warning("request %s failed on a worker: %s", choice.flight.ticket.request_id, why)
        if choice.completion_tokens:
            choice.fail(errors.worker_failed(why, tokens_sent=True))
        elif choice.failures >= MAX_FAILURES or not self._candidates(choice):
            choice.fail(errors.worker_failed(why, tokens_sent=False))
        else:
            self._metrics.retried()
            self._wait_again(choice)

    # -- the queue

    def _wait_again(self, choice: Choice) -> None:
        flight = choice.flight
        queue = self._queues.setdefault(flight.model.digest, WaitingQueue())
        queue.put_back(choice)
        self._pump(flight.model)
        if choice.attempt is None and not choice.ended:
            if self.waiting > self._options.queue_size:
                queue.remove(choice)
                choice.fail(errors.queue_full(self._options.queue_size))
            else:
                self._set_deadline(flight)

    def _set_deadline(self, flight: Flight) -> None:
        if flight.deadline_timer is None:
            remaining_s = flight.began_at + self._options.queue_timeout_s - time.monotonic()
            flight.deadline_timer = asyncio.get_running_loop().call_later(
                max(0.0, remaining_s), self._deadline_passed, flight
            )

    def _deadline_passed(self, flight: Flight) -> None:
        flight.deadline_timer = None
        queue = self._queues.get(flight.model.digest)
        for choice in flight.choices:
            if queue is not None and queue.remove(choice):
                choice.fail(errors.queue_timeout(self._options.queue_timeout_s))

    def _pump_for(self, client: WorkerClient) -> None:
        attachment = client.attachment
        if attachment is None or attachment.card_digest not in self._queues:
            return
        model = self._fleet.models.by_digest(attachment.card_digest)
        if model is not None:
            self._pump(model)

    def _pump(self, model: Model) -> None:
        """Place what waits for the model, in turn, as far as there is room."""
        queue = self._queues.get(model.digest)
        if queue is None:
            return
        while queue and self._place(queue.head()):
            queue.pop()
        if not queue:
            del self._queues[model.digest]

    def _place(self, choice: Choice) -> bool:
        """Submit the choice, or fail it where nobody can ever serve it. False: it has to wait."""
        candidates = self._candidates(choice)
        if not candidates:
            choice.fail(self._nobody(choice))
            return True
        if not any(load.open for load in candidates):
            return False
        model = choice.flight.model
        prompt = choice.prompt
        leading = self._fleet.leading_blocks(model, prompt.chain)
        snapshot = RoutingSnapshot(workers=self._views(choice, leading), link_gigabytes_per_s=self._link_speeds())
        request = RouteRequest(
            prompt_tokens=len(prompt.token_ids),
            block_tokens=model.block_tokens,
            block_bytes=model.block_bytes,
            max_tokens=choice.sampling.max_tokens,
        )
        try:
            decision = route(snapshot, request, random.random())
        except NoWorker as error:
            log.debug("request %s has to wait: %s", choice.flight.ticket.request_id, error)
            return False
        self._submit(choice, decision, leading)
        return True

    def _nobody(self, choice: Choice) -> errors.ApiError:
        if choice.failures:
            return errors.worker_failed("and no other worker can take it over", tokens_sent=False)
        return errors.no_worker(choice.flight.model.name)

    def _usable(self, model: Model) -> list[WorkerClient]:
        return [client for client in self._fleet.workers_of(model) if not client.queue.draining]

    def _candidates(self, choice: Choice) -> list[WorkerLoad]:
        """Workers that may decode the choice, if not now then later."""
        return [
            self._loads[client]
            for client in self._usable(choice.flight.model)
            if client.attachment is not None
            and client in self._loads
            and can_decode(client.attachment.role)
            and client.attachment.worker_id not in choice.excluded
        ]

    def _views(self, choice: Choice, leading: Mapping[str, int]) -> tuple[WorkerView, ...]:
        views = []
        for client in self._usable(choice.flight.model):
            load = self._loads.get(client)
            attachment = client.attachment
            if load is None or attachment is None or attachment.worker_id in choice.excluded:
                continue
            role = attachment.role
            if can_decode(role) and not load.open:
                # It has no room for one more answer, but it may still compute a prompt.
                if role is WorkerRole.DECODE:
                    continue
                role = WorkerRole.PREFILL
            views.append(load.view(role, leading.get(attachment.worker_id, 0)))
        return tuple(views)

    def _link_speeds(self) -> Mapping[tuple[str, str], float]:
        """(reader, holder) -> GB/s of the links that are up, gathered once in a while."""
        now = time.monotonic()
        if now - self._links_at > _LINKS_FOR_S:
            self._links_at = now
            self._links = {
                (worker_id, link.peer_worker_id): link.gigabytes_per_s
                for worker_id, client in self._fleet.workers().items()
                for link in client.queue.links
                if link.up
            }
        return self._links

    # -- attempts

    def _submit(self, choice: Choice, decision: RouteDecision, leading: Mapping[str, int]) -> None:
        client = self._fleet.worker(decision.decode)
        if client is None:
            raise AssertionError(f"the route leads to {decision.decode}, which was not in the snapshot")
        load = self._loads[client]
        attempt = Attempt(self, choice, load)
        choice.attempt = attempt
        choice.submits += 1
        load.unanswered += 1
        attempt.pledges = self._pledge(choice, decision, leading)
        ticket = choice.flight.ticket
        prefill = (decision.prefill, *decision.prefill_fallbacks) if decision.prefill is not None else ()
        submit = pb.Submit(
            request_id=f"{ticket.request_id}-{choice.index}.{choice.submits}",
            prompt_token_ids=choice.prompt.token_ids,
            sampling=choice.sampling,
            cache_salt=ticket.salt,
            prefill=[peer for name in prefill if (peer := self._fleet.peer(name)) is not None],
            prefix_peers=[
                pb.PrefixPeer(peer=peer, blocks=blocks)
                for name, blocks in decision.prefix_peers
                if (peer := self._fleet.peer(name)) is not None
            ],
            traceparent=ticket.traceparent,
        )
        attempt.ref = client.submit(submit, attempt)
        if ticket.span.is_recording():
            ticket.span.add_event(
                "submitted",
                {
                    "choice": choice.index,
                    "decode": decision.decode,
                    "prefill": decision.prefill or "",
                    "reason": decision.reason.value,
                    "predicted_ttft_ms": decision.predicted_ttft_ms,
                },
            )
        log.debug("request %s: %s", submit.request_id, decision.explanation)

    def _pledge(
        self, choice: Choice, decision: RouteDecision, leading: Mapping[str, int]
    ) -> tuple[tuple[WorkerLoad, Pledge], ...]:
        block_tokens = choice.flight.model.block_tokens
        prompt_tokens = len(choice.prompt.token_ids)
        blocks = prompt_tokens // block_tokens + 1
        by = decision.prefill or decision.decode
        to_compute = max(1, prompt_tokens - leading.get(by, 0) * block_tokens)
        own = Pledge(tokens=to_compute if decision.prefill is None else 0, blocks=blocks, decodes=True)
        pledges = [(decision.decode, own)]
        if decision.prefill is not None:
            pledges.append((decision.prefill, Pledge(tokens=to_compute, blocks=blocks, decodes=False)))
        made = []
        for worker_id, pledge in pledges:
            client = self._fleet.worker(worker_id)
            load = self._loads.get(client) if client is not None else None
            if load is not None:
                load.pledges.add(pledge)
                made.append((load, pledge))
        return tuple(made)

    def _release(self, attempt: Attempt) -> None:
        for load, pledge in attempt.pledges:
            load.pledges.discard(pledge)
        attempt.pledges = ()

    def _answered(self, attempt: Attempt) -> None:
        if attempt.answered:
            return
        attempt.answered = True
        attempt.load.unanswered -= 1
        flight = attempt.choice.flight
        self._metrics.queued(flight.model.name, time.monotonic() - flight.began_at)
        self._pump(flight.model)

    def _close(self, attempt: Attempt) -> None:
        """The attempt is over: it holds nothing here any more."""
        self._release(attempt)
        if not attempt.answered:
            attempt.answered = True
            attempt.load.unanswered -= 1
        attempt.choice.attempt = None


def _without_finish(step: pb.RequestStep) -> pb.RequestStep:
    kept = pb.RequestStep()
    kept.CopyFrom(step)
    kept.ClearField("finish")
    return kept
