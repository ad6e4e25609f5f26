"""Which revision the spec asks for, and which one is to be protected meanwhile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from antiphon_operator import names
from antiphon_operator.names import Role
from antiphon_operator.plan.revisions import Revision, by_completion
from antiphon_operator.plan.rollout import Strength
from antiphon_operator.plan.source import SourceLook
from antiphon_operator.plan.state import State
from antiphon_operator.render.revision import (
    controller_revision,
    pod_templates,
    read_controller_revision,
    revision_of,
    templates_digest,
)


@dataclass(frozen=True, slots=True)
class Target:
    """The revision that the spec asks for."""

    revision: Revision
    outdated: bool
    """This operator would render it otherwise than it is kept."""


def find_target(state: State, source: SourceLook) -> Target | None:
    """None: the weights are not known yet. A revision that is kept is used as it is; another one is rendered."""
    if not source.known:
        return None
    update = (state.observed.model["metadata"].get("annotations") or {}).get(names.UPDATE_ANNOTATION, "")
    name = revision_of(state.model, source.weights, update)
    templates = pod_templates(state.model, name, state.context, source.weights)
    kept = state.revisions.get(name)
    if kept is not None:
        return Target(kept, outdated=templates_digest(templates) != kept.data.digest)
    ordinal = max((revision.data.ordinal for revision in state.revisions.values()), default=0) + 1
    manifest = controller_revision(state.model, name, ordinal, templates, state.context, source.weights)
    data = read_controller_revision(manifest)
    return Target(Revision(name, data, manifest, stored=None, source=source.content), outdated=False)


def find_base(state: State, target: str | None, strengths: Mapping[str, Strength]) -> Revision | None:
    """The revision to fall back to, if it is another one than the target: the last completed one; if none ever was,
    the one with the most ready replicas that make pairs."""
    done = by_completion(state.revisions)
    if done:
        return done[0] if done[0].name != target else None
    pairs = [
        (paired, revision.data.ordinal, revision)
        for name, revision in state.revisions.items()
        if name != target and (paired := _pairs(revision.roles, strengths[name])) > 0
    ]
    return max(pairs, key=lambda found: found[:2])[2] if pairs else None


def _pairs(roles: tuple[Role, ...], strength: Strength) -> int:
    return min((strength.ready.get(role, 0) for role in roles), default=0)
