"""What a cluster is made of, and what cannot be run on it. Found out before the run, not in the middle of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from antiphon_policy.latency import StepModel
from antiphon_policy.routing import WorkerRole

from antiphon_simulate.job import blocks_needed
from antiphon_simulate.records import ClusterShape, TraceRequest


class WorkloadError(ValueError):
    """The requests do not fit the cluster, or each other."""


def roles_of(shape: ClusterShape) -> dict[str, WorkerRole]:
    """The workers, by id. Raises WorkloadError."""
    if shape.prefill < 1 or shape.decode < 0:
        raise WorkloadError("a cluster needs one prefill worker at least (`decode` 0: they decode too)")
    if not shape.decode:
        roles = {f"worker-{at}": WorkerRole.BOTH for at in range(shape.prefill)}
    else:
        roles = {f"prefill-{at}": WorkerRole.PREFILL for at in range(shape.prefill)}
        roles |= {f"decode-{at}": WorkerRole.DECODE for at in range(shape.decode)}
    if unknown := set(shape.slow) - set(roles):
        raise WorkloadError(f"`slow` names {sorted(unknown)}, but the workers are {', '.join(roles)}")
    return roles


def slower(step: StepModel, times: float) -> StepModel:
    """A worker that takes so many times as long for everything."""
    return replace(
        step,
        base_ms=step.base_ms * times,
        per_new_token_ms=step.per_new_token_ms * times,
        per_token_context_ms=step.per_token_context_ms * times,
        per_sequence_ms=step.per_sequence_ms * times,
        per_kv_token_ms=step.per_kv_token_ms * times,
    )


def followers_of(requests: Sequence[TraceRequest]) -> dict[int, list[TraceRequest]]:
    """Which requests each request's end sets off. Raises WorkloadError."""
    known = {request.index for request in requests}
    if len(known) < len(requests):
        raise WorkloadError("two requests have the same index: number them")
    followers: defaultdict[int, list[TraceRequest]] = defaultdict(list)
    for request in requests:
        if request.after is not None:
            if request.after not in known:
                raise WorkloadError(f"request {request.index} comes after {request.after}, which is not in the trace")
            followers[request.after].append(request)
    return followers


def check_sizes(requests: Sequence[TraceRequest], shape: ClusterShape, block_tokens: int) -> None:
    """Raises WorkloadError for a request that no pool could ever hold."""
    for request in requests:
        if request.prompt_tokens < 1 or len(request.blocks) < request.prompt_tokens // block_tokens:
            raise WorkloadError(
                f"request {request.index}: {request.prompt_tokens} prompt tokens but {len(request.blocks)} block ids "
                f"(of {block_tokens} tokens)"
            )
        blocks = blocks_needed(request.prompt_tokens, request.output_tokens, block_tokens)
        if blocks > shape.pool_blocks:
            raise WorkloadError(
                f"request {request.index} needs {blocks} blocks, a pool has {shape.pool_blocks}: "
                "give pools more, or leave it out"
            )
