"""`antiphon worker --ray-join HOST:PORT`: a machine that gives its devices to a replica whose worker runs elsewhere.

Nothing of the engine runs in this process; the ranks that Ray places here are the driver's. It ends when it is told to,
or when the head goes: then whoever started it (a kubelet) starts it again, and it waits for the next head.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from antiphon_engine.gang import environment
from antiphon_engine.gang.cluster import CLOSE_S, LISTEN_S, NODE_MODULE, START_S, await_node
from antiphon_engine.gang.errors import GangStartError, GangStopped
from antiphon_engine.gang.helper import Helper, HelperEnded
from antiphon_engine.gang.helper_events import Failed
from antiphon_engine.gang.node import NodeTask

UNAVAILABLE = 4


def join_cluster(
    head: str,
    *,
    node_ip: str,
    token_file: str,
    node_ranks: int,
    join_s: float,
    progress: Callable[[str], None],
    joined: Callable[[], None],
    stop: threading.Event,
) -> None:
    """Join the head, and stay until `stop` is set. Raises GangStartError: no head came, or it went.

    `node_ranks`: ranks that this machine takes; 0: one a core.
    """
    task = NodeTask(
        ip=node_ip,
        port=0,
        join=head,
        join_s=join_s,
        cpus=node_ranks or environment.usable_cores(),
        gpus=None,
        token_file=token_file,
        own_token=False,
    )
    node = Helper(NODE_MODULE, task)
    try:
        with contextlib.suppress(GangStopped):
            await_node(node, progress, stop, join_s + START_S)
            progress(f"joined the head {head}: ranks may be placed here")
            joined()
        while not stop.is_set():
            try:
                event = node.next(LISTEN_S)
            except HelperEnded as error:
                raise GangStartError(str(error), UNAVAILABLE) from error
            if isinstance(event, Failed):
                raise GangStartError(event.message, event.exit_code)
    finally:
        node.close(CLOSE_S)
