"""What making token ids of a chat costs, apart from everything else: microseconds a request and a token.

Chats grow over eight turns, as a client sends them: each request is the whole conversation so far. At each turn, and in
turn within a round, the same chats are

- rendered by the gateway's template, sandboxed (`render`);
- rendered and encoded by `transformers`' apply_chat_template (`transformers`);
- encoded whole by the tokenizers library, text given (`plain`: what every ratio is to);
- encoded by the gateway with nothing kept of them (`cold`), and with the earlier turns kept (`kept`), text given;
- the same with `--encoding-cache-bytes 0` (`off`).

One core; processor time of the process, so what others do on the machine counts little, and all is in turn, so that
what it does count for counts for all. Medians over the rounds, with the least and the most of the ratios in a round.
All ids are compared.

    python -m benchmarks.tokenization.run --output benchmarks/tokenization/results/run.json
    python -m benchmarks.tokenization.run --table benchmarks/tokenization/results/run.json
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = "false"

import msgspec
from antiphon_gateway.templating import ChatTemplate
from antiphon_gateway.tokenization import TokenCodec
from antiphon_gateway.tokenization_cache import EncodingCache
from transformers import PreTrainedTokenizerFast

from benchmarks.tokenization.chats import TURNS, Chats, Message, corpus
from benchmarks.tokenization.families import Family, families
from benchmarks.tokenization.table import markdown

CACHE_BYTES = 32 * 1024 * 1024
LENGTHS = (300, 1000, 4000, 16000)
"""Tokens of the last turn's prompt, about."""
CHATS_TOKENS = 12000
"""Chats of one sample have this many tokens together at their last turn, about, and there are two at least."""
TOKENS = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
_LIMIT = 10**8

Ids = list[int]


class Row(msgspec.Struct):
    """One tokenizer, one length, one turn: of each way the microseconds a request in each round."""

    tokenizer: str
    length: int
    turn: int
    prompt_tokens: float
    """Mean of the chats."""
    cut: bool
    """The gateway cuts this tokenizer's texts, so it can keep encodings."""
    us: dict[str, list[float]]


class Result(msgspec.Struct):
    command: str
    at: str
    load_average: list[float]
    """Before and after, over one minute."""
    processors: int
    versions: dict[str, str]
    rounds: int
    texts_compared: int
    rows: list[Row]


class Ways:
    """Each way from a chat to its ids, of one tokenizer."""

    def __init__(self, family: Family) -> None:
        self._template = ChatTemplate(family.template, TOKENS)
        self._plain = family.copy()
        self._theirs = PreTrainedTokenizerFast(tokenizer_object=family.copy(), chat_template=family.template, **TOKENS)
        self._codec = TokenCodec(family.json, EncodingCache(CACHE_BYTES))
        self._off = TokenCodec(family.json)
        self.cut = self._codec._segments is not None

    def render(self, messages: Sequence[Message]) -> str:
        return self._template.render(
            messages, tools=None, add_generation_prompt=True, extra={}, limit_characters=_LIMIT
        )

    def plain(self, text: str) -> Ids:
        ids: Ids = self._plain.encode(text, add_special_tokens=False).ids
        return ids

    def transformers(self, messages: Sequence[Message]) -> Ids:
        ids: Ids = self._theirs.apply_chat_template(
            list(messages), add_generation_prompt=True, tokenize=True, return_dict=False
        )
        return ids

    def ours(self, text: str, salt: bytes) -> Any:
        return self._codec.begin_chat(text, salt).finish()

    def off(self, text: str) -> Any:
        return self._off.begin_chat(text, b"").finish()


def timed(work: Callable[[Any], Any], arguments: Sequence[Any]) -> tuple[float, list[Any]]:
    """Microseconds of processor time a call, and what came."""
    begun = time.process_time_ns()
    results = [work(argument) for argument in arguments]
    return (time.process_time_ns() - begun) / 1e3 / len(arguments), results


class Measured:
    """One tokenizer and one length."""

    def __init__(self, family: Family, ways: Ways, length: int, text: str) -> None:
        self._ways = ways
        count = max(2, CHATS_TOKENS // length)
        chats = Chats(text, seed=length)
        trial = 4 * length
        characters = trial * length // len(ways.plain(ways.render(chats.chat(trial))))
        self._chats = [chats.chat(characters) for _ in range(count)]
        self.rows = [Row(family.name, length, turn, 0.0, ways.cut, {}) for turn in range(1, TURNS + 1)]
        self.compared = 0

    def round(self, number: int, *, kept: bool = True) -> None:
        """`kept`: False for a round that only warms up."""
        ways, standing = self._ways, b"kept %d" % number
        for row in self.rows:
            prompts = [chat[: 2 * row.turn] for chat in self._chats]
            salt = b"cold %d %d" % (number, row.turn)
            us = {}
            us["render"], texts = timed(ways.render, prompts)
            us["plain"], plain = timed(ways.plain, texts)
            us["cold"], cold = timed(lambda text: ways.ours(text, salt), texts)  # noqa: B023  # called at once
            us["kept"], warm = timed(lambda text: ways.ours(text, standing), texts)
            us["off"], off = timed(ways.off, texts)
            us["transformers"], theirs = timed(ways.transformers, prompts)
            for ids, *others in zip(plain, cold, warm, off, strict=True):
                if any(other.tolist() != ids for other in others):
                    raise RuntimeError(f"{row.tokenizer}, turn {row.turn}: other ids than the plain encode's")
            if theirs != plain:
                raise RuntimeError(f"{row.tokenizer}, turn {row.turn}: transformers has other ids")
            self.compared += 4 * len(plain)
            row.prompt_tokens = statistics.mean(map(len, plain))
            if kept:
                for way, value in us.items():
                    row.us.setdefault(way, []).append(round(value, 2))


def measure(options: argparse.Namespace) -> Result:
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    loads = [os.getloadavg()[0]]
    text = corpus()
    cases = []
    for family in families(text):
        ways = Ways(family)
        cases += [Measured(family, ways, length, text) for length in options.lengths]
    gc.disable()
    for number in range(-1, options.rounds):
        for case in cases:
            case.round(number + 1, kept=number >= 0)
        gc.collect()
    loads.append(os.getloadavg()[0])
    return Result(
        command=f"python -m benchmarks.tokenization.run --rounds {options.rounds}",
        at=datetime.now(UTC).isoformat(timespec="seconds"),
        load_average=[round(load, 1) for load in loads],
        processors=os.cpu_count() or 0,
        versions={name: version(name) for name in ("tokenizers", "transformers", "jinja2")},
        rounds=options.rounds,
        texts_compared=sum(case.compared for case in cases),
        rows=[row for case in cases for row in case.rows],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--output", type=Path)
    parser.add_argument("--table", type=Path, help="only print the table of these results")
    options = parser.parse_args()
    if options.table is not None:
        print(markdown(msgspec.json.decode(options.table.read_bytes(), type=Result).rows))
        return
    result = measure(options)
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_bytes(msgspec.json.encode(result) + b"\n")
    print(markdown(result.rows))


if __name__ == "__main__":
    main()
