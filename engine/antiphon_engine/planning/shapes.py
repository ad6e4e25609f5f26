"""Which shapes of a model fit a fleet of GPUs, and which to take.

Possible are the tensor sizes that the model's heads allow, within a node: the ranks of a stage exchange activations
twice in each layer. Pipeline sizes are those that use up all stages that the nodes have room for; their stages exchange
activations once a stage, and may stand in different nodes. Experts are spread over all ranks of a stage, or over none.

Which to take, in this order:

1. one that holds the wanted number of contexts; if none does, the one that holds most in all;
2. without pipeline: stages wait for one another unless enough requests keep all of them busy;
3. of the fewest ranks: replicas answer side by side, ranks of a replica wait for each other;
4. with experts dealt out whole where they can be: same memory, and larger multiplications than slices of them.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from antiphon_engine.parallel import ParallelShape, ShapeRefused, check_shape, tensor_sizes
from antiphon_engine.planning import reasons
from antiphon_engine.planning.configuration import ModelConfig
from antiphon_engine.planning.devices import Fleet
from antiphon_engine.planning.memory import Reserve, ShapeMemory, shape_memory

DTYPE_BYTES = {"bfloat16": 2, "float32": 4}
_MOST_NODES = 64
"""How far it is looked for a fleet that would do."""


class QuestionRefused(ValueError):
    """It cannot be planned for. The message says why, and what to do."""


@dataclass(frozen=True, slots=True)
class Question:
    """What is to be served, on what."""

    config: ModelConfig
    fleet: Fleet
    dtype: str = "bfloat16"
    block_tokens: int = 64
    context_tokens: int = 0
    """Of a request, prompt and output together; 0: the longest that the model was made for."""
    contexts: int = 4
    """How many of these a replica should hold at once."""
    reserve: Reserve = field(default_factory=Reserve)

    def __post_init__(self) -> None:
        longest = self.config.max_context_tokens
        if self.dtype not in DTYPE_BYTES:
            raise QuestionRefused(f"--dtype {self.dtype}: use one of {', '.join(DTYPE_BYTES)}")
        if not 0 <= self.context_tokens <= longest:
            raise QuestionRefused(f"--context {self.context_tokens}: the model was made for 1 to {longest} tokens")
        if self.block_tokens < 1 or self.contexts < 1:
            raise QuestionRefused("--block-tokens and --contexts have to be 1 or more")

    @property
    def dtype_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def asked_tokens(self) -> int:
        return self.context_tokens or self.config.max_context_tokens


@dataclass(frozen=True, slots=True)
class PlannedShape:
    """A possible shape: what it needs, and what is had by it."""

    shape: ParallelShape
    replicas: int
    idle_gpus: int
    nodes: int
    """That one replica stands in, at least."""
    memory: ShapeMemory
    full_contexts: int
    """Of the model's longest, in one replica."""
    asked_contexts: int
    """Of the length that was asked for, in one replica."""

    @property
    def gpus_per_pod(self) -> int:
        """For pods of one node each, all alike: as many stages as divide them and a node has room for."""
        in_a_node = -(-self.shape.pipeline // self.nodes)
        stages = max(size for size in range(1, in_a_node + 1) if self.shape.pipeline % size == 0)
        return stages * self.shape.tensor

    @property
    def contexts_in_all(self) -> int:
        return self.replicas * self.asked_contexts


@dataclass(frozen=True, slots=True)
class Plan:
    """All possible shapes, and which to take."""

    question: Question
    fitting: tuple[PlannedShape, ...]
    too_large: tuple[PlannedShape, ...]
    """Possible for the model, but not in this memory."""
    chosen: PlannedShape | None
    """None: nothing fits."""
    reasons: tuple[str, ...]
    """Why this one, in sentences; or what would do."""


def plan_shapes(question: Question) -> Plan:
    """See the module's docstring."""
    planned = [_planned(question, shape) for shape in _possible(question)]
    fitting = tuple(one for one in planned if one.memory.fits)
    too_large = tuple(one for one in planned if not one.memory.fits)
    if not fitting:
        return Plan(question, (), too_large, None, tuple(reasons.of_nothing(question, too_large, _enough(question))))
    chosen = _chosen(question, fitting)
    said = tuple(reasons.of_choice(question, planned, chosen))
    return Plan(question, fitting, too_large, chosen, said)


def _possible(question: Question) -> list[ParallelShape]:
    config, fleet = question.config, question.fleet
    found: list[ParallelShape] = []
    for tensor in tensor_sizes(config.dims):
        if tensor > fleet.largest_node:
            break
        stages = fleet.stages(tensor)
        for pipeline in (size for size in range(1, stages + 1) if stages % size == 0):
            for expert in sorted({1, tensor} if config.experts else {1}):
                shape = ParallelShape(tensor, pipeline, expert)
                try:
                    check_shape(shape, config.dims)
                except ShapeRefused:
                    continue
                found.append(shape)
    return sorted(found, key=lambda shape: (shape.pipeline, shape.tensor, shape.expert))


def _planned(question: Question, shape: ParallelShape) -> PlannedShape:
    config, fleet = question.config, question.fleet
    memory = shape_memory(
        config,
        shape,
        dtype_bytes=question.dtype_bytes,
        block_tokens=question.block_tokens,
        memory_bytes=fleet.device.memory_bytes,
        reserve=question.reserve,
    )
    replicas = fleet.stages(shape.tensor) // shape.pipeline
    return PlannedShape(
        shape=shape,
        replicas=replicas,
        idle_gpus=fleet.gpus - replicas * shape.ranks,
        nodes=-(-shape.pipeline // (fleet.largest_node // shape.tensor)),
        memory=memory,
        full_contexts=_contexts(memory, config.max_context_tokens, question.block_tokens),
        asked_contexts=_contexts(memory, question.asked_tokens, question.block_tokens),
    )


def _contexts(memory: ShapeMemory, tokens: int, block_tokens: int) -> int:
    return memory.blocks // -(-tokens // block_tokens)


def _chosen(question: Question, fitting: tuple[PlannedShape, ...]) -> PlannedShape:
    enough = [one for one in fitting if one.asked_contexts >= question.contexts]
    if enough:
        return min(enough, key=_order)
    most = max((one.contexts_in_all, one.memory.tokens * one.replicas) for one in fitting)
    return min((one for one in fitting if (one.contexts_in_all, one.memory.tokens * one.replicas) == most), key=_order)


def _order(one: PlannedShape) -> tuple[bool, int, int, int]:
    shape = one.shape
    return shape.pipeline > 1, shape.ranks, shape.pipeline, -shape.expert


def _enough(question: Question) -> PlannedShape | None:
    """What would fit on more GPUs of the same kind; None: nothing within reason."""
    device, gpus, per_node = question.fleet.device, question.fleet.gpus, question.fleet.gpus_per_node
    in_one_node = (2**power for power in range(per_node.bit_length()))
    whole_nodes = (nodes * per_node for nodes in range(1, _MOST_NODES + 1))
    for more in (count for count in (*in_one_node, *whole_nodes) if count > gpus):
        larger = dataclasses.replace(question, fleet=Fleet(device, more, per_node))
        fitting = tuple(one for shape in _possible(larger) if (one := _planned(larger, shape)).memory.fits)
        if fitting:
            return min(fitting, key=_order)
    return None
