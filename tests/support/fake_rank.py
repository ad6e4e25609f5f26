"""A rank that computes nothing: its tokens follow from what it was given, so that a test can tell that all arrived.

It lives in a rank's process (`RankMaker`), and does on demand what ranks may do to a gang: fail, and hang.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence

import msgspec
from antiphon_engine.executor import RowSpec, SampledToken, ScoreSpec
from antiphon_engine.gang.runner import Meeting
from antiphon_engine.interface import KvMemory, ModelInfo, TokenLogprob
from antiphon_engine.parallel import ModelDims, ParallelShape, kv_part
from antiphon_engine.torch_engine.step_batch import StepBatch
from antiphon_kvtransfer.plane import KvPart

MAKER = "tests.support.fake_rank:FakeMaker"
DIMS = ModelDims(layers=4, query_heads=4, kv_heads=2)
LAYER_BYTES = 512
"""Of one KV head of one layer, in a block."""
BLOCK_TOKENS = 4
EXCHANGE_S = 0.25
"""What a rank says that a step took for exchanges."""
VOCABULARY = 1000


class FakeSettings(msgspec.Struct, frozen=True):
    blocks: tuple[int, ...] = (64,)
    """What each rank has room for; the last one's holds for all further ranks."""
    fail_to_load: str = ""
    """What rank 1 says instead of loading."""
    load_s: float = 0.0

    def packed(self) -> bytes:
        return msgspec.msgpack.encode(self)


def fake_info() -> ModelInfo:
    return ModelInfo(
        model="fake",
        revision="r1",
        architecture="Fake",
        kv_format="fake/4",
        block_tokens=BLOCK_TOKENS,
        kv_block_bytes=DIMS.layers * DIMS.kv_heads * LAYER_BYTES,
        max_context_tokens=10_000,
        vocab_size=VOCABULARY,
        eos_token_ids=(0,),
        tokenizer_json=b"{}",
        tokenizer_config_json="",
        chat_template="",
        bos_token="",
        eos_token="",
        layers=DIMS.layers,
        kv_heads=DIMS.kv_heads,
    )


class FakeMaker:
    def __init__(self, settings: bytes, shape: ParallelShape, rank: int) -> None:
        self._settings = msgspec.msgpack.decode(settings, type=FakeSettings)
        self._shape = shape
        self._rank = rank

    def possible_blocks(self, ranks_here: int) -> int:
        blocks = self._settings.blocks
        return blocks[min(self._rank, len(blocks) - 1)]

    def make(self, num_blocks: int, meeting: Meeting) -> FakeRunner:
        if self._settings.fail_to_load and self._rank == 1:
            raise ValueError(self._settings.fail_to_load)
        time.sleep(self._settings.load_s)
        assert (meeting.listening is not None) == (self._rank == 0)
        return FakeRunner(self._shape, self._rank, num_blocks)


class FakeRunner:
    """Token i is the sum of the row's last token id, its position, its last block and its whole history, cut down."""

    def __init__(self, shape: ParallelShape, rank: int, num_blocks: int) -> None:
        self._samples = rank == shape.sampling_rank
        self._steps = 0
        self.part: KvPart = kv_part(shape, DIMS, rank)
        block_bytes = self.part.layers * self.part.heads * LAYER_BYTES
        self._memory = ctypes.create_string_buffer(block_bytes * num_blocks)
        self.kv = KvMemory(ctypes.addressof(self._memory), block_bytes, num_blocks)

    @property
    def info(self) -> ModelInfo:
        return fake_info()

    @property
    def exchanged_s(self) -> float:
        return self._steps * EXCHANGE_S

    def step(self, batch: StepBatch, specs: Sequence[RowSpec]) -> list[SampledToken] | None:
        self._steps += 1
        if FAIL in batch.tokens:
            raise ValueError("this token cannot be computed")
        if HANG in batch.tokens:
            time.sleep(3600)
        if not self._samples:
            return None
        return [
            fake_token(
                int(batch.tokens[row]),
                int(batch.positions[row]),
                int(batch.tables[int((batch.row_start <= row).sum()) - 1].max()),
                spec,
            )
            for row, spec in zip(batch.sample_rows, specs, strict=True)
        ]

    def close(self) -> None:
        pass


FAIL, HANG = 902, 903
"""Token ids that fail the step, or keep it for ever; on all ranks."""


def fake_token(token: int, position: int, block: int, spec: RowSpec) -> SampledToken:
    if isinstance(spec, ScoreSpec):
        score = -(token + position + block) / 8
        return SampledToken(spec.target, TokenLogprob(spec.target, score, ((token, score),) * spec.top, rank=1))
    total = token + position + block + sum(spec.prompt) + sum(spec.output) + spec.position + spec.sampling.seed
    token_id = total % 900
    wanted = spec.sampling.logprobs
    logprob = None if wanted is None else TokenLogprob(token_id, -0.5, ((token_id, -0.5),) * wanted)
    return SampledToken(token_id, logprob)
