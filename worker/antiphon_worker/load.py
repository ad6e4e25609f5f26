"""What a worker tells gateways of its load, with every step and every heartbeat."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from antiphon_engine.interface import Engine, Load, StepResult, StepSample
from antiphon_kvtransfer.links import LinkStatus
from antiphon_policy.latency import StepModel, StepModelFit
from antiphon_proto.worker_pb2 import KeptBack, LinkState, QueueState, StepCoefficients

from antiphon_worker.role import CurrentRole

SLOW_PARTS_S = 0.5
"""The step model and the links are written anew at most so often."""


class LoadReport:
    """Makes QueueState messages: at most one for each step, shared by all gateways."""

    def __init__(
        self,
        engine: Engine,
        role: CurrentRole,
        *,
        prior: StepModel,
        links: Callable[[], Sequence[LinkStatus]],
        draining: Callable[[], bool],
    ) -> None:
        self.gateways = 0
        """Attached now. Set by who serves their streams, as is `kept_back`."""
        self.kept_back: dict[str, tuple[KeptBack, float]] = {}
        """By gateway, what it keeps back, and when it said so (monotonic)."""
        self._engine = engine
        self._role = role
        self._links = links
        self._draining = draining
        self._fit = StepModelFit(prior)
        self._of_step: tuple[Load, int, QueueState] | None = None
        """With the version of the role that it tells."""
        self._last_load: Load | None = None
        self._slow_parts: tuple[StepCoefficients, list[LinkState]] = (StepCoefficients(), [])
        self._slow_parts_at = float("-inf")

    def observe(self, result: StepResult) -> None:
        """Take what a step brought."""
        self._last_load = result.load
        sample = result.sample
        if sample is not None:
            self._learn(sample)

    def learn_first(self, samples: Iterable[StepSample]) -> None:
        """Take what the engine measured of itself: these say nothing of how well real steps are predicted."""
        for sample in samples:
            self._learn(sample)
        self._fit.forget_errors()

    @property
    def fit(self) -> StepModelFit:
        """What was learnt. To be read, not fed."""
        return self._fit

    def _learn(self, sample: StepSample) -> None:
        self._fit.observe(
            sample.duration_ms,
            new_tokens=sample.new_tokens,
            token_context=sample.token_context,
            sequences=sample.sequences,
            kv_tokens=sample.kv_tokens,
        )

    def of_last_step(self) -> QueueState:
        """The state as of the last step; made once for all who ask before the next."""
        load = self._last_load
        if load is None:
            return self.now()
        of_step, version = self._of_step, self._role.version
        is_told = of_step is not None and of_step[0] is load and of_step[1] == version
        if of_step is None or not is_told or of_step[2].draining != self._draining():
            of_step = self._of_step = (load, version, self.state_of(load))
        return of_step[2]

    def now(self) -> QueueState:
        """The state at this moment."""
        return self.state_of(self._engine.load())

    def load(self) -> Load:
        """The same before it is a message."""
        return self._engine.load()

    def state_of(self, load: Load) -> QueueState:
        now = time.monotonic()
        if now - self._slow_parts_at >= SLOW_PARTS_S:
            self._slow_parts_at = now
            self._slow_parts = (_coefficients(self._fit), [_link_state(link) for link in self._links()])
        coefficients, links = self._slow_parts
        state = QueueState(
            running=load.running,
            waiting=load.waiting,
            waiting_tokens=load.waiting_tokens,
            kv_tokens=load.kv_tokens,
            free_blocks=load.free_blocks,
            total_blocks=load.total_blocks,
            draining=self._draining(),
            step_model=coefficients,
            links=links,
            role_version=self._role.version,
            role=self._role.wire,
            held_blocks=load.retained_blocks,
            chunk_tokens=load.chunk_tokens,
            max_sequences=load.max_sequences,
            empty_blocks=load.empty_blocks,
            gateways=self.gateways,
        )
        for gateway_id, (kept, said_at) in self.kept_back.items():
            told = state.kept_back.add()
            told.CopyFrom(kept)
            told.gateway_id = gateway_id
            told.said_ms_ago = int((now - said_at) * 1e3)
        return state


def _coefficients(fit: StepModelFit) -> StepCoefficients:
    model = fit.model()
    return StepCoefficients(
        base_ms=model.base_ms,
        per_new_token_ms=model.per_new_token_ms,
        per_token_context_ms=model.per_token_context_ms,
        per_sequence_ms=model.per_sequence_ms,
        per_kv_token_ms=model.per_kv_token_ms,
        samples=fit.samples,
        relative_error=fit.relative_error,
    )


def _link_state(link: LinkStatus) -> LinkState:
    return LinkState(
        peer_worker_id=link.peer_worker_id,
        transport=link.transport,
        gigabytes_per_s=link.gigabytes_per_s,
        up=link.up,
        detail=link.detail,
    )
