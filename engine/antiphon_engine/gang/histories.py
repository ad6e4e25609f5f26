"""Tokens that sampling looks at, sent once: the driver's books of them, and the sampling rank's copies.

Only penalties need a request's prompt and output. The driver remembers how much of each request's tokens the rank has
(`SentHistories`) and sends what is new; the rank keeps the tokens under the same keys (`KeptHistories`). Nothing says
when a request is over, so the driver lets go of those that were not sampled for longest, and tells the rank.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter

import msgspec
import numpy as np

from antiphon_engine.executor import RowSpec, SampleSpec, ScoreSpec, SequenceStep
from antiphon_engine.gang.masks import packed_mask, unpacked_mask
from antiphon_engine.gang.messages import History, HowToSample, PackedSampling, PackedScores, PackedSpec
from antiphon_engine.interface import Sampling
from antiphon_engine.limits import AllowedIds

KEPT = 512
"""Requests whose tokens are kept. More than run at once, so that none is sent again and again."""


def needs_history(sampling: Sampling) -> bool:
    return bool(
        sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0 or sampling.repetition_penalty != 1.0
    )


@dataclass(slots=True)
class _Sent:
    key: int
    prompt: Sequence[int]
    output_tokens: int


class SentHistories:
    """The driver's side: packs how to sample."""

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._sent: OrderedDict[str, _Sent] = OrderedDict()
        """Last used last."""
        self._next_key = 0

    def pack(self, step: Sequence[SequenceStep]) -> HowToSample:
        forget: list[int] = []
        wanted = {one.request_id for one in step if one.sample is not None and needs_history(one.sample.sampling)}
        specs: list[PackedSpec] = []
        scores: list[PackedScores] = []
        scored_rows = 0
        for sequence in step:
            if (scoring := sequence.scoring) is not None:
                scores.append(PackedScores(len(specs) + scored_rows, _packed(scoring.targets), scoring.top))
                scored_rows += len(scoring.targets)
            if (spec := sequence.sample) is None:
                continue
            history = None
            if sequence.request_id in wanted:
                history = self._history(sequence.request_id, spec, forget)
            mask = None if spec.allowed is None else packed_mask(spec.allowed)
            allowed_ids = b"" if spec.allowed_ids is None else spec.allowed_ids.packed
            specs.append(
                PackedSpec(_pack_sampling(spec.sampling), spec.position, spec.forbidden, history, mask, allowed_ids)
            )
        while len(self._sent) > max(self._kept, len(wanted)):
            _, oldest = self._sent.popitem(last=False)
            forget.append(oldest.key)
        return HowToSample(specs, forget, scores)

    def _history(self, request_id: str, spec: SampleSpec, forget: list[int]) -> History:
        sent = self._sent.get(request_id)
        if sent is not None and sent.prompt is spec.prompt and sent.output_tokens <= len(spec.output):
            new = spec.output[sent.output_tokens :]
            sent.output_tokens = len(spec.output)
            self._sent.move_to_end(request_id)
            return History(sent.key, None, _packed(new))
        if sent is not None:  # another request of the same name
            forget.append(sent.key)
        self._sent[request_id] = _Sent(self._next_key, spec.prompt, len(spec.output))
        self._sent.move_to_end(request_id)
        self._next_key += 1
        return History(self._next_key - 1, _packed(spec.prompt), _packed(spec.output))


@dataclass(slots=True)
class _Kept:
    prompt: list[int]
    output: list[int] = field(default_factory=list)


class KeptHistories:
    """The sampling rank's side: unpacks how to sample."""

    def __init__(self) -> None:
        self._kept: dict[int, _Kept] = {}

    def unpack(self, how: HowToSample) -> list[RowSpec]:
        specs: list[RowSpec] = []
        for spec in how.specs:
            prompt: Sequence[int] = ()
            output: Sequence[int] = ()
            if (history := spec.history) is not None:
                if history.prompt is not None:
                    self._kept[history.key] = _Kept(_unpacked(history.prompt))
                kept = self._kept[history.key]
                kept.output.extend(_unpacked(history.output))
                prompt, output = kept.prompt, kept.output
            sampling = _unpack_sampling(spec.sampling)
            allowed = None if spec.mask is None else unpacked_mask(spec.mask)
            allowed_ids = AllowedIds.unpacked(spec.allowed_ids) if spec.allowed_ids else None
            specs.append(SampleSpec(sampling, spec.position, prompt, output, spec.forbidden, allowed, allowed_ids))
        for scores in how.scores:
            specs[scores.first : scores.first] = [ScoreSpec(target, scores.top) for target in _unpacked(scores.targets)]
        for key in how.forget:
            self._kept.pop(key, None)
        return specs


_sampling_fields = attrgetter(*PackedSampling.__struct_fields__)


def _pack_sampling(sampling: Sampling) -> PackedSampling:
    return PackedSampling(*_sampling_fields(sampling))


def _unpack_sampling(packed: PackedSampling) -> Sampling:
    return Sampling(**msgspec.structs.asdict(packed))


def _packed(tokens: Sequence[int]) -> bytes:
    return np.array(tokens, dtype=np.int32).tobytes()


def _unpacked(packed: bytes) -> list[int]:
    return [int(token) for token in np.frombuffer(packed, dtype=np.int32)]
