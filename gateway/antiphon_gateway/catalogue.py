"""What the operator says of its Models, as requests need it: the names that clients use, and who drains. Pure.

A record's names win over what workers call their model. A name that two records have stays with the older Model; where
neither says how old it is, with the one that had it here first, else with the first by key, so that all gateways
agree as far as they have seen the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from antiphon_kvtransfer.model_record import ModelRecord

_NOBODY: frozenset[str] = frozenset()


class Catalogue:
    """The records there are. Owned by the fleet, which updates it."""

    def __init__(self) -> None:
        self._records: Mapping[str, ModelRecord] = {}
        self._keys: dict[str, str] = {}
        self._draining: dict[str, frozenset[str]] = {}

    def update(self, records: Mapping[str, ModelRecord]) -> None:
        """These are all records now, by model."""
        claims: dict[str, list[ModelRecord]] = {}
        for record in records.values():
            for name in record.names:
                claims.setdefault(name, []).append(record)
        self._keys = {name: self._owner(name, claimants) for name, claimants in claims.items()}
        self._records = records
        self._draining = {key: frozenset(record.draining) for key, record in records.items() if record.draining}

    def _owner(self, name: str, claimants: list[ModelRecord]) -> str:
        holder = self._keys.get(name)
        return min(claimants, key=lambda one: (one.created_at_ms, one.model != holder, one.model)).model

    def record(self, model: str) -> ModelRecord | None:
        return self._records.get(model)

    def key_of(self, name: str) -> str | None:
        """The model that clients mean by `name`; None: no record has that name."""
        return self._keys.get(name)

    def names(self) -> Iterator[tuple[str, ModelRecord]]:
        """All names, each with the record of the model that has it."""
        for name, key in self._keys.items():
            yield name, self._records[key]

    def draining(self, model: str) -> frozenset[str]:
        """Ids of the model's workers that get no new requests."""
        return self._draining.get(model, _NOBODY)

    def __iter__(self) -> Iterator[ModelRecord]:
        return iter(self._records.values())
