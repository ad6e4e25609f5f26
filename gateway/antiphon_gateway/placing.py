"""Where a choice of one group would go now: the group's workers as a table, kept true.

The table (`antiphon_policy.worker_table`) is asked; what changed since is put into it just before. A worker's figures
also change by time alone (`load`): the workers that have prompts to compute and said so a while ago are put in again
in turn, a few for each look. What is *reserved* for a choice that is held counts for those looked at after it, until
the next look begins.

Owned by the dispatcher. Plain calls; nothing here waits or sends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping

import msgspec
from antiphon_policy.routing import RouteDecision, RouteRequest, WorkerRole
from antiphon_policy.worker_table import WorkerTable
from antiphon_policy.workload import WorkloadMeter

from antiphon_gateway.explain import RouteInputs
from antiphon_gateway.fleet import Fleet, can_decode
from antiphon_gateway.flight import Choice
from antiphon_gateway.groups import Group
from antiphon_gateway.holding_shared import RoomOfAll
from antiphon_gateway.load import Pledge, WorkerLoad
from antiphon_gateway.round_robin import RoundRobin
from antiphon_gateway.sessions import Sessions

AGED_S = 0.02
"""Figures older than that are put in again, where time changes them."""

AGED_IN_A_LOOK = 4

_RATE_FOR_S = 1.0


class Plan(msgspec.Struct, frozen=True, gc=False):
    """A decision for one choice, with what it was made from."""

    decision: RouteDecision
    inputs: RouteInputs
    prefiller: WorkerLoad
    """Who computes the prompt."""
    uncached_tokens: int
    """That it will compute."""
    hold_ms: float
    """0: it should start now."""


class Placing:
    """See the module."""

    def __init__(
        self, group: Group, fleet: Fleet, sessions: Sessions, draw: Callable[[], float], *, in_turn: bool = False
    ) -> None:
        """`in_turn`: round robin instead of the cheapest."""
        self.group = group
        self._fleet = fleet
        self._sessions = sessions
        self._draw = draw
        self._table = WorkerTable()
        self._choose = RoundRobin(self._table).choose if in_turn else self._table.choose
        self._loads: dict[str, WorkerLoad] = {}
        self._changed: set[WorkerLoad] = set()
        """Those whose figures the table does not have yet."""
        self._ageing: deque[tuple[float, WorkerLoad]] = deque()
        """Workers with prompts to compute, and when they were put in last, longest ago first."""
        self._busy: set[WorkerLoad] = set()
        """Those in `_ageing`."""
        self._reserved: dict[str, tuple[int, int]] = {}
        """Worker id -> tokens and answers of those held in this look."""
        self._rate: tuple[float, float] = (0.0, float("-inf"))
        self._computing = 0
        """How many compute prompts as a rule."""
        self._meter = WorkloadMeter()
        self.room = RoomOfAll()
        """Of the workers that others use too."""

    def __len__(self) -> int:
        return len(self._loads)

    # -- who there is

    def joined(self, load: WorkerLoad) -> None:
        self._loads[load.worker_id] = load
        self._changed.add(load)
        self._recount()

    def left(self, load: WorkerLoad) -> None:
        if self._loads.get(load.worker_id) is load:
            del self._loads[load.worker_id]
            self._table.remove(load.worker_id)
            self.room.gone(load)
        self._changed.discard(load)
        self._recount()

    def changed(self, load: WorkerLoad) -> None:
        """Its figures are others. It may have left."""
        if self._loads.get(load.worker_id) is load:
            self._changed.add(load)

    def role_changed(self, load: WorkerLoad) -> None:
        """It does something else from now on."""
        self.changed(load)
        self._recount()

    def all_changed(self) -> None:
        """What the operator says of them may be different."""
        self._changed.update(self._loads.values())

    def anybody(self, excluded: Collection[str] = ()) -> bool:
        """Whether some worker may decode, if not now then later."""
        draining = self._fleet.catalogue.draining(self.group.model)
        return any(
            can_decode(load.role)
            and worker_id not in draining
            and worker_id not in excluded
            and not load.client.queue.draining
            for worker_id, load in self._loads.items()
        )

    def became_free(self, load: WorkerLoad, now: float) -> bool:
        """Whether a worker has room that it had not when the table was last made true."""
        if load.worker_id not in self._table:
            return True
        seen = self._table.view(load.worker_id)
        if not load.open:
            return False
        if not seen.may_decode and can_decode(load.role):
            return True
        if load.role is WorkerRole.DECODE:
            return False
        horizon = load.horizon_ms
        return load.queue_ms(now) <= horizon < load.ms_of(seen.queued_tokens)

    def tokens_per_ms(self, now: float) -> float:
        """Prompt tokens that the group computes, by its workers' own step models."""
        rate, at = self._rate
        if now - at > _RATE_FOR_S:
            rate = sum(load.tokens_per_ms for load in self._prefillers())
            self._rate = (rate, now)
        return rate

    def _prefillers(self) -> Collection[WorkerLoad]:
        """Those that compute prompts as a rule."""
        loads = self._loads.values()
        return [load for load in loads if load.role is WorkerRole.PREFILL] or loads

    # -- decisions

    def refresh(self, links: Mapping[tuple[str, str], float], now: float, waiting_tokens: int = 0) -> None:
        """Make the table true: a look begins, with so many uncached tokens in this gateway's line."""
        self._table.links = links
        record = self._fleet.catalogue.record(self.group.model)
        self._table.workload = self._meter.workload(
            waiting_tokens=(waiting_tokens + self.room.others_tokens) / max(1, self._computing),
            ttft_limit_ms=record.ttft_limit_ms(self._meter.uncached_tokens) if record is not None else None,
            evicted_reuse=self._fleet.evicted_reuse(self.group.model),
        )
        if self._reserved:
            self._changed.update(self._loads[name] for name in self._reserved if name in self._loads)
            self._reserved.clear()
        ageing = self._ageing
        for _ in range(AGED_IN_A_LOOK):
            if not ageing or now - ageing[0][0] < AGED_S:
                break
            _, load = ageing.popleft()
            self._busy.discard(load)
            if self._loads.get(load.worker_id) is load:
                self._changed.add(load)
        self.put_changed(now)

    def put_changed(self, now: float) -> None:
        """The table has all that is known now. A look ends with it, for `became_free` to see what the look did."""
        if self._changed:
            draining = self._fleet.catalogue.draining(self.group.model)
            for load in self._changed:
                self._put(load, now, draining=load.worker_id in draining)
            self._changed.clear()

    def plan(self, choice: Choice, now: float) -> Plan:
        """Raises NoWorker. After `refresh`."""
        model = choice.flight.model
        leading = self._leading(choice)
        request = self._request(choice, leading, now)
        draw = self._draw()
        table = self._table
        self.put_changed(now)
        decision = self._choose(request, leading, draw, choice.excluded)
        inputs = RouteInputs(
            request, draw, tuple(table.views()), leading, table.links, table.workload, tuple(choice.excluded)
        )
        blocks = decision.prefix_peers[0][1] if decision.prefix_peers else decision.prefill_blocks
        uncached = max(1, request.prompt_tokens - min(blocks, decision.usable_blocks) * model.block_tokens)
        prefiller = self._loads[decision.prefill or decision.decode]
        queue_ms = decision.cost.queue_ms if decision.cost is not None else 0.0
        # An answer that has begun goes on at once: its client sees every moment of waiting.
        held_ms = 0.0 if choice.output else prefiller.keeps_back(queue_ms, now)
        return Plan(decision, inputs, prefiller, uncached, held_ms)

    def holds_still(self, plan: Plan, now: float) -> float:
        """For how many milliseconds a choice that was held by this plan is held now; 0: it has to be planned anew."""
        decision, prefiller = plan.decision, plan.prefiller
        if self._loads.get(prefiller.worker_id) is not prefiller or decision.decode not in self._loads:
            return 0.0
        tokens = prefiller.queued_tokens(now) + self._reserved.get(prefiller.worker_id, (0, 0))[0]
        return prefiller.keeps_back(prefiller.ms_of(tokens), now)

    def matched_tokens(self, choice: Choice) -> int:
        """Of what it has so far, those that the best worker holds."""
        return max(self._leading(choice).values(), default=0) * choice.flight.model.block_tokens

    def due_ms(self, choice: Choice, uncached_tokens: int) -> float | None:
        """When its first token is due, in monotonic milliseconds, if so much of the prompt has to be computed; None: no
        promise, or it has come."""
        if choice.output:
            return None
        flight = choice.flight
        record = self._fleet.catalogue.record(self.group.model)
        limit_ms = record.ttft_limit_ms(uncached_tokens) if record is not None else None
        timeout_s = flight.ticket.wishes.timeout_s
        if timeout_s is not None:
            limit_ms = timeout_s * 1e3 if limit_ms is None else min(limit_ms, timeout_s * 1e3)
        return None if limit_ms is None else flight.began_at * 1e3 + limit_ms

    def reserve(self, plan: Plan) -> None:
        """Whoever is looked at later in this look finds it there."""
        decision = plan.decision
        self._reserve(decision.prefill or decision.decode, tokens=plan.uncached_tokens)
        self._reserve(decision.decode, running=1)

    def pledge(self, plan: Plan, now: float) -> tuple[tuple[WorkerLoad, Pledge], ...]:
        """What the plan adds to its workers counts from now on; the table has it before the next plan."""
        request, decision = plan.inputs.request, plan.decision
        blocks = request.prompt_tokens // max(1, request.block_tokens) + 1
        tokens = plan.uncached_tokens
        own = Pledge(tokens if decision.prefill is None else 0, blocks, decodes=True, made_at=now)
        made = [(self._loads[decision.decode], own)]
        if decision.prefill is not None:
            made.append((plan.prefiller, Pledge(tokens, blocks, decodes=False, made_at=now)))
        for load, pledge in made:
            load.pledge(pledge)
            self._changed.add(load)
        return tuple(made)

    # -- what requests are like

    def started(self, choice: Choice, plan: Plan) -> None:
        self._meter.started(plan.uncached_tokens)
        request = plan.inputs.request
        known_blocks = (request.prompt_tokens - plan.uncached_tokens) // max(1, request.block_tokens)
        self._fleet.asked(choice.flight.model, choice.chain, known_blocks)

    def ended(self, output_tokens: int) -> None:
        self._meter.ended(output_tokens)

    # -- inside

    def _leading(self, choice: Choice) -> Mapping[str, int]:
        """Worker id -> leading blocks that it holds of what the choice has so far."""
        leading = self._fleet.leading_blocks(choice.flight.model, choice.chain)
        if choice.prompt_at:
            blocks = max(leading.get(choice.prompt_at, 0), len(choice.prompt.chain))
            return {**leading, choice.prompt_at: blocks}
        return leading

    def _request(self, choice: Choice, leading: Mapping[str, int], now: float) -> RouteRequest:
        flight = choice.flight
        ticket, model = flight.ticket, flight.model
        record = self._fleet.catalogue.record(self.group.model)
        ttft_limit_ms = tpot_limit_ms = None
        if record is not None:
            tpot_limit_ms = record.tpot_p95_ms
            # Of what the best worker leaves to compute: a promise is no longer for going where less is cached.
            cached_tokens = max(leading.values(), default=0) * model.block_tokens
            limit_ms = record.ttft_limit_ms(max(1, len(choice.prompt.token_ids) - cached_tokens))
            if limit_ms is not None and not choice.output:
                ttft_limit_ms = limit_ms - (now - flight.began_at) * 1e3
        return RouteRequest(
            prompt_tokens=len(choice.prompt.token_ids) + len(choice.output),
            block_tokens=model.block_tokens,
            block_bytes=model.block_bytes,
            max_tokens=choice.sampling.max_tokens - len(choice.output),
            ttft_limit_ms=ttft_limit_ms,
            tpot_limit_ms=tpot_limit_ms,
            hint=self._sessions.last(self.group.model, ticket.tenant, ticket.wishes.session),
        )

    def _recount(self) -> None:
        self._computing = len(self._prefillers())
        self._rate = (0.0, float("-inf"))

    def _reserve(self, worker_id: str, *, tokens: int = 0, running: int = 0) -> None:
        had_tokens, had_running = self._reserved.get(worker_id, (0, 0))
        self._reserved[worker_id] = (had_tokens + tokens, had_running + running)
        self._changed.add(self._loads[worker_id])

    def _put(self, load: WorkerLoad, now: float, *, draining: bool) -> None:
        view = load.view(now, draining=draining)
        if view.queued_tokens and load not in self._busy and load.role is not WorkerRole.DECODE:
            self._busy.add(load)
            self._ageing.append((now, load))
        reserved = self._reserved.get(load.worker_id)
        if reserved is not None:
            tokens, running = reserved
            view = msgspec.structs.replace(
                view, queued_tokens=view.queued_tokens + tokens, running=view.running + running
            )
        self._table.put(view)
