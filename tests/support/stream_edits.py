"""A man in the middle of the event stream: readers are held while events that they have not read are rewritten."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tests.support.membership import until
from tests.support.tcp_proxy import TcpProxy

Entry = tuple[bytes, dict[bytes, bytes]]
Edit = Callable[[Any, str, list[Entry]], None]
"""Called with a client, the stream's key, and consecutive deltas of one worker, oldest first, that nobody has read."""

_LEFT_ALONE = 2
"""A request that waited at the server when it was held is answered with the first event after that."""
_EDITED = 4
_DEADLINE_S = 60.0


async def edit_unread_events(readers: TcpProxy, client: Any, stream: str, edit: Edit) -> None:
    """`readers`: how they reach the server. Something has to be writing deltas."""
    readers.hold_requests()
    held_at = client.xinfo_stream(stream)["last-generated-id"].decode()

    def unread() -> list[Entry]:
        by_worker: dict[bytes, list[Entry]] = {}
        for entry in client.xrange(stream, f"({held_at}"):
            if entry[1][b"kind"] == b"delta":
                by_worker.setdefault(entry[1][b"worker"], []).append(entry)
        return max(by_worker.values(), key=len, default=[])

    await until(lambda: len(unread()) > _LEFT_ALONE + _EDITED, deadline_s=_DEADLINE_S)
    edit(client, stream, unread()[_LEFT_ALONE : _LEFT_ALONE + _EDITED])
    readers.release()


def drop(client: Any, stream: str, deltas: list[Entry]) -> None:
    assert client.xdel(stream, deltas[0][0], deltas[2][0]) == 2


def duplicate(client: Any, stream: str, deltas: list[Entry]) -> None:
    for _, fields in deltas + deltas[:2]:
        client.xadd(stream, fields)


def reorder(client: Any, stream: str, deltas: list[Entry]) -> None:
    """Each pair in the other order, and all of it behind what came later."""
    with client.pipeline(transaction=True) as pipeline:
        for entry_id, _ in deltas:
            pipeline.xdel(stream, entry_id)
        for at in (1, 0, 3, 2):
            pipeline.xadd(stream, deltas[at][1])
        pipeline.execute()


def trim(client: Any, stream: str, deltas: list[Entry]) -> None:
    assert client.xtrim(stream, maxlen=0, approximate=False) > len(deltas)


def delete(client: Any, stream: str, deltas: list[Entry]) -> None:
    """A stream that begins anew; its ids go on from the clock, so they alone do not tell."""
    client.delete(stream)


EDITS: Mapping[str, Edit] = {"dropped": drop, "duplicated": duplicate, "reordered": reorder, "trimmed": trim}
