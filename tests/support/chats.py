"""Chats of several turns to load a cluster with, and how much of their prompts could be reused at best.

A *chat* is read from a file (tests/data/ATTRIBUTION.md says where those come from) and gets a long system prompt, which
it shares with the other chats of its group. Where the file has the assistant's turns they are the history of the next
turn, whatever the model says; otherwise the model's own answers are.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from antiphon_gateway.models import Model
from antiphon_kvtransfer.identity import BlockHash

Message = Mapping[str, str]

_LIMIT_CHARACTERS = 1_000_000

_WORDS = """
answer ask before book brief careful certain change check clear close counter customer day delivery detail early every
exact follow friendly full guest help hour item keep later list manner menu morning name never note number offer open
order other page person plain point polite price question reason repeat reply rule same season service short simple
size small sort standard step store sure table tell thing time total usual visit wait week word write
"""


@dataclass(frozen=True, slots=True)
class Chat:
    name: str
    users: tuple[str, ...]
    assistants: tuple[str, ...] = ()
    """Recorded answers; empty: the model's own go on."""
    system: str = ""

    def messages(self, answers: Sequence[str]) -> list[Message]:
        """The prompt of the turn after so many answers."""
        said = [{"role": "system", "content": self.system}]
        for user, answer in zip(self.users, [*answers, None], strict=False):
            said.append({"role": "user", "content": user})
            if answer is not None:
                said.append({"role": "assistant", "content": answer})
        return said


def read_mtbench(path: Path) -> list[Chat]:
    """Two questions each, the second about the answer to the first."""
    rows = (json.loads(line) for line in path.read_text().splitlines())
    return [Chat(f"mtbench-{row['id']}", tuple(row["turns"])) for row in rows]


def read_taskmaster(path: Path) -> list[Chat]:
    """Dialogues in which user and assistant take turns; those that do not are left out."""
    chats = []
    for line in path.read_text().splitlines():
        row = json.loads(line)
        said = [(message["role"], message["content"]) for message in row["messages"]]
        if [role for role, _ in said] == ["user", "assistant"] * (len(said) // 2):
            texts = [text for _, text in said]
            chats.append(Chat(row["id"], tuple(texts[::2]), tuple(texts[1::2])))
    return chats


def with_system_prompts(chats: Sequence[Chat], *, groups: int, words: int, nonce: str) -> list[Chat]:
    """Each group of chats gets one long system prompt. Another `nonce`: prompts that share nothing with these."""
    prompts = [_system_prompt(number, words, nonce) for number in range(groups)]
    return [replace(chat, system=prompts[number % groups]) for number, chat in enumerate(chats)]


def _system_prompt(number: int, words: int, nonce: str) -> str:
    words_known = _WORDS.split()
    dice = random.Random(f"system prompt {number}")
    rules = []
    while words > 0:
        length = min(words, dice.randrange(8, 15))
        words -= length
        rules.append(f"Rule {len(rules) + 1}: {' '.join(dice.choice(words_known) for _ in range(length))}.")
    return f"[{nonce} {number}] You are the assistant of house {number}. {' '.join(rules)}"


class IdealCache:
    """One cache shared by all workers, without a limit, filled the moment that a prompt is known: an upper bound.

    What the model answered is in it too, with the end of its turn, as the next turn's template writes it.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self._blocks: set[BlockHash] = set()

    def hit_tokens(self, messages: Iterable[Message]) -> int:
        """Tokens of this prompt that need not be computed; from now on all of it is there."""
        chain, tokens = self._chain(messages, add_generation_prompt=True)
        held = next((at for at, block in enumerate(chain) if block not in self._blocks), len(chain))
        self._blocks.update(chain)
        return min(held * self._model.block_tokens, (tokens - 1) // self._model.block_tokens * self._model.block_tokens)

    def answered(self, messages: Sequence[Message], answer: str) -> None:
        chain, _ = self._chain([*messages, {"role": "assistant", "content": answer}], add_generation_prompt=False)
        self._blocks.update(chain)

    def _chain(self, messages: Iterable[Message], *, add_generation_prompt: bool) -> tuple[tuple[BlockHash, ...], int]:
        template = self._model.template
        assert template is not None, "the model has no chat template"
        text = template.render(
            list(messages),
            tools=None,
            add_generation_prompt=add_generation_prompt,
            extra={},
            limit_characters=_LIMIT_CHARACTERS,
        )
        ids = self._model.codec.encode(text, add_special_tokens=False)
        return self._model.prompt(ids, b"").chain, len(ids)
