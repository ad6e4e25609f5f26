"""What all chat answers have in common, whether or not calls and reasoning are told apart in them."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence

from antiphon_proto import worker_pb2 as pb

from antiphon_gateway.answers import Frame
from antiphon_gateway.flight import Flight, Target
from antiphon_gateway.logprobs import ChatLogprobs, chat_logprobs
from antiphon_gateway.schema import ChatBody


class ChatAnswer:
    """One request's: who it is, and the ends of its stream."""

    def __init__(self, answer_id: str, body: ChatBody, target: Target) -> None:
        self._id = answer_id
        self._created = int(time.time())
        self._name = target.name
        self._model = target.model
        self._logprobs = bool(body.logprobs)
        self._top = body.top_logprobs or 0
        self._as_ids = bool(body.return_tokens_as_token_ids)
        self._include_usage = body.stream_options is not None and bool(body.stream_options.include_usage)

    @functools.cached_property
    def _frame(self) -> Frame:
        return Frame(
            id=self._id,
            object="chat.completion.chunk",
            created=self._created,
            model=self._name,
            include_usage=self._include_usage,
        )

    def _content(self, logprobs: Sequence[pb.TokenLogprob]) -> ChatLogprobs:
        return ChatLogprobs(chat_logprobs(self._model.codec, logprobs, self._top, as_ids=self._as_ids))

    def end(self, flight: Flight) -> bytes:
        return self._frame.last(flight)
