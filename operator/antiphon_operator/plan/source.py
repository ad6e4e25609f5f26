"""Where the weights come from, and whether they are there.

`demo` and the timed engine need none; `pvc://` needs a claim that several nodes can mount; `hf://` needs a Job that
finds the commit (and, into a claim, fetches it). What the Job found is noted on the Job and then on the revision that
is made from it, so that neither the Job nor its pod has to live on, and a branch that moves changes nothing by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

import msgspec

from antiphon_operator import names
from antiphon_operator.options import OperatorContext
from antiphon_operator.plan.clock import moment
from antiphon_operator.plan.observed import Observed
from antiphon_operator.plan.planned import Apply, Delete
from antiphon_operator.plan.pods import Pod, container_statuses
from antiphon_operator.plan.revisions import Revision
from antiphon_operator.render.source import source_job
from antiphon_operator.render.weights import (
    SourceResultError,
    Weights,
    claim_of,
    needs_source_job,
    read_source_result,
    source_content,
    weights_at_rest,
)
from antiphon_operator.resource.effective import EffectiveModel
from antiphon_operator.resource.reasons import Reason

RETRY_S = 120.0
"""A Job that failed is replaced after so long."""
_SHAREABLE = frozenset({"ReadWriteMany", "ReadOnlyMany"})
_FORBIDDEN = ("401", "403", "forbidden", "unauthorized", "gated", "token")
_MISSING = ("404", "not found", "no such", "does not exist")


@dataclass(frozen=True, slots=True)
class SourceLook:
    """What is known of the weights."""

    known: bool
    """Whether a revision can be made: `weights` may still be None where none are needed."""
    weights: Weights | None
    content: str
    """Content hash of the source, where a Job resolves it."""
    reason: Reason
    message: str
    applies: tuple[Apply, ...] = ()
    deletes: tuple[Delete, ...] = ()
    retry_at: datetime | None = None


def look_at_source(
    model: EffectiveModel,
    observed: Observed,
    pods: tuple[Pod, ...],
    revisions: Mapping[str, Revision],
    context: OperatorContext,
    now: datetime,
) -> SourceLook:
    """See the module's docstring."""
    trouble = _claim_trouble(model, observed)
    if trouble is not None:
        return SourceLook(False, None, "", *trouble)
    if not needs_source_job(model):
        return SourceLook(True, weights_at_rest(model), "", Reason.AVAILABLE, "The weights need no fetching.")
    return _by_job(model, observed, pods, revisions, context, now)


def _claim_trouble(model: EffectiveModel, observed: Observed) -> tuple[Reason, str] | None:
    source = model.spec.source
    name = claim_of(source.uri)[0] if source.uri.startswith("pvc://") else ""
    if source.cache.type == "Claim":
        name = name or source.cache.claim_name
    if not name:
        return None
    claim = observed.claims.get(name)
    if claim is None:
        return (
            Reason.CLAIM_NOT_FOUND,
            f"There is no PersistentVolumeClaim {name} in {model.namespace}: create it with accessModes "
            "[ReadWriteMany] or [ReadOnlyMany], or name another one in spec.source.",
        )
    modes = (claim.get("spec") or {}).get("accessModes") or ()
    if not _SHAREABLE.intersection(modes):
        return (
            Reason.CLAIM_NOT_SHAREABLE,
            f"PersistentVolumeClaim {name} has accessModes {list(modes)}, so only one node can mount it: use one with "
            "ReadWriteMany or ReadOnlyMany, or spec.source.cache.type: Ephemeral.",
        )
    return None


