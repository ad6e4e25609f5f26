"""Where things lie in Redis. Everything of one model is under one hash tag, so one script may touch all of it.

    antiphon:models                       sorted set: model -> expiry (Unix ms)
    antiphon:{MODEL}:workers              sorted set: worker id -> expiry (Unix ms)
    antiphon:{MODEL}:record:WORKER        string: the worker's record (JSON), with the record's time to live
    antiphon:{MODEL}:index:WORKER         hash: incarnation, started_at_ms, sequence, count
    antiphon:{MODEL}:blocks:WORKER        set: 16-byte block hashes
    antiphon:{MODEL}:blocks:WORKER:TOKEN  set: a part of WORKER's next set, for seconds
    antiphon:{MODEL}:model                string: the operator's record of the model (JSON), with its time to live
    antiphon:{MODEL}:news                 hash: gateway id -> its news for scaling (JSON), with a time to live
    antiphon:{MODEL}:scaling              string: what the autoscaler remembers (JSON), with a time to live
    antiphon:{MODEL}:decisions            stream: the autoscaler's decisions with their inputs, the newest ones
    antiphon:{MODEL}:events               stream: deltas, republished sets, records, withdrawals

MODEL is the model's name, percent-encoded (so braces in a name cannot move the hash tag). Every key has a time to
live that heartbeats renew: after the last worker is gone nothing is left.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import quote

MODELS_KEY = "antiphon:models"


@dataclass(frozen=True, slots=True)
class ModelKeys:
    """The keys of one model."""

    model: str

    @property
    def _prefix(self) -> str:
        return f"antiphon:{{{quote(self.model, safe='')}}}"

    @property
    def workers(self) -> str:
        return f"{self._prefix}:workers"

    @property
    def model_record(self) -> str:
        """Written by the operator only; see `model_record`."""
        return f"{self._prefix}:model"

    @property
    def news(self) -> str:
        """Written by gateways; see `antiphon_policy.scaling.news`."""
        return f"{self._prefix}:news"

    @property
    def scaling(self) -> str:
        """Written by whoever scales the model: the operator, or the supervisor of a laptop."""
        return f"{self._prefix}:scaling"

    @property
    def decisions(self) -> str:
        """As `scaling`."""
        return f"{self._prefix}:decisions"

    @property
    def events(self) -> str:
        return f"{self._prefix}:events"

    @property
    def record_prefix(self) -> str:
        """A worker id appended gives the key of its record."""
        return f"{self._prefix}:record:"

    @property
    def index_prefix(self) -> str:
        """A worker id appended gives the key of its index."""
        return f"{self._prefix}:index:"

    def record(self, worker_id: str) -> str:
        return self.record_prefix + worker_id

    def index(self, worker_id: str) -> str:
        return self.index_prefix + worker_id

    def blocks(self, worker_id: str) -> str:
        return f"{self._prefix}:blocks:{worker_id}"

    def part(self, worker_id: str, token: str) -> str:
        """`token` is unique, so it is no other worker's set, and no other writing's part."""
        return f"{self.blocks(worker_id)}:{token}"
