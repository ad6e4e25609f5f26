"""The process that is Ray's driver for one life of the gang: `python -m antiphon_engine.gang.placer`.

It joins the cluster, asks for a placement group, says what is lacking while there is no room, starts one actor for each
rank, and then only watches: an actor whose method ends is a rank that is gone, and Ray knows why. When the worker goes
(its pipe closes), so does this process, and with Ray's driver Ray ends the actors and removes the group.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
import time
from typing import Any

from antiphon_engine.gang import environment
from antiphon_engine.gang.helper_events import Failed, NoPlace, Placed, Progress, RankEnded, Unschedulable
from antiphon_engine.gang.helper_side import Parent
from antiphon_engine.gang.placement import NodeRoom, Wanted, why_unschedulable
from antiphon_engine.gang.start import PlacerStart, RankStart

NAMESPACE = "antiphon"
FAILURE = 1
UNAVAILABLE = 4
_CONNECT_S = 60.0
_SAY_EVERY_S = 10.0
_LOOK_EVERY_S = 0.5
_END_S = 5.0


def main() -> None:
    parent = Parent()
    start = parent.task(PlacerStart)
    # Before ray is asked: a Ray that cannot reach its head tries for ever, and cannot be interrupted.
    connected = threading.Event()
    threading.Thread(target=_give_up, args=(parent, connected, start), name="deadline", daemon=True).start()
    code = 0
    try:
        _connect(start)
        connected.set()
        _run(parent, start)
    except _PlaceError as error:
        parent.tell(NoPlace(str(error)))
        code = 1
    except BaseException as error:  # noqa: BLE001 - told to the worker, which ends the gang
        parent.tell(Failed(f"Ray cannot place the ranks: {type(error).__name__}: {error}", FAILURE))
        code = 1
    # Ray's shutdown may hang; its servers end the job of a driver that is gone all the same.
    threading.Timer(_END_S, os._exit, (code,)).start()
    _disconnect()
    os._exit(code)


class _PlaceError(Exception):
    pass


def _connect(start: PlacerStart) -> None:
    environment.prepare(os.environ, start.token_file, start.node_ip)
    import ray

    connect: Any = ray.init
    connect(
        address=start.address,
        namespace=NAMESPACE,
        log_to_driver=False,
        logging_level="ERROR",
        **({"_node_ip_address": start.node_ip} if start.node_ip else {}),
    )
    # Ray has set its own; the worker decides when this process ends.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def _disconnect() -> None:
    import ray

    ray.shutdown()


def _give_up(parent: Parent, connected: threading.Event, start: PlacerStart) -> None:
    ends_at = time.monotonic() + _CONNECT_S
    while not connected.wait(0.2):
        if parent.gone.is_set():
            os._exit(0)
        if time.monotonic() >= ends_at:
            parent.tell(
                Failed(
                    f"the Ray cluster {start.address} did not answer within {_CONNECT_S:.0f} s: see that it runs, that "
                    "a node of it runs on this machine, and that the token is its",
                    UNAVAILABLE,
                )
            )
            os._exit(1)


def _run(parent: Parent, start: PlacerStart) -> None:
    import ray
    from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

    shape = start.ranks[0].shape
    wanted = Wanted(shape.pipeline, shape.tensor, start.device, start.spread_stages)
    group = placement_group(wanted.bundles(), strategy=wanted.strategy)
    try:
        if not _placed(parent, start, wanted, group):
            return
        nodes = placement_group_table(group)["bundles_to_node_id"]
        parent.tell(Placed([str(nodes[stage]) for stage in range(wanted.stages)]))
        running = {_start_rank(rank, start.device, group): rank.rank for rank in start.ranks}
        while running and not parent.gone.is_set():
            done, _ = ray.wait(list(running), num_returns=1, timeout=_LOOK_EVERY_S)
            for ref in done:
                parent.tell(RankEnded(running.pop(ref), _why_ended(ref)))
        parent.gone.wait()
    finally:
        remove_placement_group(group)


def _placed(parent: Parent, start: PlacerStart, wanted: Wanted, group: Any) -> bool:
    """Wait for room. False: told to end. Raises _PlaceError."""
    began = time.monotonic()
    say_at = began + _SAY_EVERY_S
    told = ""
    while not group.wait(_LOOK_EVERY_S):
        if parent.gone.is_set():
            return False
        rooms = _rooms(start.device)
        sentence = why_unschedulable(wanted, rooms) or ""
        if not _is_pending(group):
            continue  # placed by now: what it has taken itself would look like a lack
        now = time.monotonic()
        never = why_unschedulable(wanted, [dataclasses.replace(room, free=room.total) for room in rooms])
        if never and not start.nodes_may_come:
            raise _PlaceError(never)
        if now - began >= start.place_s:
            why = sentence or "Ray does not place them although there is room"
            raise _PlaceError(f"{why} (waited {start.place_s:.0f} s)")
        if sentence != told:
            parent.tell(Unschedulable(sentence))
            told = sentence
        elif now >= say_at:
            left_s = start.place_s - (now - began)
            parent.tell(Progress(f"the ranks wait for a place, for {left_s:.0f} s more: {sentence or 'Ray is at it'}"))
            say_at = now + _SAY_EVERY_S
    if told:
        parent.tell(Unschedulable(""))
    return True


def _is_pending(group: Any) -> bool:
    from ray.util.placement_group import placement_group_table

    return bool(placement_group_table(group)["state"] == "PENDING")


def _rooms(device: str) -> list[NodeRoom]:
    import ray
    from ray._private import state

    # Neither has types.
    free_of_nodes: Any = state.available_resources_per_node
    all_nodes: Any = ray.nodes
    free = free_of_nodes()
    return [
        NodeRoom(
            name=str(node["NodeManagerAddress"]),
            total=int(node["Resources"].get(device, 0)),
            free=int(free.get(node["NodeID"], {}).get(device, 0)),
        )
        for node in all_nodes()
        if node["Alive"]
    ]


def _start_rank(rank: RankStart, device: str, group: Any) -> Any:
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    from antiphon_engine.gang.rank import RankProcess

    stage = rank.shape.place(rank.rank).stage
    remote: Any = ray.remote
    actor = remote(RankProcess).options(
        num_cpus=1 if device == "CPU" else 0,
        num_gpus=1 if device == "GPU" else 0,
        max_restarts=0,
        max_task_retries=0,
        scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=stage),
    )
    handle = actor.remote(rank)
    _keep_alive.append(handle)
    return handle.run.remote()


_keep_alive: list[Any] = []
"""Ray ends an actor when its last handle goes."""


def _why_ended(ref: Any) -> str:
    import ray

    try:
        ray.get(ref)
    except Exception as error:  # noqa: BLE001 - of many types, and the text is what counts
        return _first_sentences(str(error))
    return "its process ended"


def _first_sentences(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " ".join(lines[:1] + lines[-1:] if len(lines) > 1 else lines)[:600] or "its process ended"


if __name__ == "__main__":
    main()
