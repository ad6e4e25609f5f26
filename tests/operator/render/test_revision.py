"""What a revision is named by, what it keeps, and that replicas are made of that alone."""

from __future__ import annotations

import copy
import dataclasses
import json
from typing import Any

import pytest
from antiphon_operator.render.replica import stateful_set
from antiphon_operator.render.revision import (
    RevisionDataError,
    controller_revision,
    pod_templates,
    read_controller_revision,
    revision_of,
    templates_digest,
)
from antiphon_operator.render.weights import Weights

from tests.support.rendered import CONTEXT, SPECS, model_of, render, weights_of

NEWER = dataclasses.replace(CONTEXT, version="0.2.0", worker_image="antiphon-worker:0.2.0")


def name_of(spec: dict[str, Any], update: str = "") -> str:
    model = model_of(spec)
    return revision_of(model, weights_of(model), update)


def test_a_revision_is_six_hex_digits() -> None:
    assert len(bytes.fromhex(name_of(SPECS["demo"]))) == 3


@pytest.mark.parametrize(
    "change",
    [
        {"decode": {"replicas": 7}},
        {"sla": {"ttft": {"p95": "500ms"}}},
        {"names": ["another"]},
        {"autoscaling": {"mode": "Enforce"}},
        {"rollout": {"surge": 2}},
        {"kvCache": {"isolation": "Shared"}},
        {"accelerator": {"resource": "none"}},
    ],
)
def test_what_pods_are_not_made_of_changes_neither_revision_nor_templates(change: dict[str, Any]) -> None:
    plain, changed = render(SPECS["demo"]), render({**SPECS["demo"], **change})
    assert changed.data.revision == plain.data.revision
    assert changed.data.digest == plain.data.digest


@pytest.mark.parametrize(
    "change",
    [
        {"engine": {"image": "worker:2"}},
        {"maxContextTokens": 4096},
        {"prefill": {}},
        {"decode": {"podTemplate": {"spec": {"priorityClassName": "high"}}}},
        {"kvCache": {"blockTokens": 16}},
    ],
)
def test_what_pods_are_made_of_changes_the_revision(change: dict[str, Any]) -> None:
    assert name_of({**SPECS["demo"], **change}) != name_of(SPECS["demo"])


def test_the_same_amount_in_other_words_is_the_same_revision_with_the_same_pods() -> None:
    def asking(memory: str, cpu: int | str) -> dict[str, Any]:
        return {**SPECS["demo"], "decode": {"resources": {"requests": {"memory": memory, "cpu": cpu}}}}

    one, other = render(asking("8Gi", 2)), render(asking("8192Mi", "2000m"))
    assert (one.data.revision, one.data.digest) == (other.data.revision, other.data.digest)


def test_another_commit_or_the_update_annotation_makes_a_new_revision() -> None:
    model = model_of(SPECS["ephemeral"])
    weights = weights_of(model)
    assert weights is not None
    moved = Weights(revision="f" * 40, size_bytes=weights.size_bytes, path=weights.path)
    names = {revision_of(model, weights), revision_of(model, moved), revision_of(model, weights, "2024-06-01")}
    assert len(names) == 3


def test_a_newer_operator_finds_the_same_revision_and_sees_that_it_would_render_otherwise() -> None:
    old, new = render(SPECS["demo"]), render(SPECS["demo"], context=NEWER)
    assert new.data.revision == old.data.revision
    assert new.data.digest != old.data.digest
    assert (old.data.rendered_by, old.data.image) == ("0.1.0", "antiphon-worker:0.1.0")


def test_a_newer_operator_makes_replicas_of_an_old_revision_from_what_it_kept() -> None:
    """The Model has moved on meanwhile: its spec must not shine through."""
    old = render(SPECS["gang"])
    moved_on = model_of({"source": {"uri": "demo"}, "decode": {"replicas": 5}})
    again = stateful_set(moved_on, "decode", old.data, "zz99")
    expected = copy.deepcopy(old.of_kind("StatefulSet")[0])
    text = json.dumps(expected).replace("ab12", "zz99")
    assert again == json.loads(text)


def test_nothing_but_the_replicas_slots_differs_between_replicas_and_the_revision_has_none() -> None:
    rendered = render(SPECS["gang"])
    assert "ab12" not in json.dumps(rendered.of_kind("ControllerRevision")[0])
    labels = rendered.pod()["metadata"]["labels"]
    selector = rendered.of_kind("StatefulSet")[0]["spec"]["selector"]["matchLabels"]
    assert selector.items() <= labels.items()
    assert selector["antiphon.dev/replica"] == "ab12"


def test_notes_of_the_operator_stand_on_the_set_and_not_on_its_pods() -> None:
    rendered = render(SPECS["demo"])
    noted = stateful_set(rendered.model, "decode", rendered.data, "ab12", {"antiphon.dev/draining-since": "now"})
    assert noted["metadata"]["annotations"] == {"antiphon.dev/draining-since": "now"}
    assert noted["spec"] == rendered.of_kind("StatefulSet")[0]["spec"]


@pytest.mark.parametrize("name", SPECS)
def test_what_is_kept_is_read_back(name: str) -> None:
    model = model_of(SPECS[name])
    weights = weights_of(model)
    templates = pod_templates(model, "abcdef", CONTEXT, weights)
    stored = json.loads(json.dumps(controller_revision(model, "abcdef", 3, templates, CONTEXT, weights)))
    data = read_controller_revision(stored)
    assert (data.revision, data.ordinal, data.weights) == ("abcdef", 3, weights)
    assert data.templates == templates
    assert data.digest == templates_digest(templates)
    assert {role: pool.pods for role, pool in data.pools.items()} == {pool.role: pool.pods for pool in model.pools}


@pytest.mark.parametrize("spoil", [lambda data: data.pop("pools"), lambda data: data.update(format=99)])
def test_a_revision_that_cannot_be_read_says_what_to_do(spoil: Any) -> None:
    stored = copy.deepcopy(render(SPECS["demo"]).of_kind("ControllerRevision")[0])
    spoil(stored["data"])
    with pytest.raises(RevisionDataError, match=r"antiphon\.dev/update"):
        read_controller_revision(stored)
