"""What the driver and a rank say to each other on the rank's `steps` connection.

All are msgspec structs (msgpack, no pickle). A step is one message, the same bytes for every rank, packed once: the
batch's arrays as raw int32, and how to sample as a nested message that only the sampling rank unpacks.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np
from antiphon_kvtransfer.offer import TransportOffer
from antiphon_kvtransfer.plane import KvPart

from antiphon_engine.executor import SampledToken
from antiphon_engine.interface import ModelInfo
from antiphon_engine.torch_engine.step_batch import Int32Array, StepBatch

# -- from a rank


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The first frame of each of a rank's two connections."""

    secret: str
    rank: int
    channel: str
    """`steps` or `transfers`."""
    pid: int
    node: str
    """Ray's id of the node that the rank is on."""
    meeting_port: int = 0
    """Rank 0's: where it listens for the others."""


class Possible(msgspec.Struct, frozen=True, array_like=True, tag=True):
    num_blocks: int


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=True):
    part: KvPart
    block_bytes: int
    num_blocks: int
    info: ModelInfo | None
    """From the sampling rank only: it holds a whole tokenizer."""
    revision: str


class StartFailed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    exit_code: int
    message: str


class Sampled(msgspec.Struct, frozen=True, array_like=True, tag=True):
    step: int
    tokens: list[SampledToken]
    busy_s: float = 0.0
    """What the sampling rank took for the step, waiting for other ranks included: so all ranks are done with it."""
    exchange_s: float = 0.0
    """Of that, sums and activations, and the waiting."""


class StepFailed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    step: int
    message: str


class Alive(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Said every now and then: a rank that says nothing is gone, whatever its connection looks like."""


class Said(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A line of the rank's log."""

    level: int
    logger: str
    text: str


FromRank = Hello | Possible | Ready | StartFailed | Sampled | StepFailed | Alive | Said
FROM_RANK = msgspec.msgpack.Decoder(FromRank)


# -- to a rank


class Prepare(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """All ranks are connected."""

    meeting_host: str
    meeting_port: int
    ranks_here: int
    """Ranks on the same node, with this one."""
    log_level: int


class Load(msgspec.Struct, frozen=True, array_like=True, tag=True):
    num_blocks: int


class ServeTransfers(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Serve the data plane on the `transfers` connection from now on."""

    offer: TransportOffer


class PackedSampling(msgspec.Struct, frozen=True, array_like=True):
    """Fields of `interface.Sampling`, by their names: all but those that the driver itself minds (when to stop)."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[int, float]
    logprobs: int | None
    seed: int
    choice: int


class History(msgspec.Struct, frozen=True, array_like=True):
    """The tokens of a request whose sampling looks at them: whole the first time, then only what is new."""

    key: int
    prompt: bytes | None
    """int32; None: as before."""
    output: bytes
    """int32: what follows the output that was sent before; all of it after a prompt."""


class PackedMask(msgspec.Struct, frozen=True, array_like=True):
    """What a grammar allows, as bits or, where few ids are, as these: whichever is shorter."""

    bits: bytes
    ids: bytes
    """int32."""
    size_bytes: int
    """Of the bits."""


class PackedSpec(msgspec.Struct, frozen=True, array_like=True):
    sampling: PackedSampling
    position: int
    forbidden: frozenset[int]
    history: History | None
    mask: PackedMask | None = None
    allowed_ids: bytes = b""
    """int32; empty: all."""


class PackedScores(msgspec.Struct, frozen=True, array_like=True):
    """Rows that score a prompt, one behind the other."""

    first: int
    """Among the step's wanted rows."""
    targets: bytes
    """int32."""
    top: int


class HowToSample(msgspec.Struct, frozen=True, array_like=True):
    specs: list[PackedSpec]
    forget: list[int]
    """Keys of histories that are not wanted any more."""
    scores: list[PackedScores] = []
    """In the order of their rows; the rows between them sample."""


class Step(msgspec.Struct, frozen=True, array_like=True, tag=True):
    number: int
    tokens: bytearray
    row_start: bytearray
    start: bytearray
    tables: bytearray
    """[sequences, blocks]"""
    sample_rows: bytearray
    how: msgspec.Raw
    """HowToSample."""


class End(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Leave."""


ToRank = Prepare | Load | ServeTransfers | Step | End
TO_RANK = msgspec.msgpack.Decoder(ToRank)
HOW_TO_SAMPLE = msgspec.msgpack.Decoder(HowToSample)
ENCODER = msgspec.msgpack.Encoder()


def pack_step(number: int, batch: StepBatch, how: HowToSample) -> bytes:
    """Positions are left out: they follow from the rest."""
    arrays = (batch.tokens, batch.row_start, batch.start, batch.tables, batch.sample_rows)
    tokens, row_start, start, tables, rows = (bytearray(np.ascontiguousarray(array)) for array in arrays)
    return ENCODER.encode(Step(number, tokens, row_start, start, tables, rows, msgspec.Raw(ENCODER.encode(how))))


def unpack_batch(step: Step) -> StepBatch:
    tokens, row_start, start = (_int32(part) for part in (step.tokens, step.row_start, step.start))
    positions = np.arange(len(tokens), dtype=np.int32) + np.repeat(start - row_start[:-1], np.diff(row_start))
    return StepBatch(
        tokens=tokens,
        positions=positions.astype(np.int32),
        row_start=row_start,
        start=start,
        tables=_int32(step.tables).reshape(len(start), -1),
        sample_rows=_int32(step.sample_rows),
    )


def _int32(packed: bytearray) -> Int32Array:
    """Without a copy, and writable as torch wants it."""
    return np.frombuffer(packed, dtype=np.int32)
