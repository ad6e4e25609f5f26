"""Why a shape is taken, in a sentence for each size; and, where nothing fits, what would."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from antiphon_engine.parallel import ParallelShape

if TYPE_CHECKING:
    from antiphon_engine.planning.shapes import PlannedShape, Question


def of_choice(question: Question, planned: Sequence[PlannedShape], chosen: PlannedShape) -> Iterator[str]:
    """`planned`: all possible shapes."""
    shape = chosen.shape
    if chosen.asked_contexts < question.contexts:
        yield (
            f"no shape holds {_contexts(question)} in a replica; this one holds most in all "
            f"({chosen.contexts_in_all}): give a shorter --context, or more GPUs"
        )
    if shape.ranks == 1:
        yield "one rank: the model and its contexts fit one GPU, so no rank has to wait for another"
    if shape.tensor > 1:
        yield from _of_tensor(question, planned, shape)
    if shape.pipeline > 1:
        yield from _of_pipeline(question, planned, chosen)
    if shape.expert > 1:
        each = question.config.experts // shape.expert
        yield (
            f"expert {shape.expert}: each rank holds {each} of {question.config.experts} experts of a layer whole, "
            "which takes the memory that a slice of each would, and keeps multiplications large"
        )
    if chosen.replicas > 1:
        yield f"{chosen.replicas} replicas: they answer side by side, where ranks of a larger one would share each step"
    else:
        yield "1 replica: prefill and decode are not separate pools then; one worker does both"
    if chosen.idle_gpus:
        yield f"{_gpus(chosen.idle_gpus)} left over, for another model or pool"


def _of_tensor(question: Question, planned: Sequence[PlannedShape], shape: ParallelShape) -> Iterator[str]:
    smaller = [one for one in planned if one.shape.tensor < shape.tensor and one.shape.pipeline == shape.pipeline]
    why = _shortage(question, max(smaller, key=lambda one: one.shape.tensor)) if smaller else ""
    yield (
        f"tensor {shape.tensor}: {why or 'smaller sizes hold less in all'}; the {shape.tensor} ranks of a stage "
        "stand in one node, because they exchange activations twice in each layer"
    )


def _of_pipeline(question: Question, planned: Sequence[PlannedShape], chosen: PlannedShape) -> Iterator[str]:
    pipeline = chosen.shape.pipeline
    flat = [one for one in planned if one.shape.pipeline < pipeline]
    largest = max(flat, key=lambda one: (one.shape.ranks, one.shape.tensor), default=None)
    why = _shortage(question, largest) if largest is not None else ""
    where = f"in {chosen.nodes} nodes" if chosen.nodes > 1 else "in one node"
    yield f"pipeline {pipeline}: {why or 'fewer stages hold less in all'}; the stages stand {where}"


def _shortage(question: Question, one: PlannedShape) -> str:
    """What a shape lacks; empty if nothing."""
    if not one.memory.fits:
        return f"{one.shape} does not fit ({_lacking(one)})"
    if one.asked_contexts < question.contexts:
        return f"{one.shape} holds {one.asked_contexts} of the {_contexts(question)} wanted"
    return ""


def of_nothing(question: Question, too_large: Sequence[PlannedShape], enough: PlannedShape | None) -> Iterator[str]:
    """`enough`: what would fit on more GPUs of this kind."""
    closest = max(too_large, key=lambda one: one.memory.free_bytes)
    yield f"nothing fits: {closest.shape} comes closest, and {_lacking(closest)}"
    if enough is None:
        yield "no number of these GPUs would do: take larger ones"
    else:
        yield f"{enough.shape.ranks} x {question.fleet.device.name} would do, as {enough.shape}"


def _lacking(one: PlannedShape) -> str:
    if one.memory.free_bytes < 0:
        return f"lacks {-one.memory.free_bytes / 1e9:.1f} GB on each GPU"
    return "has no room for a block of KV"


def _contexts(question: Question) -> str:
    return f"{question.contexts} contexts of {question.asked_tokens:,} tokens"


def _gpus(count: int) -> str:
    return f"{count} GPUs are" if count > 1 else "1 GPU is"
