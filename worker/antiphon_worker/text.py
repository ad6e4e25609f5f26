"""The text of one request: detokenised, cut at stop strings, each token's log-probability sent with its text.

One `OutputText` sees every output id of a request, wherever it was sampled (here, or the first one on a prefill
worker), in order. Its text is a function of the ids alone, so the ids of an earlier attempt, replayed, put it into the
very state that the earlier worker was in, held-back text included. What no ids give back are log-probabilities that
waited for such text: each is told when it is held, too, and comes back with the replay.

(Where an answer keeps to a grammar, the engine's matcher is of the same kind: the ids so far, replayed, give it back.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from antiphon_engine.interface import FinishReason, TokenLogprob

from antiphon_worker.detokenize import Detokenizer
from antiphon_worker.stops import StopStrings


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What some tokens brought."""

    token_ids: tuple[int, ...]
    """Those that count: none after a stop string."""
    text: str
    logprobs: tuple[TokenLogprob, ...]
    """Of the tokens whose text has been sent by now."""
    held_logprobs: tuple[TokenLogprob, ...]
    """Of those of these tokens whose text is held back."""
    finish: FinishReason | None
    stop_reason: str
    """With `finish` STOP: the stop string or the stop token id; empty for EOS."""


@dataclass(slots=True)
class _HeldLogprob:
    logprob: TokenLogprob
    begin: int = 0
    end: int | None = None
    """Where the token's text stands in the whole text, in characters; None while it is part of a character."""


class OutputText:
    """Turns the output ids of one request into what a gateway may send."""

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: StopStrings,
        *,
        min_tokens: int = 0,
        stop_token_ids: frozenset[int] = frozenset(),
        include_stop_text: bool = False,
    ) -> None:
        self._detokenizer = detokenizer
        self._stops = stops
        self._min_tokens = min_tokens
        self._stop_token_ids = stop_token_ids
        self._include_stop_text = include_stop_text
        self._tokens = 0
        self._decoded_chars = 0
        self._sent_chars = 0
        self._held: deque[_HeldLogprob] = deque()

    @property
    def tokens(self) -> int:
        """Output ids seen so far, those of earlier attempts included."""
        return self._tokens

    def replay(self, token_ids: Sequence[int], held_logprobs: Sequence[TokenLogprob] = ()) -> None:
        """Take ids of an earlier attempt, whose text has been sent as far as it was safe. `held_logprobs`: of the last
        of them, those that were told as held and not sent since."""
        first_held = len(token_ids) - len(held_logprobs)
        for index, token_id in enumerate(token_ids):
            self._tokens += 1
            self._advance(
                self._detokenizer.push(token_id), held_logprobs[index - first_held] if index >= first_held else None
            )

    def push(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob], finish: FinishReason | None
    ) -> TextDelta:
        """Take new ids. `finish` STOP says that the last of them is EOS or a stop id, which has no text of its own."""
        texts: list[str] = []
        last = len(token_ids) - 1
        for index, token_id in enumerate(token_ids):
            self._tokens += 1
            logprob = logprobs[index] if index < len(logprobs) else None
            if index == last and finish is FinishReason.STOP and not self._include_stop_text:
                continue
            step_text, matched = self._advance(self._detokenizer.push(token_id), logprob)
            texts.append(step_text)
            if matched is not None:
                return TextDelta(
                    tuple(token_ids[: index + 1]), "".join(texts), self._cut_logprobs(), (), FinishReason.STOP, matched
                )
        stop_reason = ""
        if finish is not None:
            rest, matched = self._advance(self._detokenizer.flush(), None)
            texts.append(rest)
            if matched is not None:
                return TextDelta(tuple(token_ids), "".join(texts), self._cut_logprobs(), (), FinishReason.STOP, matched)
            held = self._stops.flush()
            self._sent_chars += len(held)
            texts.append(held)
            if finish is FinishReason.STOP and token_ids and token_ids[-1] in self._stop_token_ids:
                stop_reason = str(token_ids[-1])
        if finish is not None:
            return TextDelta(tuple(token_ids), "".join(texts), self._all_logprobs(), (), finish, stop_reason)
        ready = self._ready_logprobs()
        return TextDelta(tuple(token_ids), "".join(texts), ready, self._held_of_last(len(logprobs)), None, "")

    def _held_of_last(self, count: int) -> tuple[TokenLogprob, ...]:
        """Of the last `count` tokens, those that wait for their text."""
        first = max(0, len(self._held) - count)
        return tuple(held.logprob for held in islice(self._held, first, None)) if self._held else ()

    def _advance(self, decoded: str, logprob: TokenLogprob | None) -> tuple[str, str | None]:
        begin = self._decoded_chars
        self._decoded_chars += len(decoded)
        if logprob is not None:
            self._held.append(_HeldLogprob(logprob))
        if decoded or not self._detokenizer.holds_back:
            for held in self._held:
                if held.end is None:
                    held.begin, held.end = begin, self._decoded_chars
        step = self._stops.push(decoded, may_stop=self._tokens > self._min_tokens)
        self._sent_chars += len(step.text)
        return step.text, step.matched

    def _ready_logprobs(self) -> tuple[TokenLogprob, ...]:
        """Of tokens whose text is sent; of tokens without text, once the text before them is."""
        ready: list[TokenLogprob] = []
        while self._held:
            end = self._held[0].end
            if end is None or end > self._sent_chars:
                break
            ready.append(self._held.popleft().logprob)
        return tuple(ready)

    def _cut_logprobs(self) -> tuple[TokenLogprob, ...]:
        """At a stop string: of tokens with some text before the cut."""
        kept = tuple(held.logprob for held in self._held if held.end is not None and held.begin < self._sent_chars)
        self._held.clear()
        return kept

    def _all_logprobs(self) -> tuple[TokenLogprob, ...]:
        kept = tuple(held.logprob for held in self._held)
        self._held.clear()
        return kept