def _by_job(
    model: EffectiveModel,
    observed: Observed,
    pods: tuple[Pod, ...],
    revisions: Mapping[str, Revision],
    context: OperatorContext,
    now: datetime,
) -> SourceLook:
    content = source_content(model)
    manifest = source_job(model, context)
    own_name = manifest["metadata"]["name"]
    jobs = [child for child in observed.children if child["kind"] == "Job"]
    stale = tuple(
        Delete("batch/v1", "Job", job["metadata"]["name"], job["metadata"]["uid"])
        for job in jobs
        if job["metadata"]["name"] != own_name and not job["metadata"].get("deletionTimestamp")
    )
    kept = [revision.data.weights for revision in revisions.values() if revision.source == content]
    if kept and kept[-1] is not None:
        return SourceLook(True, kept[-1], content, Reason.AVAILABLE, _found(kept[-1]), deletes=stale)
    job = next((job for job in jobs if job["metadata"]["name"] == own_name), None)
    wanted = (Apply(manifest, create_only=True),)
    into_claim = model.spec.source.cache.type == "Claim"
    waiting = Reason.FETCHING if into_claim else Reason.RESOLVING
    doing = f"Job {own_name} {'fetches the weights' if into_claim else 'looks up the revision'}: kubectl logs -n "
    doing += f"{model.namespace} job/{own_name}"
    if job is None or job["metadata"].get("deletionTimestamp"):
        return SourceLook(False, None, content, waiting, doing, wanted, stale)
    noted = (job["metadata"].get("annotations") or {}).get(names.WEIGHTS_ANNOTATION)
    message = noted or _termination_message(pods, job["metadata"]["uid"])
    finished = {c["type"]: c for c in (job.get("status") or {}).get("conditions") or () if c.get("status") == "True"}
    if "Failed" not in finished and ("Complete" in finished or noted):
        try:
            weights = read_source_result(message)
        except SourceResultError as error:
            return _failed(model, own_name, job["metadata"]["uid"], str(error), finished.get("Complete"), stale, now)
        own = dict(manifest["metadata"]) | {"annotations": {names.WEIGHTS_ANNOTATION: _note(weights)}}
        noted_job = (Apply(dict(manifest) | {"metadata": own}, create_only=True),)
        return SourceLook(True, weights, content, Reason.AVAILABLE, _found(weights), noted_job, stale)
    if "Failed" in finished:
        told = message or str(finished["Failed"].get("message", ""))
        return _failed(model, own_name, job["metadata"]["uid"], told, finished["Failed"], stale, now)
    return SourceLook(False, None, content, waiting, doing, wanted, stale)


def _failed(
    model: EffectiveModel,
    job: str,
    uid: str,
    message: str,
    ended: Mapping[str, object] | None,
    stale: tuple[Delete, ...],
    now: datetime,
) -> SourceLook:
    lower = message.lower()
    reason, step = Reason.SOURCE_FAILED, "it is tried again"
    if any(word in lower for word in _FORBIDDEN):
        reason, step = Reason.SOURCE_FORBIDDEN, "put a token that may read it into spec.source.secretRef"
    elif any(word in lower for word in _MISSING):
        reason, step = Reason.SOURCE_NOT_FOUND, "correct spec.source.uri or spec.source.revision"
    since = moment((ended or {}).get("lastTransitionTime"))
    retry_at = since + timedelta(seconds=RETRY_S) if since else now
    again = (Delete("batch/v1", "Job", job, uid),) if retry_at <= now else ()
    text = f"{message.strip()[:300] or 'the Job failed'}: {step}. kubectl logs -n {model.namespace} job/{job}"
    return SourceLook(
        False, None, source_content(model), reason, text, deletes=(*stale, *again), retry_at=None if again else retry_at
    )


def _termination_message(pods: tuple[Pod, ...], job_uid: str) -> str:
    """What the Job's newest pod that ended said."""
    ended = [
        str(terminated.get("message") or "")
        for pod in sorted(pods, key=lambda pod: (str(pod.created), pod.name))
        if pod.owner_uid == job_uid
        for container in container_statuses(pod.raw)
        if (terminated := (container.get("state") or {}).get("terminated"))
    ]
    return ended[-1] if ended else ""


def _note(weights: Weights) -> str:
    told = {"revision": weights.revision, "size_bytes": weights.size_bytes, "path": weights.path}
    return msgspec.json.encode(told).decode()


def _found(weights: Weights) -> str:
    return f"Commit {weights.revision}."
