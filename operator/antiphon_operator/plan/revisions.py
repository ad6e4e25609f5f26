"""Revisions as they are kept: ControllerRevisions with what the planner noted on them.

The revision that was all there was last is the *completed* one: known to work, and protected while another takes
over. That is an annotation with a time, so it survives the loss of any status.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from antiphon_operator import names
from antiphon_operator.names import Role
from antiphon_operator.plan.clock import moment, stamp
from antiphon_operator.plan.memory import Step, read_step, write
from antiphon_operator.plan.observed import Object
from antiphon_operator.render.metadata import labels, metadata
from antiphon_operator.render.revision import RevisionData, RevisionDataError, read_controller_revision
from antiphon_operator.resource.effective import EffectiveModel


@dataclass(frozen=True, slots=True)
class Revision:
    """One revision with its notes. `stored` is None for one that this plan makes."""

    name: str
    data: RevisionData
    manifest: Mapping[str, Any]
    """As it is applied, without notes."""
    stored: Object | None
    completed: datetime | None = None
    failed: str = ""
    """`<reason>: <message>`."""
    step: Step | None = None
    source: str = ""

    @property
    def roles(self) -> tuple[Role, ...]:
        return tuple(self.data.pools)

    def with_notes(
        self, *, completed: datetime | None, failed: str, step: Step | None, source: str | None = None
    ) -> Revision:
        return replace(
            self,
            completed=completed,
            failed=failed,
            step=step,
            source=self.source if source is None else source,
        )

    def annotated(self) -> dict[str, Any]:
        """The manifest with its notes."""
        notes = {
            names.COMPLETED_ANNOTATION: stamp(self.completed) if self.completed else "",
            names.FAILED_ANNOTATION: self.failed,
            names.STEP_ANNOTATION: write(self.step) if self.step else "",
            names.SOURCE_ANNOTATION: self.source,
        }
        kept = {name: text for name, text in notes.items() if text}
        own = dict(self.manifest["metadata"]) | ({"annotations": kept} if kept else {})
        return dict(self.manifest) | {"metadata": own}


def read_revisions(model: EffectiveModel, children: Iterable[Object]) -> tuple[dict[str, Revision], tuple[str, ...]]:
    """The revisions, by their names of 6 digits, in the order they were made; and why others cannot be read."""
    found, unreadable = [], []
    for child in children:
        if child["kind"] != "ControllerRevision" or child["metadata"].get("deletionTimestamp"):
            continue
        try:
            found.append(_read(model, child))
        except RevisionDataError as error:
            unreadable.append(str(error))
    found.sort(key=lambda revision: (revision.data.ordinal, revision.name))
    return {revision.name: revision for revision in found}, tuple(unreadable)


def _read(model: EffectiveModel, child: Object) -> Revision:
    data = read_controller_revision(child)
    annotations = child["metadata"].get("annotations") or {}
    return Revision(
        name=data.revision,
        data=data,
        manifest={
            "apiVersion": "apps/v1",
            "kind": "ControllerRevision",
            "metadata": metadata(
                model, names.revision_name(model.name, data.revision), labels(model, revision=data.revision)
            ),
            "revision": child["revision"],
            "data": child["data"],
        },
        stored=child,
        completed=moment(annotations.get(names.COMPLETED_ANNOTATION)),
        failed=annotations.get(names.FAILED_ANNOTATION, ""),
        step=read_step(annotations.get(names.STEP_ANNOTATION)),
        source=annotations.get(names.SOURCE_ANNOTATION, ""),
    )


def by_completion(revisions: Mapping[str, Revision]) -> list[Revision]:
    """Those that were all there was once, the last one first."""
    done = [(revision.completed, revision.data.ordinal, revision) for revision in revisions.values()]
    return [found for _, _, found in sorted(((c, o, r) for c, o, r in done if c), key=lambda e: e[:2], reverse=True)]
