"""Which worker serves which choice, when: the one waiting queue of this gateway.

    enqueue -> WAITING -> submitted -> accepted -> tokens ... -> ended
                  ^            |            |         |
                  +- refused --+            +---------+-- given back, lost or failed: elsewhere, with the output so far

Workers are given only what they will start soon, so everything that waits, waits here: bounded, fair, with a deadline
(`waiting`, docs/admission.md). Where it goes is a pure decision over what is known now (`placing`). Everything runs on
the event loop as plain calls without waiting; the handler of a flight withdraws it in a `finally`, and then nothing of
it is left here or on any worker.

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
from collections.abc import Callable, Iterable, Mapping, Sequence

from antiphon_kvtransfer.model_record import ModelRecord
from antiphon_policy.admission import Entry
from antiphon_policy.holding import retry_after_s
from antiphon_proto import worker_pb2 as pb

from antiphon_gateway import errors
from antiphon_gateway.attempt import Attempt
from antiphon_gateway.explain import OutcomeState
from antiphon_gateway.explain_span import submission_attributes
from antiphon_gateway.fleet import Fleet, can_decode
from antiphon_gateway.flight import Choice, Flight, StartAgain
from antiphon_gateway.groups import Group
from antiphon_gateway.links import Links
from antiphon_gateway.load import WorkerLoad
from antiphon_gateway.lobby import Lobby
from antiphon_gateway.metrics import GatewayMetrics, MoveReason
from antiphon_gateway.options import GatewayOptions
from antiphon_gateway.placing import Placing, Plan
from antiphon_gateway.selection import Selection
from antiphon_gateway.sessions import Sessions
from antiphon_gateway.submission import submission
from antiphon_gateway.waiting import GroupQueue
from antiphon_gateway.worker_client import WorkerClient

log = logging.getLogger("antiphon.gateway")

MAX_FAILURES = 3
"""Workers that may fail on one choice or be lost with it: it is tried elsewhere twice. So one that breaks workers
breaks few, and one that loses its worker with a node survives being given to another on that node."""

MAX_MOVES = 8
"""How often a choice goes on at another worker, for whatever reason: a long answer that meets each step of a rollout
moves a few times; one that moves more often meets workers that do not stay."""

_GIVEN_UP = (pb.FINISH_ERROR, pb.FINISH_CANCELLED, pb.FINISH_MOVED)
"""Ends of an attempt that do not end the answer."""


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
        self._queues: dict[Group, GroupQueue] = {}
        """Of groups that have workers, or something that waits."""
        self._sessions = Sessions()
        self._orders = itertools.count(1)
        self._links = Links(fleet)
        fleet.listener = self

    @property
    def waiting(self) -> int:
        """Choices in the queues, and requests that wait for the first worker of their model."""
        return sum(len(queue) for queue in self._queues.values()) + len(self.lobby)

    @property
    def pledges(self) -> int:
        """Loads counted for requests whose worker has not said so itself yet."""
        return sum(len(load.pledges) for load in self._loads.values())

    @property
    def queues(self) -> Mapping[Group, GroupQueue]:
        """What waits, by group. To be looked at only."""
        return self._queues

    def loads(self) -> Iterable[WorkerLoad]:
        """Of all workers with a standing stream. To be looked at only."""
        return self._loads.values()

    # -- for handlers

    def enqueue(self, flight: Flight) -> None:
        """Take a flight over; it fails where nobody can serve it. Raises ApiError (429) if there is no place."""
        for choice in flight.choices:
            choice.order = next(self._orders)
            if choice.leader is None:
                self._offer(choice)
        waiting = [
            choice for choice in flight.choices if choice.attempt is None and choice.leader is None and not choice.ended
        ]
        if waiting:
            self._make_room(flight)
            self._refuse_hopeless(flight, waiting)
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
                self._changed(attempt.load)
        return left

    def sweep(self, flight: Flight, now: float) -> None:
        """Fail the choices that no token came for in too long."""
        limit_s = self._options.stall_timeout_s
        for choice in flight.choices:
            attempt = choice.attempt
            if attempt is not None and now - attempt.heard_at > limit_s:
                self._close(attempt, OutcomeState.STALLED)
                attempt.load.client.cancel(attempt.ref)
                self._changed(attempt.load)
                choice.fail(errors.stalled(limit_s))

    # -- FleetListener

    def worker_attached(self, client: WorkerClient) -> None:
        load = self._loads[client] = WorkerLoad(
            client, time.monotonic(), confirmed_in_s=2 * self._options.lost_after_ms / 1e3
        )
        self._links.forget()
        self._queue(load.group).placing.joined(load)
        for group, queue in self._queues.items():
            if group.model == load.group.model:
                queue.look_soon()
        self.lobby.call(load.group.model)

    def worker_detached(self, client: WorkerClient) -> None:
        # Its requests hear `lost` one by one, after this. And what waits looks again later, not now: its next
        # incarnation may be about to take its place.
        load = self._loads.pop(client, None)
        self._metrics.worker_lost()
        if load is not None:
            queue = self._queue(load.group)
            queue.placing.left(load)
            queue.look_soon()
            self._forget_unused(load.group)

    def records_changed(self) -> None:
        """Who drains, names and weights may be others: what waits looks again."""
        for queue in self._queues.values():
            queue.placing.all_changed()
            queue.look_soon()
        self.lobby.call_all()

    def worker_load_changed(self, client: WorkerClient) -> None:
        load = self._loads.get(client)
        if load is not None:
            load.settle(time.monotonic())
            self._changed(load)

    def worker_role_changed(self, client: WorkerClient) -> None:
        load = self._loads.get(client)
        if load is None or client.attachment is None:
            return
        load.takes_role(client.attachment.role)
        self._queue(load.group).placing.role_changed(load)
        for group, queue in self._queues.items():
            if group.model == load.group.model:
                queue.look_soon()
        self.lobby.call(load.group.model)

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
            # One that has said already that it is a prefill worker now is not asked anyway, and may come back.
            if reason != pb.REFUSAL_WRONG_ROLE or can_decode(attempt.load.role):
                choice.excluded.add(client.attachment.worker_id)
        self._changed(attempt.load)
        self._wait_again(attempt)

    def stepped(self, attempt: Attempt, step: pb.RequestStep) -> None:
        choice = attempt.choice
        now = time.monotonic()
        if step.finish in _GIVEN_UP:
            if step.token_ids or step.text:
                attempt.heard_at = choice.last_token_at = now
                choice.put(_without_finish(step))
            why = step.error or "it gave the request up without a word"
            if step.finish == pb.FINISH_MOVED:
                self.given_back(attempt, why)
            else:
                self.failed(attempt, why, MoveReason.FAILED)
            return
        attempt.heard_at = now
        tokens = len(step.token_ids)
        if tokens:
            self._measure(choice, now, tokens)
            if attempt.pledges:
                self._release(attempt)
            if not attempt.outcome.first_token_at:
                attempt.outcome.began(step, now)
                if not choice.continued:
                    # Routing does not reckon with what a worker that drains still gives to whoever goes on.
                    measured_ms = (now - attempt.sent_at) * 1e3
                    self._metrics.predicted(choice.flight.model.name, attempt.predicted_ttft_ms, measured_ms)
        if not attempt.answered:
            self._answered(attempt)
        if choice.flight.followers and (step.token_ids or step.finish):
            self._follow(choice, step.usage.prefill_worker_id or attempt.load.worker_id)
        kept = choice.put(step)
        enough = choice.flight.enough
        if enough is not None and kept and not step.finish and enough(choice.index, step.text):
            step = pb.RequestStep(finish=pb.FINISH_STOP)
            choice.put(step)
            attempt.load.client.cancel(attempt.ref)
        if not kept:
            self._metrics.slow_client()
            attempt.load.client.cancel(attempt.ref)
        if not kept or step.finish:
            self._close(attempt, OutcomeState.FINISHED if kept else OutcomeState.WITHDRAWN)
            attempt.outcome.finished(step)
            attempt.load.full_since = None
            self._queue(choice.group).placing.ended(len(choice.output))
            self._changed(attempt.load)

    def _follow(self, leader: Choice, prompt_at: str) -> None:
        """The leader's prompt is computed: its other choices go now, and find it where it is. Its flight was let in, so
        they wait however much does."""
        flight = leader.flight
        following = [choice for choice in flight.followers if choice.leader is leader]
        if not following:
            return
        flight.followers = [choice for choice in flight.followers if choice.leader is not leader]
        flight.queued_at = time.monotonic()
        for choice in following:
            choice.leader = None
            choice.prompt_at = prompt_at
            if not choice.ended:
                self._offer(choice)
        if any(choice.attempt is None and not choice.ended for choice in following):
            self._set_deadline(flight)

    def _measure(self, choice: Choice, now: float, tokens: int) -> None:
        flight = choice.flight
        previous, choice.last_token_at = choice.last_token_at, now
        if choice.completion_tokens:
            # From its last token, on whichever worker: a move is what the client sees of it.
            flight.metrics.inter_token_s.observe((now - previous) / tokens, tokens)
            return
        choice.first_token_at = now
        if not flight.has_token:
            flight.has_token = True
            flight.ticket.span.add_event("first token")
            flight.metrics.first_token_s.observe(now - flight.began_at)

    def given_back(self, attempt: Attempt, why: str) -> None:
        """The worker will not end the answer, and says so in good order: no fault of it."""
        self._close(attempt, OutcomeState.MOVED, why)
        self._changed(attempt.load)
        attempt.choice.moved_from = attempt.load.worker_id
        log.info("request %s goes on elsewhere: %s", attempt.choice.flight.ticket.request_id, why)
        self._go_on(attempt, why, MoveReason.DRAINED)

    def failed(self, attempt: Attempt, why: str, reason: MoveReason) -> None:
        """The worker failed on the request, or was lost with it."""
        choice = attempt.choice
        attachment = attempt.load.client.attachment
        self._close(attempt, OutcomeState.FAILED, why)
        if why.startswith(errors.GRAMMAR_FAILED) and choice.sampling.HasField("grammar"):
            # On any other worker it would end the same way.
            choice.fail(errors.grammar_failed(why))
            return
        if why.startswith(errors.NOTHING_LEFT):
            choice.fail(errors.nothing_left(why))
            return
        choice.failures += 1
        choice.why_failed = why
        if attachment is not None:
            choice.excluded.add(attachment.worker_id)
        log.warning("request %s failed on a worker: %s", choice.flight.ticket.request_id, why)
        if choice.failures >= MAX_FAILURES:
            choice.fail(errors.worker_failed(why, tokens_sent=bool(choice.output)))
            return
        self._go_on(attempt, why, reason)

    def _go_on(self, attempt: Attempt, why: str, reason: MoveReason) -> None:
        """Another worker is to take over what this one had."""
        choice = attempt.choice
        if choice.ended:
            return
        choice.moves += 1
        if choice.moves > MAX_MOVES:
            choice.fail(errors.moved_too_often(MAX_MOVES, why))
            return
        choice.why_moved = why
        if choice.output:
            # It had its turn: the time that it was served does not count against it now.
            choice.flight.queued_at = time.monotonic()
        self._wait_again(attempt)
        if not choice.ended:
            self._metrics.moved(reason)
            if reason is not MoveReason.DRAINED:
                self._metrics.retried()

    # -- the queue

    def _queue(self, group: Group) -> GroupQueue:
        queue = self._queues.get(group)
        if queue is None:
            queue = self._queues[group] = GroupQueue(
                Placing(group, self._fleet, self._sessions, self._draw, in_turn=self._options.routing == "round-robin"),
                submit=self._submit,
                nobody=self._nobody,
                served=lambda: self.selection.choose(group.model) is not None,
                links=self._links.gigabytes_per_s,
            )
        return queue

    def _forget_unused(self, group: Group) -> None:
        queue = self._queues.get(group)
        if queue is not None and not len(queue) and not len(queue.placing):
            queue.close()
            del self._queues[group]

    def _changed(self, load: WorkerLoad) -> None:
        """Its figures are others: whoever waits looks again if it has room now."""
        queue = self._queues.get(load.group)
        if queue is not None:
            queue.changed(load)

    def _offer(self, choice: Choice) -> None:
        """Place it, or let it wait."""
        flight = choice.flight
        queue = self._queue(choice.group)
        tokens = len(choice.prompt.token_ids)
        entry = Entry(
            key=choice,
            arrived_ms=flight.began_at * 1e3,
            uncached_tokens=tokens,
            tenant=flight.ticket.tenant,
            priority=flight.priority,
            due_ms=queue.placing.due_ms(choice, tokens),
            place=choice.order,
        )
        queue.offer(entry)

    def _wait_again(self, attempt: Attempt) -> None:
        choice, entry = attempt.choice, attempt.entry
        if choice.output:
            # It was promised a first token, and that came.
            entry.due_ms = None
        self._queue(choice.group).offer(entry)
        if choice.attempt is None and not choice.ended:
            # An answer that has begun is no new load: it waits however much does.
            if self._is_full() and not choice.output:
                self._unqueue(choice)
                choice.fail(self._queue_full(choice.group))
            else:
                self._set_deadline(choice.flight)

    # -- bounds

    def _is_full(self) -> bool:
        if self.waiting > self._options.queue_size:
            return True
        # One alone always may wait, however long it is.
        tokens = sum(queue.line.waiting_tokens for queue in self._queues.values())
        return tokens > self._options.queue_tokens and self.waiting > 1

    def _make_room(self, flight: Flight) -> None:
        """Refuse the newest of whoever takes most of the room, for the weight of its class. Raises ApiError (429) if
        that is the flight itself: so a tenant that floods the queue does not keep the others out."""
        while self._is_full():
            crowds = [
                crowd
                for queue in self._queues.values()
                if (crowd := queue.line.crowding(self._options.queue_size, self._options.queue_tokens)) is not None
            ]
            victim = max(crowds, key=lambda crowd: crowd[0])[1].key if crowds else None
            if victim is None or victim.flight is flight or victim.output or victim.group not in self._queues:
                self.withdraw(flight)
                raise self._queue_full(flight.target.group)
            self._unqueue(victim)
            victim.fail(self._queue_full(victim.group))

    def _refuse_hopeless(self, flight: Flight, waiting: Sequence[Choice]) -> None:
        """Raises ApiError (429) where the client gives up before its turn can come. Only clients that said when: an
        operator's limit is no reason to trust a prediction that far."""
        timeout_s = flight.ticket.wishes.timeout_s
        if timeout_s is None:
            return
        left_ms = (flight.began_at + timeout_s - time.monotonic()) * 1e3
        predicted_ms = max(self._queue(choice.group).predicted_ms(choice) for choice in waiting)
        if predicted_ms > left_ms:
            self.withdraw(flight)
            retry_s = self._retry_after_s(flight.target.group)
            raise errors.deadline_unreachable(predicted_ms / 1e3, timeout_s, retry_after_s=retry_s)

    def _queue_full(self, group: Group) -> errors.ApiError:
        return errors.queue_full(self._options.queue_size, retry_after_s=self._retry_after_s(group))

    def _retry_after_s(self, group: Group) -> int:
        """When half of what waits will have been computed, by the workers' own step models."""
        queue = self._queue(group)
        rate = queue.placing.tokens_per_ms(time.monotonic())
        return retry_after_s(queue.line.waiting_tokens / 2, rate, self._draw())

    def _set_deadline(self, flight: Flight) -> None:
        if flight.deadline_timer is None:
            flight.deadline_timer = asyncio.get_running_loop().call_later(
                max(0.0, self._remaining_s(flight)), self._deadline_passed, flight
            )

    def _remaining_s(self, flight: Flight) -> float:
        ends_at = flight.queued_at + self._options.queue_timeout_s
        timeout_s = flight.ticket.wishes.timeout_s
        if timeout_s is not None:
            ends_at = min(ends_at, flight.began_at + timeout_s)
        return ends_at - time.monotonic()

    def _deadline_passed(self, flight: Flight) -> None:
        flight.deadline_timer = None
        if self._remaining_s(flight) > 0:
            # It was served meanwhile, and waits anew.
            self._set_deadline(flight)
            return
        for choice in flight.choices:
            if self._unqueue(choice):
                timeout_s = min(self._options.queue_timeout_s, flight.ticket.wishes.timeout_s or float("inf"))
                choice.fail(errors.queue_timeout(timeout_s, retry_after_s=self._retry_after_s(choice.group)))

    def _unqueue(self, choice: Choice) -> bool:
        """Whether it was waiting."""
        queue = self._queues.get(choice.group)
        if queue is None or not queue.remove(choice):
            return False
        self._forget_unused(choice.group)
        return True

    def _nobody(self, choice: Choice) -> None:
        """No worker of its group can serve it any more."""
        if self._move(choice):
            self._offer(choice)

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
        elif choice.output:
            choice.fail(errors.cut_off(choice.why_moved))
        else:
            choice.fail(nobody)
        return False

    # -- attempts

    def _submit(self, entry: Entry[Choice], plan: Plan) -> None:
        choice, decision = entry.key, plan.decision
        client = self._fleet.worker(decision.decode)
        if client is None:
            raise AssertionError(f"the route leads to {decision.decode}, which was not in the table")
        load = self._loads[client]
        choice.submits += 1
        record = choice.flight.trail.submitted(choice, plan.inputs, decision)
        attempt = Attempt(self, entry, load, record.outcome)
        attempt.predicted_ttft_ms = decision.predicted_ttft_ms
        choice.attempt = attempt
        choice.continued = bool(choice.output)
        load.unanswered += 1
        placing = self._queue(choice.group).placing
        attempt.pledges = placing.pledge(plan, attempt.sent_at)
        placing.started(choice, plan)
        ticket = choice.flight.ticket
        submit = submission(choice, plan, self._fleet)
        attempt.ref = client.submit(submit, choice.prompt.encoded, attempt)
        self._sessions.went(
            choice.group.model, ticket.tenant, ticket.wishes.session, (decision.decode, decision.prefill or "")
        )
        if ticket.span.is_recording():
            ticket.span.add_event("submitted", submission_attributes(record))
        if log.isEnabledFor(logging.DEBUG):
            log.debug("request %s: %s", submit.request_id, decision.explanation)

    def _release(self, attempt: Attempt) -> None:
        for load, pledge in attempt.pledges:
            load.release(pledge)
            self._changed(load)
        attempt.pledges = ()

    def _answered(self, attempt: Attempt) -> None:
        if attempt.answered:
            return
        now = time.monotonic()
        attempt.answered = True
        attempt.load.answered(now - attempt.sent_at)
        choice = attempt.choice
        self._metrics.queued(choice.flight.model.name, now - choice.flight.queued_at)
        self._changed(attempt.load)

    def _close(self, attempt: Attempt, state: OutcomeState, why: str = "") -> None:
        """The attempt is over: it holds nothing here any more."""
        outcome = attempt.outcome
        outcome.end(state, time.monotonic(), why, len(attempt.choice.output), attempt.heard_at)
        self._release(attempt)
        if not attempt.answered:
            attempt.answered = True
            attempt.load.unanswered -= 1
        attempt.choice.attempt = None


def no_worker(name: str, record: ModelRecord | None, *, waited_s: float = 0.0) -> errors.ApiError:
    """`name` as the client said it; `record` of its model, if there is one. `waited_s`: for its first worker."""
    if record is None:
        return errors.no_worker(name)
    detail = "it is starting" if record.waking else ""
    if detail and waited_s:
        detail += f", and this request has waited {waited_s:g} s for that"
    return errors.no_worker(name, detail, retry_after_s=record.retry_after_s)


def _without_finish(step: pb.RequestStep) -> pb.RequestStep:
    kept = pb.RequestStep()
    kept.CopyFrom(step)
    kept.ClearField("finish")
    return kept
