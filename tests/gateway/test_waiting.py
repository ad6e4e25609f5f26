"""When what waits for a group is looked at. (In which order: tests/policy/test_admission.py.)"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from antiphon_gateway.waiting import MAX_HELD, MAX_PLANNED, MAX_STARTED, GroupQueue
from antiphon_policy.admission import Entry
from antiphon_policy.routing import NoWorker, NoWorkerReason

from tests.support.eventually import eventually


class NoOthers:
    """Stands in for `RoomOfAll` where there is one gateway."""

    others_tokens = 0

    def heard(self, load: Any, now: float) -> bool:
        return False

    def leaves_ms(self, load: Any, entry: Any, now: float) -> float:
        return 0.0

    def sent(self, load: Any) -> None: ...

    def full(self, load: Any, now: float) -> None: ...

    def tell(self, line: Any, held_for: Any, now: float) -> None: ...

    def tell_before_room(self, line: Any, load: Any, now: float) -> None: ...


class OneWorker:
    """Stands in for `Placing`: one worker that holds everything back for so long."""

    def __init__(self) -> None:
        self.hold_ms = 0.0
        self.full = False
        self.there = True
        self.plans: list[str] = []
        self.freed = False
        self.reserved = 0
        self.looks = 0
        self.room = NoOthers()

    def plan(self, choice: Any, now: float) -> Any:
        self.plans.append(choice.name)
        if self.full or not self.there:
            raise NoWorker(NoWorkerReason.NO_DECODE_WORKER, "none")
        return SimpleNamespace(
            decision=SimpleNamespace(cost=None),
            inputs=SimpleNamespace(request=SimpleNamespace(prompt_tokens=100)),
            uncached_tokens=100,
            hold_ms=self.hold_ms,
            prefiller=self,
        )

    def due_ms(self, choice: Any, uncached_tokens: int) -> None:
        return None

    def anybody(self, excluded: Any = ()) -> bool:
        return self.there

    def became_free(self, load: Any, now: float) -> bool:
        return self.freed

    def refresh(self, links: Any, now: float, waiting_tokens: int) -> None:
        self.looks += 1

    def put_changed(self, now: float) -> None: ...

    def reserve(self, plan: Any) -> None:
        self.reserved += 1

    def holds_still(self, plan: Any, now: float) -> float:
        return self.hold_ms

    def changed(self, load: Any) -> None: ...

    def matched_tokens(self, choice: Any) -> int:
        return 0

    def tokens_per_ms(self, now: float) -> float:
        return 1.0


class Scene:
    def __init__(self) -> None:
        self.worker = OneWorker()
        self.sent: list[str] = []
        self.gone: list[str] = []
        placing: Any = self.worker
        self.queue = GroupQueue(
            placing,
            submit=lambda entry, plan: self.sent.append(str(entry.key.name)),  # type: ignore[attr-defined]
            nobody=lambda choice: self.gone.append(str(choice.name)),  # type: ignore[attr-defined]
            served=lambda: False,
            links=dict,
        )

    def offer(self, *names: str) -> None:
        for name in names:
            choice: Any = SimpleNamespace(
                name=name, excluded=set(), prompt=SimpleNamespace(token_ids=[0] * 100), output=[]
            )
            # A namespace is equal to another one with the same content; the queue wants things that can be keys.
            self.queue.offer(Entry(key=_Key(choice), arrived_ms=0.0, uncached_tokens=100))  # type: ignore[arg-type]


class _Key:
    def __init__(self, choice: Any) -> None:
        self.__dict__.update(vars(choice))


async def test_what_comes_while_nothing_waits_is_placed_at_once() -> None:
    scene = Scene()
    scene.offer("a", "b")
    assert scene.sent == ["a", "b"]
    assert scene.worker.plans == ["a", "b"]
    assert len(scene.queue) == 0


async def test_what_is_held_goes_when_its_worker_has_room() -> None:
    scene = Scene()
    scene.worker.hold_ms = 60_000.0
    scene.offer("a", "b")
    assert scene.sent == []
    load: Any = None
    scene.worker.hold_ms = 0.0
    scene.queue.changed(load)
    scene.worker.freed = True
    scene.queue.changed(load)
    await eventually(lambda: scene.sent == ["a", "b"])


async def test_what_is_held_goes_when_its_worker_should_be_done_if_nobody_says_anything() -> None:
    scene = Scene()
    scene.worker.hold_ms = 5.0
    scene.offer("a")
    scene.worker.hold_ms = 0.0
    await eventually(lambda: scene.sent == ["a"])
    assert scene.worker.plans == ["a", "a"]


async def test_a_look_costs_the_same_however_much_waits() -> None:
    """vllm-project/production-stack#448: a thousand that wait must not be routed anew with every report."""
    scene = Scene()
    scene.worker.hold_ms = 60_000.0
    scene.offer(*(str(at) for at in range(1000)))
    scene.worker.plans.clear()
    scene.worker.reserved = 0
    scene.queue.look()
    assert len(scene.worker.plans) == MAX_PLANNED
    # The next looks plan others: those before them are held still. So far and no further.
    for _ in range(2 * MAX_HELD // MAX_PLANNED):
        scene.worker.reserved = 0
        scene.queue.look()
    assert scene.worker.reserved == MAX_HELD
    assert len(set(scene.worker.plans)) <= MAX_HELD
    scene.worker.full = True
    scene.worker.hold_ms = 0.0
    scene.worker.plans.clear()
    scene.queue.look()
    assert len(scene.worker.plans) == 1
    scene.queue.close()


async def test_a_look_that_starts_much_makes_way_and_goes_on_without_being_asked() -> None:
    """The rest is placed although nobody says anything more, by as few looks as that takes."""
    scene = Scene()
    scene.worker.hold_ms = 60_000.0
    names = [str(at) for at in range(5 * MAX_STARTED + 1)]
    scene.offer(*names)
    scene.worker.hold_ms = 0.0
    scene.worker.looks = 0
    scene.queue.look()
    assert scene.sent == names[:MAX_STARTED]
    await eventually(lambda: scene.sent == names)
    assert scene.worker.looks == 6


async def test_what_nobody_can_serve_is_told_so_and_with_no_worker_at_all_it_waits() -> None:
    scene = Scene()
    scene.worker.full = True
    scene.offer("waits")
    scene.worker.there = False
    scene.queue.look()
    assert (scene.gone, len(scene.queue)) == ([], 1)
    for entry in scene.queue.line:
        scene.queue.remove(entry.key)
    scene.offer("comes")
    assert (scene.gone, len(scene.queue)) == (["comes"], 0)
    scene.queue.close()
