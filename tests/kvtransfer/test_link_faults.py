"""Pulls between real processes that are stopped and killed in the middle of one.

In all of these the question is the same: was a block counted as certain whose holder no longer meant it, and is
everything free again in the end?
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest
from antiphon_kvtransfer.transport import TransportError

from tests.support.block_keeper import REUSED
from tests.support.eventually import WAIT_S
from tests.support.kv_worker import KvWorker

CONTENTS = list(range(1, 9))
TARGETS = [20, 21, 22, 23, 10, 11, 3, 1]

needs_nixl = pytest.mark.skipif(importlib.util.find_spec("nixl_cu12") is None, reason="NIXL is not installed")
TRANSPORTS = ["tcp", pytest.param("ucx", marks=needs_nixl)]


@pytest.fixture(params=TRANSPORTS)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[KvWorker, KvWorker]]:
    """(reader, holder), wired up; the holder has CONTENTS."""
    with KvWorker("reader", request.param) as reader, KvWorker("holder", request.param) as holder:
        for block, content in enumerate(CONTENTS):
            holder.ask("store", block, content)
        reader.ask("link", holder.as_peer)
        yield reader, holder


def _pull(reader: KvWorker, holder: KvWorker) -> Future[Any]:
    return reader.start("pull", holder.as_peer, CONTENTS, TARGETS)


def _certain(pull: Future[Any]) -> int:
    """How many blocks the pull said are certain; a failed pull says none."""
    try:
        return int(pull.result(WAIT_S))
    except TransportError:
        return 0


def _everything_is_free_and_works(reader: KvWorker, holder: KvWorker) -> None:
    reader.until("kept", 0)
    holder.until("kept", 0)
    for block, content in enumerate(CONTENTS):
        holder.ask("store", block, content)
    assert _pull(reader, holder).result(WAIT_S) == len(CONTENTS)
    assert reader.ask("contents", TARGETS) == CONTENTS


def test_a_pull_brings_what_was_meant(pair: tuple[KvWorker, KvWorker]) -> None:
    reader, holder = pair
    _everything_is_free_and_works(reader, holder)
    reader.until("kept", 0)
    holder.until("kept", 0)
    ((peer, _, speed, up),) = reader.ask("statuses")
    assert (peer, up) == ("holder", True)
    assert speed > 0


@pytest.mark.parametrize("place", ["before", "after"])
def test_a_reader_stopped_past_the_pins_expiry_gets_nothing_certain(
    pair: tuple[KvWorker, KvWorker], place: str
) -> None:
    """The holder reuses the blocks meanwhile: what the reader finds then is not what it asked for."""
    reader, holder = pair
    reader.ask("arm", place)
    pull = _pull(reader, holder)
    reader.until_stopped()
    holder.until("held", 0)
    assert set(range(len(CONTENTS))) <= set(holder.ask("reuse"))
    reader.go_on()
    assert _certain(pull) == 0
    _everything_is_free_and_works(reader, holder)


def test_a_holder_stopped_past_the_pins_expiry_leaves_nothing_certain(pair: tuple[KvWorker, KvWorker]) -> None:
    """The read itself may go through while the holder stands still; its confirmation cannot."""
    reader, holder = pair
    reader.ask("shut", "before")
    pull = _pull(reader, holder)
    reader.ask("reached")
    assert reader.ask("kept") == len(CONTENTS)
    holder.stop()
    reader.ask("open")
    with pytest.raises(TransportError, match="nothing heard from worker holder"):
        pull.result(WAIT_S)
    holder.go_on()
    holder.until("held", 0)
    holder.ask("reuse")
    assert REUSED in holder.ask("contents", [0])
    _everything_is_free_and_works(reader, holder)


@pytest.mark.parametrize("place", ["before", "after"])
def test_a_killed_holder_fails_the_pull_and_frees_the_targets(pair: tuple[KvWorker, KvWorker], place: str) -> None:
    """ai-dynamo/dynamo#7489: a kill during a transfer must not leave blocks that are never freed."""
    reader, holder = pair
    reader.ask("shut", place)
    pull = _pull(reader, holder)
    reader.ask("reached")
    assert reader.ask("kept") == len(CONTENTS)
    holder.kill()
    reader.ask("open")
    assert _certain(pull) == 0
    with pytest.raises(TransportError):
        pull.result()
    reader.until("kept", 0)


def test_a_killed_reader_loses_its_pins(pair: tuple[KvWorker, KvWorker]) -> None:
    """vllm-project/vllm#50425: blocks held for a reader that is gone must not stay held."""
    reader, holder = pair
    reader.ask("shut", "before")
    _pull(reader, holder)
    reader.ask("reached")
    assert holder.ask("held") == len(CONTENTS)
    reader.kill()
    holder.until("held", 0)
    holder.until("kept", 0)


@needs_nixl
def test_targets_of_a_read_that_was_given_up_stay_kept_until_it_has_ended() -> None:
    """Over UCX's TCP a read from a stopped holder lands when the holder runs on, long after the pull has failed."""
    with KvWorker("reader", "ucx", UCX_TLS="tcp") as reader, KvWorker("holder", "ucx", UCX_TLS="tcp") as holder:
        for block, content in enumerate(CONTENTS):
            holder.ask("store", block, content)
        reader.ask("link", holder.as_peer)
        reader.ask("shut", "before")
        pull = _pull(reader, holder)
        reader.ask("reached")
        holder.stop()
        reader.ask("open")
        with pytest.raises(TransportError, match="nothing heard from worker holder"):
            pull.result(WAIT_S)
        assert reader.ask("kept") == len(TARGETS)
        assert not set(reader.ask("reuse")) & set(TARGETS)
        holder.go_on()
        _everything_is_free_and_works(reader, holder)
