"""Nobody is woken before all kinds are listed; a listing that comes again is noticed."""

from __future__ import annotations

from antiphon_operator.runtime.caches import Caches
from antiphon_operator.runtime.feed import Feed

from tests.support.kube_objects import changed, model, owned


def test_models_are_woken_together_once_all_is_listed() -> None:
    woken: list[str] = []
    caches = Caches()
    feed = Feed(caches, woken.append, lambda: None)
    qwen, llama = model(), model("llama")
    caches.put("Model", qwen)
    feed.happened("Model", None, llama)
    assert not feed.complete
    assert woken == []
    caches.put("StatefulSet", owned(qwen, "StatefulSet", "a"))
    feed.begin()
    assert feed.complete
    assert sorted(woken) == ["chat/llama", "chat/qwen"]
    woken.clear()
    feed.happened("Model", None, llama)
    assert woken == [], "it was heard of before"
    feed.happened("StatefulSet", "ADDED", owned(llama, "StatefulSet", "b"))
    assert woken == ["chat/llama"]


def test_what_is_listed_anew_is_told() -> None:
    relisted: list[bool] = []
    caches = Caches()
    feed = Feed(caches, lambda key: None, lambda: relisted.append(True))
    qwen = model()
    child = owned(qwen, "StatefulSet", "a")
    for kind, one in (("Model", qwen), ("StatefulSet", child)):
        caches.put(kind, one)
    feed.begin()
    for kind, one in (("Model", qwen), ("StatefulSet", child)):
        feed.happened(kind, None, one)
    assert relisted == [], "the first listing is none anew"
    feed.happened("StatefulSet", None, child)
    assert relisted == [True]


def test_a_deleted_object_wakes_its_model() -> None:
    woken: list[str] = []
    caches = Caches()
    feed = Feed(caches, woken.append, lambda: None)
    qwen = model()
    child = owned(qwen, "StatefulSet", "a")
    caches.put("Model", qwen)
    caches.put("StatefulSet", child)
    feed.begin()
    woken.clear()
    feed.happened("StatefulSet", "DELETED", changed(child))
    assert woken == ["chat/qwen"]
    assert caches.children(qwen) == ()
