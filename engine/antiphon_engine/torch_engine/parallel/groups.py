"""How ranks talk to each other: sums within a stage, activations from stage to stage. No rank waits without an end.

Ranks meet at a store that rank 0 hosts. Each then belongs to at most two gloo groups: its *stage* (the tensor ranks
that share its layers) and its *line* (the ranks of all stages that have the same place in theirs), along which
activations go. The groups are objects of their own and not torch's global one, so that a process may leave one gang
and join the next.

Every rank computes the same steps in the same order, so messages need no names: the first one sent is the first one
wanted. A stage does not wait for the next to take its activations; it does so before it sends the next ones, so one
step's activations are under way and the stage computes on.

A peer that dies closes its connections, and whoever waits for it gets `GroupBroken` at once; one that hangs is given
up at the deadline. After that a group is of no more use: the gang has to start again.
"""

from __future__ import annotations

import contextlib
import re
import socket
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from antiphon_engine.parallel import ParallelShape

_c10d: Any = distributed
"""torch's type stubs leave out what is used of it here."""


class GroupBroken(RuntimeError):
    """A rank is gone or does not answer: the replica's ranks have to be started again, all of them."""


def join_groups(
    shape: ParallelShape,
    rank: int,
    host: str,
    port: int,
    timeout_s: float,
    *,
    own_address: str = "",
    collective_timeout_s: float | None = None,
    listening: socket.socket | None = None,
) -> Groups:
    """Meet all ranks of `shape` at host:port, where rank 0 listens, and connect. Raises GroupBroken.

    `timeout_s`: how long ranks may take to come. `collective_timeout_s`: how long a step's sum or activations may take
    to come, which includes what the peer still computes; None: as `timeout_s`.
    `own_address`: where this rank's peers reach it; empty: the address from which this host reaches `host`, so loopback
    where all ranks are on one host.
    `listening`: for rank 0, a socket that is bound to `port` already; it belongs to the store afterwards.
    """
    place = shape.place(rank)
    step_timeout_s = timeout_s if collective_timeout_s is None else collective_timeout_s
    if shape.ranks == 1:
        if listening is not None:
            listening.close()
        return Groups(None, None, None, step_timeout_s)
    with _broken(f"rank {rank} could not join the {shape.ranks} ranks that meet at {host}:{port}"):
        store = _c10d.TCPStore(
            host,
            port,
            is_master=rank == 0,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=listening.detach() if listening is not None else None,
        )
        address = own_address or _own_address(host)

        def group(name: str, own: int, size: int) -> Any:
            if size == 1:
                return None
            options = _c10d.ProcessGroupGloo._Options()
            options._devices = [_c10d.ProcessGroupGloo.create_device(hostname=address)]
            options._timeout = timedelta(seconds=timeout_s)
            return _c10d.ProcessGroupGloo(_c10d.PrefixStore(name, store), own, size, options)

        stage = group(f"stage{place.stage}", place.tensor_rank, shape.tensor)
        line = group(f"line{place.tensor_rank}", place.stage, shape.pipeline)
    return Groups(store, stage, line, step_timeout_s)


class Groups:
    """One rank's groups. Used from one thread; tensors are contiguous and on the CPU."""

    def __init__(
        self,
        store: Any,
        stage: Any,
        line: Any,
        timeout_s: float,
    ) -> None:
        self._store = store  # rank 0 hosts it: it lives as long as the groups
        self._stage = stage
        self._line = line
        self._timeout = timedelta(seconds=timeout_s)
        self._sending: tuple[Any, torch.Tensor] | None = None
        self.exchanged_s = 0.0
        """Time spent in these calls so far: what the network takes, and what peers still compute meanwhile."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The stage's sum, in place: the same bits on all of its ranks. Raises GroupBroken."""
        if self._stage is not None:
            with _Exchange(self, "a sum over the stage's ranks failed"):
                self._stage.allreduce([tensor]).wait(self._timeout)
        return tensor

    def gather_first(self, tensor: torch.Tensor) -> list[torch.Tensor] | None:
        """Equal shapes of all of the stage's ranks, in their order, on its first one; None on the others."""
        if self._stage is None:
            return [tensor]
        first = self._stage.rank() == 0
        parts = [torch.empty_like(tensor) for _ in range(self._stage.size())] if first else []
        with _Exchange(self, "results of the stage's ranks could not be gathered"):
            self._stage.gather(parts, tensor, 0).wait(self._timeout)
        return parts if first else None

    def send_on(self, tensor: torch.Tensor) -> None:
        """To the next stage; waits until the one before it was taken. Raises GroupBroken."""
        line = self._line
        if line is None:
            raise ValueError("a shape of one stage has nowhere to send activations to")
        self._finish_sending()
        with _Exchange(self, "activations could not be sent to the next stage"):
            self._sending = line.send([tensor], line.rank() + 1, 0), tensor

    def receive(self, rows: int, hidden: int, dtype: torch.dtype) -> torch.Tensor:
        """[rows, hidden] from the stage before. Raises GroupBroken."""
        line = self._line
        if line is None:
            raise ValueError("a shape of one stage has nobody to receive activations from")
        tensor = torch.empty(rows, hidden, dtype=dtype)
        with _Exchange(self, "activations of the stage before did not come"):
            line.recv([tensor], line.rank() - 1, 0).wait(self._timeout)
        return tensor

    def close(self) -> None:
        """Close all connections: peers that still wait for this rank get GroupBroken. Idempotent."""
        for group in (self._stage, self._line):
            if group is not None:
                group.abort()
        self._sending = None
        self._stage = self._line = self._store = None

    def _finish_sending(self) -> None:
        if self._sending is None:
            return
        work, _ = self._sending
        with _Exchange(self, "the next stage did not take its activations"):
            work.wait(self._timeout)
        self._sending = None


def _own_address(host: str) -> str:
    """The address that this host has on its way to `host`; nothing is sent."""
    family, kind, _, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


class _Exchange:
    """One call to peers: its time counts, and its failure is `GroupBroken`. A class, as a step makes dozens of them."""

    __slots__ = ("_begun_s", "_groups", "_what")

    def __init__(self, groups: Groups, what: str) -> None:
        self._groups = groups
        self._what = what
        self._begun_s = time.perf_counter()

    def __enter__(self) -> None:
        """The time counts from the call."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._groups.exchanged_s += time.perf_counter() - self._begun_s
        if isinstance(error, RuntimeError | OSError):
            raise _group_broken(self._what, error) from error


@contextlib.contextmanager
def _broken(what: str) -> Iterator[None]:
    """torch reports lost peers, deadlines and bad addresses as RuntimeError and OSError of many texts."""
    try:
        yield
    except (RuntimeError, OSError) as error:
        raise _group_broken(what, error) from error


def _group_broken(what: str, error: Exception) -> GroupBroken:
    return GroupBroken(f"{what} ({_cause(error)}): start all ranks again")


def _cause(error: Exception) -> str:
    """The first sentence of torch's message, without the place in its sources."""
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    return re.sub(r"^\[\S*\] ", "", first).split(". ")[0]
