"""What a chat has so far, and a turn of it: the question goes out with all before it, and the answer joins them.

A turn that fails leaves the chat as it was. An answer that was stopped in the middle stays, as far as it had come.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from antiphon.chat_client import Busy, ChatClient, ChatError, Kind, Message, Piece, Question

_LONGEST_WAIT_S = 300.0


@dataclass(slots=True)
class Chat:
    client: ChatClient
    model: str
    system: str = ""
    max_tokens: int | None = None
    temperature: float | None = None
    messages: list[Message] = field(default_factory=list)
    """Questions and answers, in turns; what the system is told stands before them."""

    def turn(self, text: str, show: Callable[[Piece], None], say: Callable[[str], None]) -> None:
        """Ask, and `show` the answer as it comes. Raises ChatError, and KeyboardInterrupt when it is stopped."""
        asked = Message("user", text)
        said: list[str] = []
        try:
            self._answer([*self.messages, asked], said, show, say)
        except ChatError:
            said.clear()
            raise
        finally:
            if said:
                self.messages += [asked, Message("assistant", "".join(said))]

    def _answer(
        self, messages: list[Message], said: list[str], show: Callable[[Piece], None], say: Callable[[str], None]
    ) -> None:
        if self.system:
            messages = [Message("system", self.system), *messages]
        question = Question(True, self.model, messages, self.max_tokens, self.temperature)
        try:
            self._once(question, said, show)
        except Busy as busy:
            if busy.retry_after_s > _LONGEST_WAIT_S:
                raise
            say(f"{busy} (waiting {busy.retry_after_s:.3g} s, then asking once more)")
            time.sleep(busy.retry_after_s)
            self._once(question, said, show)

    def _once(self, question: Question, said: list[str], show: Callable[[Piece], None]) -> None:
        with contextlib.closing(self.client.ask(question)) as pieces:
            for piece in pieces:
                if piece.kind is Kind.TEXT:
                    said.append(piece.text)
                show(piece)
