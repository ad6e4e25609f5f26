"""Which worker serves which choice, when: the one waiting queue of this gateway.

    enqueue -> WAITING -> submitted -> accepted -> tokens ... -> ended
                  ^            |            |         |
                  +- refused --+            +---------+-- lost or failed: elsewhere, with the output so far

Workers accept only what they will start soon, so everything that waits, waits here: bounded, tenants in turn, with a
deadline. Placing is a pure decision (`antiphon_policy.routing.route`) over what is known now. Everything runs on the
event loop as plain calls without waiting; the handler of a flight withdraws it in a `finally`, and then nothing of it
is left here or on any worker.

Each choice belongs to a group of workers (`groups`), and there is one queue a group. A choice whose group has nobody
left for it moves to another one while it has no output; if that has another card, its prompt has to be made anew, and
the handler starts the whole flight again (`StartAgain`).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence

from antiphon_kvtransfer.model_record import ModelRecord
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
from antiphon_gateway.explain import Outcome, OutcomeState, RouteInputs
from antiphon_gateway.explain_span import submission_attributes
from antiphon_gateway.fleet import Fleet, can_decode
from antiphon_gateway.flight import Choice, Flight, StartAgain
from antiphon_gateway.groups import Group
from antiphon_gateway.load import Pledge, WorkerLoad
from antiphon_gateway.lobby import Lobby
from antiphon_gateway.metrics import GatewayMetrics
from antiphon_gateway.options import GatewayOptions
from antiphon_gateway.selection import Selection
from antiphon_gateway.waiting import WaitingQueue
from antiphon_gateway.worker_client import WorkerClient

log = logging.getLogger("antiphon.gateway")

MAX_FAILURES = 3
"""Workers that may fail on one choice or be lost with it: it is tried elsewhere twice. So one that breaks workers
breaks few, and one that loses its worker with a node survives being given to another on that node."""

_LINKS_FOR_S = 1.0


class Attempt:
    """One choice on one worker: the `Submission` that the worker's stream calls."""

    __slots__ = ("_dispatcher", "answered", "choice", "heard_at", "load", "outcome", "pledges", "ref")

    def __init__(self, dispatcher: Dispatcher, choice: Choice, load: WorkerLoad, outcome: Outcome) -> None:
        self.choice = choice
        self.load = load
        self.outcome = outcome
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

    def __init__(
        self,
        fleet: Fleet,
        options: GatewayOptions,
        metrics: GatewayMetrics,
        draw: Callable[[], float] = random.random,
    ) -> None:
        """`draw` gives numbers in [0, 1)."""
        self.selection = Selection(fleet, draw)
        self.lobby = Lobby()
        self._draw = draw
        self._fleet = fleet
        self._options = options
        self._metrics = metrics
        self._loads: dict[WorkerClient, WorkerLoad] = {}
        self._queues: dict[Group, WaitingQueue] = {}
        self._orders = itertools.count(1)
        self._links: Mapping[tuple[str, str], float] = {}
        self._links_at = float("-inf")
        fleet.listener = self

    @property
    def waiting(self) -> int:
        """Choices in the queues, and requests that wait for the first worker of their model."""
        return sum(len(queue) for queue in self._queues.values()) + len(self.lobby)

    @property
    def pledges(self) -> int:
        """Loads counted for requests whose worker has not said so itself yet."""
        return sum(len(load.pledges) for load in self._loads.values())

    # -- for handlers

    def enqueue(self, flight: Flight) -> None:
        """Take a flight over; it fails where nobody can serve it. Raises ApiError (429) if there is no place."""
        queue = self._queues.setdefault(flight.target.group, WaitingQueue())
        for choice in flight.choices:
            choice.order = next(self._orders)
            queue.append(choice)
        self._pump(flight.target.group)
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
        for choice in flight.choices:
            left |= self._unqueue(choice)
            attempt = choice.attempt
            if attempt is not None:
                left = True
                self._close(attempt, OutcomeState.WITHDRAWN)
                attempt.load.client.cancel(attempt.ref)
        if left:
            for group in {choice.group for choice in flight.choices}:
                self._look_again(group)
        return left

    def sweep(self, flight: Flight, now: float) -> None:
        """Fail the choices that no token came for in too long."""
        limit_s = self._options.stall_timeout_s
        for choice in flight.choices:
            attempt = choice.attempt
            if attempt is not None and now - attempt.heard_at > limit_s:
                self._close(attempt, OutcomeState.STALLED)
                attempt.load.client.cancel(attempt.ref)
                choice.fail(errors.stalled(limit_s))

    # -- FleetListener

    def worker_attached(self, client: WorkerClient) -> None:
        self._loads[client] = WorkerLoad(client)
        self._links_at = float("-inf")
        if client.attachment is not None:
            model = client.attachment.group.model
            for group in [group for group in self._queues if group.model == model]:
                self._look_again(group)
            self.lobby.call(model)

    def worker_detached(self, client: WorkerClient) -> None:
        # Its requests hear `lost` one by one, after this.
        self._loads.pop(client, None)
        self._metrics.worker_lost()
        if client.attachment is not None and client.attachment.group in self._queues:
            # Not now: its next incarnation may be about to take its place.
            asyncio.get_running_loop().call_soon(self._look_again, client.attachment.group)

    def records_changed(self) -> None:
        """Who drains, names and weights may be others: what waits looks again."""
        for group in list(self._queues):
            self._look_again(group)
        self.lobby.call_all()

    def worker_load_changed(self, client: WorkerClient) -> None:
        load = self._loads.get(client)
        if load is not None:
            load.settle(time.monotonic())
            if client.attachment is not None and client.attachment.group in self._queues:
                self._look_again(client.attachment.group)

    # -- what attempts hear

    def accepted(self, attempt: Attempt) -> None:
        now = attempt.heard_at = time.monotonic()
        attempt.outcome.accepted(now)
        self._answered(attempt)
        attempt.choice.flight.ticket.span.add_event("accepted", {"choice": attempt.choice.index})
        for _, pledge in attempt.pledges:
            pledge.accepted_at = now

    def refused(self, attempt: Attempt, reason: pb.RefusalReason.ValueType, message: str) -> None:
        choice = attempt.choice
        client = attempt.load.client
        name = pb.RefusalReason.Name(reason) if reason in pb.RefusalReason.values() else "REFUSAL_UNSPECIFIED"
        self._metrics.refused(name)
        self._close(attempt, OutcomeState.REFUSED, f"{name}: {message}")
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
            if not attempt.outcome.first_token_at:
                attempt.outcome.began(step, now)
        if not attempt.answered:
            self._answered(attempt)
        kept = choice.put(step)
        if not kept:
            self._metrics.slow_client()
            attempt.load.client.cancel(attempt.ref)
        if not kept or step.finish:
            self._close(attempt, OutcomeState.FINISHED if kept else OutcomeState.WITHDRAWN)
            attempt.outcome.finished(step)
            attempt.load.full_since = None
            self._pump(choice.group)

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
        self._close(attempt, OutcomeState.FAILED, why)
        choice.failures += 1
        choice.why_failed = why
        if attachment is not None:
            choice.excluded.add(attachment.worker_id)
        log.warning("request %s failed on a worker: %s", choice.flight.ticket.request_id, why)
        if choice.failures >= MAX_FAILURES:
            choice.fail(errors.worker_failed(why, tokens_sent=bool(choice.output)))
            return
        if choice.output:
            # It had its turn: the time that it was served does not count against it now.
            choice.flight.queued_at = time.monotonic()
        self._wait_again(choice)
        if not choice.ended:
            self._metrics.retried()

    # -- the queue

    def _wait_again(self, choice: Choice) -> None:
        flight = choice.flight
        self._queues.setdefault(choice.group, WaitingQueue()).put_back(choice)
        self._pump(choice.group)
        if choice.attempt is None and not choice.ended:
            if self.waiting > self._options.queue_size:
                self._unqueue(choice)
                choice.fail(errors.queue_full(self._options.queue_size))
            else:
                self._set_deadline(flight)

    def _set_deadline(self, flight: Flight) -> None:
        if flight.deadline_timer is None:
            flight.deadline_timer = asyncio.get_running_loop().call_later(
                max(0.0, self._remaining_s(flight)), self._deadline_passed, flight
            )

    def _remaining_s(self, flight: Flight) -> float:
        return flight.queued_at + self._options.queue_timeout_s - time.monotonic()

    def _deadline_passed(self, flight: Flight) -> None:
        flight.deadline_timer = None
        if self._remaining_s(flight) > 0:
            # It was served meanwhile, and waits anew.
            self._set_deadline(flight)
            return
        for choice in flight.choices:
            if self._unqueue(choice):
                choice.fail(errors.queue_timeout(self._options.queue_timeout_s))

    def _unqueue(self, choice: Choice) -> bool:
        """Whether it was waiting."""
        queue = self._queues.get(choice.group)
        if queue is None or not queue.remove(choice):
            return False
        if not queue:
            del self._queues[choice.group]
        return True

    def _look_again(self, group: Group) -> None:
        """Place what waits, if anybody can serve it. With nobody there it goes on waiting: a worker may come back."""
        if self.selection.decoders(group) or self.selection.choose(group.model) is not None:
            self._pump(group)

    def _pump(self, group: Group) -> None:
        """Place what waits for the group, in turn, as far as there is room; and for those that it sends some to."""
        due = [group]
        while due:
            group = due.pop()
            queue = self._queues.get(group)
            while queue:
                choice = queue.head()
                candidates = self._candidates(choice)
                if candidates and not self._place(choice, candidates):
                    break
                queue.pop()
                if not candidates and self._move(choice):
                    self._queues.setdefault(choice.group, WaitingQueue()).put_back(choice)
                    due.append(choice.group)
            if queue is not None and not queue:
                del self._queues[group]

    def _place(self, choice: Choice, candidates: Sequence[WorkerLoad]) -> bool:
        """Submit the choice. False: it has to wait."""
        if not any(load.open for load in candidates):
            return False
        model = choice.flight.model
        prompt = choice.prompt
        leading = self._fleet.leading_blocks(model, prompt.chain)
        snapshot = RoutingSnapshot(workers=self._views(choice, leading), link_gigabytes_per_s=self._link_speeds())
        request = RouteRequest(
            prompt_tokens=len(prompt.token_ids) + len(choice.output),
            block_tokens=model.block_tokens,
            block_bytes=model.block_bytes,
            max_tokens=choice.sampling.max_tokens - len(choice.output),
        )
        draw = self._draw()
        try:
            decision = route(snapshot, request, draw)
        except NoWorker as error:
            log.debug("request %s has to wait: %s", choice.flight.ticket.request_id, error)
            return False
        held = {view.worker_id: view.leading_blocks for view in snapshot.workers if view.leading_blocks}
        inputs = RouteInputs(request, draw, snapshot.workers, held, snapshot.link_gigabytes_per_s, snapshot.workload)
        self._submit(choice, decision, leading, inputs)
        return True

    def _move(self, choice: Choice) -> bool:
        """The choice's group has nobody for it: give it another one. False: it has ended, one way or another."""
        flight = choice.flight
        target = flight.target
        record = self._fleet.catalogue.record(target.group.model)
        nobody = no_worker(target.name, record)
        if not choice.output:
            group = self.selection.choose(target.group.model, choice.excluded)
            if group == choice.group:
                group = None
            if group is not None and group.card_digest == target.group.card_digest:
                choice.group = group
                return True
            asleep = group is None and record is not None and record.waking
            if flight.untouched and (group is not None or asleep):
                choice.fail(StartAgain(nobody, choice.failures))
                return False
        if choice.why_failed:
            choice.fail(errors.worker_failed(choice.why_failed, tokens_sent=bool(choice.output)))
        else:
            choice.fail(nobody)
        return False

    def _candidates(self, choice: Choice) -> list[WorkerLoad]:
        """Workers that may decode the choice, if not now then later."""
        return [
            self._loads[client]
            for client in self.selection.decoders(choice.group, choice.excluded)
            if client in self._loads
        ]

    def _views(self, choice: Choice, leading: Mapping[str, int]) -> tuple[WorkerView, ...]:
        views = []
        for client in self.selection.usable(choice.group):
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
            links = {
                (worker_id, link.peer_worker_id): link.gigabytes_per_s
                for worker_id, client in self._fleet.workers().items()
                for link in client.queue.links
                if link.up
            }
            # One table for as long as nothing changes: what explains old decisions refers to it.
            if links != self._links:
                self._links = links
        return self._links

    # -- attempts

    def _submit(self, choice: Choice, decision: RouteDecision, leading: Mapping[str, int], inputs: RouteInputs) -> None:
        client = self._fleet.worker(decision.decode)
        if client is None:
            raise AssertionError(f"the route leads to {decision.decode}, which was not in the snapshot")
        load = self._loads[client]
        choice.submits += 1
        record = choice.flight.trail.submitted(choice, inputs, decision)
        attempt = Attempt(self, choice, load, record.outcome)
        choice.attempt = attempt
        choice.continued = bool(choice.output)
        load.unanswered += 1
        attempt.pledges = self._pledge(choice, decision, leading)
        ticket = choice.flight.ticket
        prefill = (decision.prefill, *decision.prefill_fallbacks) if decision.prefill is not None else ()
        submit = pb.Submit(
            request_id=f"{ticket.request_id}-{choice.index}.{choice.submits}",
            prompt_token_ids=choice.prompt.token_ids,
            output_token_ids=choice.output,
            sampling=choice.sampling,
            cache_salt=choice.flight.target.salt,
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
            ticket.span.add_event("submitted", submission_attributes(record))
        log.debug("request %s: %s", submit.request_id, decision.explanation)

    def _pledge(
        self, choice: Choice, decision: RouteDecision, leading: Mapping[str, int]
    ) -> tuple[tuple[WorkerLoad, Pledge], ...]:
        block_tokens = choice.flight.model.block_tokens
        prompt_tokens = len(choice.prompt.token_ids) + len(choice.output)
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
        choice = attempt.choice
        self._metrics.queued(choice.flight.model.name, time.monotonic() - choice.flight.queued_at)
        self._pump(choice.group)

    def _close(self, attempt: Attempt, state: OutcomeState, why: str = "") -> None:
        """The attempt is over: it holds nothing here any more."""
        outcome = attempt.outcome
        outcome.end(state, time.monotonic(), why, len(attempt.choice.output), attempt.heard_at)
        self._release(attempt)
        if not attempt.answered:
            attempt.answered = True
            attempt.load.unanswered -= 1
        attempt.choice.attempt = None


def no_worker(name: str, record: ModelRecord | None) -> errors.ApiError:
    """`name` as the client said it; `record` of its model, if there is one."""
    if record is None:
        return errors.no_worker(name)
    detail = "it is starting" if record.waking else ""
    return errors.no_worker(name, detail, retry_after_s=record.retry_after_s)


def _without_finish(step: pb.RequestStep) -> pb.RequestStep:
    kept = pb.RequestStep()
    kept.CopyFrom(step)
    kept.ClearField("finish")
    return kept
