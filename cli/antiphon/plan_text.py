"""A plan as a person reads it in a terminal, and as JSON for programs."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

import msgspec
from antiphon_engine.parallel import ParallelShape
from antiphon_engine.planning import Plan, PlannedShape, count_parameters
from antiphon_engine.planning.parameters import count_active_parameters
from antiphon_operator.names import RAY_PORT

_WIDTH = 120


def as_text(model: str, plan: Plan) -> str:
    """Several lines, without a newline at the end."""
    return "\n".join(_lines(model, plan))


def _lines(model: str, plan: Plan) -> Iterator[str]:
    yield from _head(model, plan)
    if plan.fitting:
        yield ""
        yield from _table(plan)
    if plan.too_large:
        yield ""
        named = "; ".join(f"{one.shape} ({_lack(one)})" for one in plan.too_large)
        yield from _wrapped(f"does not fit: {named}", "")
    yield ""
    if plan.chosen is None:
        for reason in plan.reasons:
            yield from _wrapped(reason, "")
        return
    yield f"take: {plan.chosen.shape}, {_replicas(plan.chosen.replicas)}"
    for reason in plan.reasons:
        yield from _wrapped(f"- {reason}", "  ", indent="  ")
    command = " ".join(("antiphon worker", _word(model), *worker_flags(plan.chosen.shape)))
    if plan.chosen.nodes == 1:
        yield f"worker: {command}"
    else:
        ranks = f"--ray-node-ranks {plan.chosen.gpus_per_pod}"
        yield f"worker: {command} {ranks} --ray-head"
        yield f"        {command} {ranks} --ray-join HOST:{RAY_PORT}  (on each other node)"
    yield f"Model:  {pool_fields(plan.chosen)}"


def _head(model: str, plan: Plan) -> Iterator[str]:
    question, fleet = plan.question, plan.question.fleet
    config, size = question.config, question.dtype_bytes
    count = count_parameters(config)
    parameters = f"{count:,} parameters"
    if config.experts:
        active = count_active_parameters(config)
        parameters += f" ({active:,} of them for one token: {config.experts_per_token} of {config.experts} experts)"
    yield f"{model}: {config.architecture}, {parameters}"
    heads = f"{config.layers} layers, {config.query_heads} query and {config.kv_heads} KV heads of {config.head_dim}"
    yield f"  {heads}, at most {config.max_context_tokens:,} tokens"
    yield f"  {question.dtype}: weights {_gb(count * size)}, KV {config.kv_bytes_per_token(size):,} bytes a token"
    nodes = f"{fleet.nodes} nodes of {fleet.gpus_per_node}" if fleet.nodes > 1 else "one node"
    device = fleet.device
    yield f"{fleet.gpus} x {device.name} in {nodes}, {_gb(device.memory_bytes)} each ({device.source})"
    yield from _wrapped(_kept_back(plan), "  ", indent="  ")


def _kept_back(plan: Plan) -> str:
    question, reserve = plan.question, plan.question.reserve
    if reserve.fixed_bytes is not None:
        return f"kept back on each: {_gb(reserve.fixed_bytes)}, as asked for"
    memory = question.fleet.device.memory_bytes
    activations = [
        reserve.activation_bytes(question.config, one.shape, question.dtype_bytes)
        for one in (*plan.fitting, *plan.too_large)
    ]
    least, most = _gb(min(activations)), _gb(max(activations))
    return (
        f"kept back on each: {_gb(reserve.runtime_bytes)} for driver, libraries and collectives; "
        f"{_gb(memory * reserve.allocator_share)} ({reserve.allocator_share:.0%}) that an allocator cannot use; "
        f"{least if least == most else f'{least} to {most}'} for steps of {reserve.step_tokens:,} tokens. "
        "An estimate: --reserve-gb replaces it"
    )


def _table(plan: Plan) -> Iterator[str]:
    longest, asked = plan.question.config.max_context_tokens, plan.question.asked_tokens
    head = ["", "shape", "ranks", "replicas", "weights", "kept back", "KV/token", "blocks", "tokens", "contexts"]
    under = ["", *(["" for _ in head[2:]]), f"of {longest:,}"]
    if asked != longest:
        head.append("contexts")
        under.append(f"of {asked:,}")
    head.append("in all")
    under.append("")
    rows = [_row(plan, one) for one in plan.fitting]
    widths = [max(len(line[at]) for line in (head, under, *rows)) for at in range(len(head))]
    yield "weights, kept back and KV/token: of one rank; blocks, tokens and contexts at once: of one replica"
    for line in (head, under, *rows):
        cells = (
            cell.ljust(width) if at < 2 else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        yield "  ".join(cells).rstrip()


def _row(plan: Plan, one: PlannedShape) -> list[str]:
    memory = one.memory
    cells = [
        "*" if one is plan.chosen else "",
        str(one.shape),
        str(one.shape.ranks),
        str(one.replicas),
        _gb(memory.weights_bytes),
        _gb(memory.reserve_bytes),
        f"{memory.kv_bytes_per_token:,} B",
        f"{memory.blocks:,}",
        f"{memory.tokens:,}",
        str(one.full_contexts),
    ]
    if plan.question.asked_tokens != plan.question.config.max_context_tokens:
        cells.append(str(one.asked_contexts))
    return [*cells, str(one.contexts_in_all)]


def worker_flags(shape: ParallelShape) -> list[str]:
    """Options of `antiphon worker`."""
    return [word for name, size in _sizes(shape) for word in (f"--{name}-parallel", str(size))]


def pool_fields(chosen: PlannedShape) -> str:
    """Of a Model's pool."""
    sizes = ", ".join(f"{name}: {size}" for name, size in _sizes(chosen.shape))
    if not sizes:
        return "one GPU a replica is the default"
    if chosen.nodes == 1:
        return f"parallelism: {{{sizes}}}"
    return f"parallelism: {{{sizes}}}, gpusPerPod: {chosen.gpus_per_pod}"


