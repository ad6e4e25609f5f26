"""The two indexes behind one interface: events in the form in which each takes them, questions, answers.

What is prepared (`stored`, `removed`, `chain`) is not timed; what is done with it is. Ours takes packed hashes, as they
come from Redis, and cuts them up within the time; Dynamo's takes a serialised event, and parses it within the time.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from typing import Any

from benchmarks.index.workload import HASH_BYTES, WORKERS, Event, chain


class Contestant(ABC):
    @abstractmethod
    def stored(self, event: Event) -> Any:
        """The event, prepared for `apply`."""

    @abstractmethod
    def removed(self, event: Event) -> Any:
        """The same blocks leave, last first; prepared for `apply`."""

    @abstractmethod
    def apply(self, prepared: Any) -> None: ...

    @abstractmethod
    def chain(self, packed: bytes) -> Any:
        """A chain to ask for: of objects that were never asked for before."""

    @abstractmethod
    def ask(self, chain: Any) -> Any:
        """Each worker's leading blocks, as a dict. Timed."""

    @abstractmethod
    def ask_briefly(self, chain: Any) -> Any:
        """The cheapest form of the same answer. Timed."""

    @abstractmethod
    def answer(self, found: Any) -> dict[int, int]:
        """What `ask` returned, by the worker's number."""

    @abstractmethod
    def forget(self, worker: int) -> None: ...


class Ours(Contestant):
    """`antiphon_kvtransfer.mirror.BlockMirror`."""

    def __init__(self) -> None:
        from antiphon_kvtransfer._events import unpack_hashes
        from antiphon_kvtransfer.mirror import Applied, BlockMirror, Position

        self._unpack = unpack_hashes
        self._applied = Applied.APPLIED
        self.mirror = BlockMirror(max_blocks=4_000_000)
        # Names are objects of their own here, as they are in a gateway.
        self._names = [f"worker-{number}" for number in range(WORKERS)]
        self._numbers = {name: number for number, name in enumerate(self._names)}
        self._at = [0] * WORKERS
        for name in self._names:
            self.mirror.load("model", name, Position("incarnation", 0), ())

    def stored(self, event: Event) -> tuple[int, bytes, bytes]:
        return event.worker, event.packed, b""

    def removed(self, event: Event) -> tuple[int, bytes, bytes]:
        starts = range(len(event.packed) - HASH_BYTES, -1, -HASH_BYTES)
        return event.worker, b"", b"".join(event.packed[at : at + HASH_BYTES] for at in starts)

    def apply(self, prepared: tuple[int, bytes, bytes]) -> None:
        worker, stored, removed = prepared
        at = self._at[worker]
        self._at[worker] = at + 1
        applied = self.mirror.apply(
            "model",
            self._names[worker],
            incarnation="incarnation",
            previous=at,
            sequence=at + 1,
            stored=self._unpack(stored),
            removed=self._unpack(removed),
        )
        if applied is not self._applied:
            raise RuntimeError(f"worker {worker}: the delta to {at + 1} was not applied: {applied}")

    def chain(self, packed: bytes) -> list[Any]:
        return self._unpack(packed)

    def ask(self, chain: list[Any]) -> dict[str, int]:
        return self.mirror.leading_blocks("model", chain)

    def ask_briefly(self, chain: list[Any]) -> Any:
        return self.mirror.leading_groups("model", chain)

    def answer(self, found: dict[str, int]) -> dict[int, int]:
        return {self._numbers[name]: blocks for name, blocks in found.items()}

    def forget(self, worker: int) -> None:
        self.mirror.forget("model", self._names[worker])


class Dynamo(Contestant):
    """`RadixTree` of ai-dynamo-runtime, through its Python binding. Hashes are 8 bytes there."""

    def __init__(self) -> None:
        from dynamo._core import RadixTree

        self._tree = RadixTree()
        self._events = 0

    def stored(self, event: Event) -> tuple[int, bytes]:
        parent = _numbers(chain(event.chain, event.first))[-1] if event.first else None
        blocks = [{"block_hash": number, "tokens_hash": number} for number in _numbers(event.packed)]
        return event.worker, self._serialised({"stored": {"parent_hash": parent, "blocks": blocks}})

    def removed(self, event: Event) -> tuple[int, bytes]:
        return event.worker, self._serialised({"removed": {"block_hashes": _numbers(event.packed)[::-1]}})

    def apply(self, prepared: tuple[int, bytes]) -> None:
        self._tree.apply_event(*prepared)

    def chain(self, packed: bytes) -> list[int]:
        return _numbers(packed)

    def ask(self, chain: list[int]) -> Any:
        return self._tree.find_matches(chain).scores

    def ask_briefly(self, chain: list[int]) -> Any:
        return self._tree.find_matches(chain)

    def answer(self, found: dict[tuple[int, int], int]) -> dict[int, int]:
        return {worker: blocks for (worker, _), blocks in found.items()}

    def forget(self, worker: int) -> None:
        self._tree.remove_worker(worker)

    def _serialised(self, data: dict[str, Any]) -> bytes:
        self._events += 1
        return json.dumps({"event_id": self._events, "dp_rank": 0, "data": data}, separators=(",", ":")).encode()


def _numbers(packed: bytes) -> list[int]:
    """The first 63 bits of each hash."""
    starts = range(0, len(packed), HASH_BYTES)
    return [int.from_bytes(packed[at : at + 8], "little") >> 1 for at in starts]


CONTESTANTS = {"ours": Ours, "dynamo": Dynamo}
