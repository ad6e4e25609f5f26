"""One step's sequences as flat arrays: what attention and the kernels read instead of Python objects.

Tokens of all sequences lie behind one another ("packed"): sequence i owns rows `row_start[i]` to `row_start[i + 1]`.
Building it is the only Python work per sequence in a step. Everything that could make a kernel read or write outside
its memory (block numbers, token ids, too few blocks) is checked here, before anything is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from antiphon_engine.executor import SequenceStep

Int32Array = NDArray[np.int32]


class InvalidStep(ValueError):
    """The scheduler asked for something that has no place in the pool or the vocabulary: a bug above the executor."""


@dataclass(frozen=True, slots=True)
class StepBatch:
    tokens: Int32Array
    """[rows] token ids."""
    positions: Int32Array
    """[rows] position of each token in its sequence."""
    row_start: Int32Array
    """[sequences + 1]"""
    start: Int32Array
    """[sequences] tokens in KV before this step."""
    tables: Int32Array
    """[sequences, most blocks] physical blocks, padded with 0."""
    sample_rows: Int32Array
    """Rows whose logits are wanted, in sequence order: of each, those that score its prompt, then the one that samples
    (`executor.row_specs`)."""

    @property
    def rows(self) -> int:
        return len(self.tokens)

    @property
    def sequences(self) -> int:
        return len(self.start)


def build_batch(
    step: Sequence[SequenceStep], *, block_tokens: int, num_blocks: int, vocab_size: int, max_context_tokens: int
) -> StepBatch:
    """Pack `step` (at least one sequence). Raises InvalidStep."""
    tokens: list[int] = []
    row_start = np.zeros(len(step) + 1, dtype=np.int32)
    start = np.empty(len(step), dtype=np.int32)
    used = [0] * len(step)
    sample_rows: list[int] = []
    for index, sequence in enumerate(step):
        new = len(sequence.tokens)
        end = sequence.start + new
        used[index] = -(-end // block_tokens)
        if new < 1 or sequence.start < 0:
            raise InvalidStep(f"request {sequence.request_id}: a step needs at least one token at a position >= 0")
        if end > max_context_tokens:
            raise InvalidStep(f"request {sequence.request_id}: {end} tokens exceed the context of {max_context_tokens}")
        if len(sequence.blocks) < used[index]:
            raise InvalidStep(
                f"request {sequence.request_id}: {end} tokens need {used[index]} blocks, not {len(sequence.blocks)}"
            )
        tokens.extend(sequence.tokens)
        start[index] = sequence.start
        row_start[index + 1] = len(tokens)
        if (scoring := sequence.scoring) is not None:
            first = int(row_start[index]) + scoring.skip
            sample_rows.extend(range(first, first + len(scoring.targets)))
        if sequence.sample is not None:
            sample_rows.append(len(tokens) - 1)
    tables = np.zeros((len(step), max(used)), dtype=np.int32)
    for index, sequence in enumerate(step):
        tables[index, : used[index]] = sequence.blocks[: used[index]]
    token_ids = np.array(tokens, dtype=np.int32)
    if token_ids.min() < 0 or token_ids.max() >= vocab_size:
        raise InvalidStep(f"a token id lies outside the vocabulary of {vocab_size}")
    if tables.min() < 0 or tables.max() >= num_blocks:
        raise InvalidStep(f"a block number lies outside the pool of {num_blocks} blocks")
    lengths = np.diff(row_start)
    positions = np.arange(len(tokens), dtype=np.int32) + np.repeat(start - row_start[:-1], lengths)
    return StepBatch(
        tokens=token_ids,
        positions=positions.astype(np.int32),
        row_start=row_start,
        start=start,
        tables=tables,
        sample_rows=np.array(sample_rows, dtype=np.int32),
    )
