"""What people are told of the links between workers."""

from __future__ import annotations

from antiphon.link_report import Link, WorkerStatus, describe, is_complete

PREFILL = WorkerStatus("prefill-0", "prefill")


def decode(*links: Link) -> WorkerStatus:
    return WorkerStatus("decode-0", "decode", links)


def test_the_transport_in_use_and_its_slowest_link() -> None:
    other = WorkerStatus("decode-1", "decode", (Link("prefill-0", "ucx", 2.04, True),))
    statuses = [PREFILL, decode(Link("prefill-0", "ucx", 4.26, True)), other]
    assert is_complete(statuses)
    assert describe(statuses) == "KV blocks move over ucx (2.0 GB/s measured)"


def test_a_fallen_back_link_is_seen() -> None:
    statuses = [
        PREFILL,
        decode(Link("prefill-0", "ucx", 4.26, True)),
        WorkerStatus("decode-1", "decode", (Link("prefill-0", "tcp", 1.0, True),)),
    ]
    assert describe(statuses) == "KV blocks move over tcp (1.0 GB/s measured) and ucx (4.3 GB/s measured)"


def test_missing_links_are_told() -> None:
    down = Link("prefill-0", "ucx", 0.0, False, "wiring up")
    assert not is_complete([PREFILL, decode(down)])
    assert describe([PREFILL, decode(down)]).startswith("no link between the workers yet")
    second = WorkerStatus("prefill-1", "prefill")
    assert describe([PREFILL, second, decode(Link("prefill-0", "ucx", 1.0, True))]).endswith("not all links are up yet")


def test_links_among_decode_workers_do_not_count() -> None:
    assert not is_complete([PREFILL, decode(Link("decode-1", "ucx", 1.0, True))])