def _sizes(shape: ParallelShape) -> list[tuple[str, int]]:
    named = (("tensor", shape.tensor), ("pipeline", shape.pipeline), ("expert", shape.expert))
    return [(name, size) for name, size in named if size > 1]


# -- JSON


class ShapeReport(msgspec.Struct):
    """One shape of `--json`."""

    tensor: int
    pipeline: int
    expert: int
    ranks: int
    replicas: int
    nodes_per_replica: int
    idle_gpus: int
    fits: bool
    chosen: bool
    weights_bytes_per_rank: int
    reserve_bytes_per_rank: int
    free_bytes_per_rank: int
    kv_bytes_per_token_per_rank: int
    blocks: int
    tokens: int
    full_contexts: int
    asked_contexts: int
    asked_contexts_in_all: int


class PlanReport(msgspec.Struct):
    """What `--json` prints. All of a shape but `replicas`, `idle_gpus` and `..._in_all` is of one replica."""

    model: str
    architecture: str
    parameters: int
    active_parameters: int
    dtype: str
    weights_bytes: int
    kv_bytes_per_token: int
    max_context_tokens: int
    asked_context_tokens: int
    wanted_contexts: int
    block_tokens: int
    gpu: str
    gpu_memory_bytes: int
    gpu_memory_source: str
    gpus: int
    gpus_per_node: int
    shapes: list[ShapeReport]
    reasons: list[str]


def as_json(model: str, plan: Plan) -> str:
    """Indented."""
    question, fleet = plan.question, plan.question.fleet
    config = question.config
    count = count_parameters(config)
    report = PlanReport(
        model=model,
        architecture=config.architecture,
        parameters=count,
        active_parameters=count_active_parameters(config) if config.experts else count,
        dtype=question.dtype,
        weights_bytes=count * question.dtype_bytes,
        kv_bytes_per_token=config.kv_bytes_per_token(question.dtype_bytes),
        max_context_tokens=config.max_context_tokens,
        asked_context_tokens=question.asked_tokens,
        wanted_contexts=question.contexts,
        block_tokens=question.block_tokens,
        gpu=fleet.device.name,
        gpu_memory_bytes=fleet.device.memory_bytes,
        gpu_memory_source=fleet.device.source,
        gpus=fleet.gpus,
        gpus_per_node=fleet.gpus_per_node,
        shapes=[_reported(plan, one) for one in (*plan.fitting, *plan.too_large)],
        reasons=list(plan.reasons),
    )
    return msgspec.json.format(msgspec.json.encode(report)).decode()


def _reported(plan: Plan, one: PlannedShape) -> ShapeReport:
    memory = one.memory
    return ShapeReport(
        tensor=one.shape.tensor,
        pipeline=one.shape.pipeline,
        expert=one.shape.expert,
        ranks=one.shape.ranks,
        replicas=one.replicas,
        nodes_per_replica=one.nodes,
        idle_gpus=one.idle_gpus,
        fits=memory.fits,
        chosen=one is plan.chosen,
        weights_bytes_per_rank=memory.weights_bytes,
        reserve_bytes_per_rank=memory.reserve_bytes,
        free_bytes_per_rank=memory.free_bytes,
        kv_bytes_per_token_per_rank=memory.kv_bytes_per_token,
        blocks=memory.blocks,
        tokens=memory.tokens,
        full_contexts=one.full_contexts,
        asked_contexts=one.asked_contexts,
        asked_contexts_in_all=one.contexts_in_all,
    )


# -- words


def _lack(one: PlannedShape) -> str:
    if one.memory.free_bytes >= 0:
        return "no room for a block of KV"
    return f"lacks {_gb(-one.memory.free_bytes)} a rank"


def _replicas(count: int) -> str:
    return f"{count} replicas" if count > 1 else "1 replica"


def _gb(count: float) -> str:
    return f"{count / 1e9:.1f} GB"


def _word(model: str) -> str:
    return model if model == "demo" else "MODEL"


def _wrapped(text: str, subsequent: str, *, indent: str = "") -> Sequence[str]:
    return textwrap.wrap(
        text, _WIDTH, initial_indent=indent, subsequent_indent=indent + subsequent, break_on_hyphens=False
    )
