"""Grammars of requests: compiled once, a matcher for each request, and masks of what may come next.

A mask says which token ids may follow a request's output. It depends on that output alone, so it is computed as soon
as a token is known (`RequestGrammar.advance`, when a step is committed), on a thread of its own, while the model
already runs the next step; the sampler asks for it (`bits`) when the logits are there. llguidance computes without
the interpreter's lock.

Compiling may take a while, so it has a thread of its own: neither steps nor the masks of others wait for it. A request
whose grammar is not compiled yet computes its prompt but for the last token, which would be sampled after.

A matcher's state is a function of the output ids. So an answer that another worker began goes on by taking its ids
first, and a preempted request keeps its matcher, as its output stays.

What goes wrong is the request's own: `failure` says it, its mask is None then, and whatever is sampled is dropped.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from antiphon_engine.interface import Grammar, GrammarKind, ModelInfo

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

logger = logging.getLogger("antiphon.engine")

KEPT_GRAMMARS = 128
MASK_THREADS = 2
MASK_DEADLINE_S = 30.0
"""For one mask. llguidance's own limits end it after some 20 ms of work; the rest is for a machine that has no time."""

_Key = tuple[GrammarKind, str]


class _Stage(enum.Enum):
    AT_START = "at_start"
    """Reasoning may begin, or the grammar."""
    IN_REASONING = "in_reasoning"
    IN_GRAMMAR = "in_grammar"


class Grammars:
    """Of one engine's model. Methods from any thread."""

    def __init__(self, info: ModelInfo, kept: int = KEPT_GRAMMARS) -> None:
        self._info = info
        self._kept = kept
        self._compiled: OrderedDict[_Key, LLMatcher] = OrderedDict()
        """Last used last; they are copied, never advanced."""
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._compiling = ThreadPoolExecutor(1, thread_name_prefix="antiphon-grammar")
        self._masking = ThreadPoolExecutor(MASK_THREADS, thread_name_prefix="antiphon-mask")

    def close(self) -> None:
        self._compiling.shutdown(wait=False, cancel_futures=True)
        self._masking.shutdown(wait=False, cancel_futures=True)

    def matcher(self, grammar: Grammar) -> LLMatcher:
        """A new one, at the beginning. Compiles where it must: on a thread of `begin`. Raises ValueError."""
        key = (grammar.kind, grammar.text)
        base = self._known(key)
        if base is None:
            from antiphon_proto.grammars import compile_grammar

            base = compile_grammar(self._loaded_tokenizer(), grammar.kind.value, grammar.text)
            with self._lock:
                self._compiled[key] = base
                while len(self._compiled) > self._kept:
                    self._compiled.popitem(last=False)
        return base.deep_copy()

    def begin(self, grammar: Grammar, work: Callable[[], None]) -> None:
        """Have `work`, which asks for the matcher, done where it holds nobody up."""
        known = self._known((grammar.kind, grammar.text)) is not None
        self._run(self._masking if known else self._compiling, work)

    def go_on(self, work: Callable[[], None]) -> None:
        """Have a mask computed."""
        self._run(self._masking, work)

    def _run(self, pool: ThreadPoolExecutor, work: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # closed: nobody waits for it any more
            pool.submit(work)

    def anything_but_the_end(self) -> bytes:
        """The mask of an output whose grammar has not begun."""
        size = self._info.vocab_size
        bits = bytearray(b"\xff" * (-(-size // 32) * 4))
        for token_id in self._info.eos_token_ids:
            bits[token_id // 8] &= ~(1 << token_id % 8)
        return bytes(bits)

    def _known(self, key: _Key) -> LLMatcher | None:
        with self._lock:
            base = self._compiled.get(key)
            if base is not None:
                self._compiled.move_to_end(key)
            return base

    def _loaded_tokenizer(self) -> LLTokenizer:
        """On the thread that compiles."""
        if self._tokenizer is None:
            from antiphon_proto.grammars import load_tokenizer

            info = self._info
            self._tokenizer = load_tokenizer(info.tokenizer_json, info.vocab_size, list(info.eos_token_ids))
        return self._tokenizer


class RequestGrammar:
    """Where one request's output is in its grammar. `start` once; then `advance` with each token, by one thread."""

    def __init__(
        self, grammars: Grammars, grammar: Grammar, output: Sequence[int], on_ready: Callable[[], None]
    ) -> None:
        """`output`: of an earlier attempt. `on_ready` is called once, on any thread, when `is_ready` has come true."""
        self._grammars = grammars
        self._grammar = grammar
        self._output = tuple(output)
        self._on_ready = on_ready
        self._matcher: LLMatcher | None = None
        self._stage = _Stage.IN_GRAMMAR
        if grammar.after_token_ids:
            self._stage = _Stage.IN_REASONING if grammar.opening_token_id is None else _Stage.AT_START
        self._before: list[int] = []
        """The last ids before it began, as many as `after_token_ids` has."""
        self._mask: Future[bytes | None] = Future()
        self.is_ready = False
        """Compiled, or failed: a step may sample for it."""
        self.failure = ""

    def start(self) -> None:
        first = self._mask

        def work() -> None:
            self._work(first, self._output)
            self.is_ready = True
            self._on_ready()

        self._grammars.begin(self._grammar, work)

    def advance(self, token_ids: Sequence[int]) -> None:
        """Its output has grown: have the next mask computed. Returns at once."""
        previous, self._mask = self._mask, Future()
        mask, taken = self._mask, tuple(token_ids)
        previous.add_done_callback(lambda _: self._grammars.go_on(lambda: self._work(mask, taken)))

    def bits(self) -> bytes | None:
        """The mask for the next token: bit i % 8 of byte i // 8 says whether id i may follow. Waits for it.

        None: there is none, see `failure`.
        """
        try:
            return self._mask.result(timeout=MASK_DEADLINE_S)
        except TimeoutError:
            self.failure = f"the grammar's mask was not there after {MASK_DEADLINE_S:.0f} s"
            return None

    def _work(self, mask: Future[bytes | None], token_ids: Sequence[int]) -> None:
        bits: bytes | None = None
        try:
            if not self.failure:
                bits = self._next_mask(token_ids)
        except BaseException as error:  # noqa: BLE001 - also a panic of the library; it is this request's alone
            self.failure = str(error) or type(error).__name__
            logger.warning("a request's grammar failed: %s", self.failure)
        mask.set_result(bits)

    def _next_mask(self, token_ids: Sequence[int]) -> bytes:
        from antiphon_proto.grammars import problem_of

        if self._matcher is None:
            self._matcher = self._grammars.matcher(self._grammar)
        for token_id in token_ids:
            self._take(self._matcher, token_id)
        if self._stage is _Stage.IN_REASONING:
            return self._grammars.anything_but_the_end()
        bits = self._matcher.compute_bitmask()
        if problem := problem_of(self._matcher):
            raise ValueError(problem)
        opening = self._grammar.opening_token_id
        if self._stage is _Stage.AT_START and opening is not None:
            return _with(bits, opening)
        return bits

    def _take(self, matcher: LLMatcher, token_id: int) -> None:
        if self._stage is _Stage.AT_START:
            opens = token_id == self._grammar.opening_token_id
            self._stage = _Stage.IN_REASONING if opens else _Stage.IN_GRAMMAR
            if opens:
                return
        if self._stage is _Stage.IN_REASONING:
            after = self._grammar.after_token_ids
            self._before = [*self._before, token_id][-len(after) :]
            if tuple(self._before) == after:
                self._stage = _Stage.IN_GRAMMAR
        elif not matcher.consume_token(token_id):
            raise ValueError(f"the grammar does not allow token {token_id} where the output has it")


def _with(bits: bytes, token_id: int) -> bytes:
    wider = bytearray(bits)
    wider[token_id // 8] |= 1 << token_id % 8
    return bytes(wider)
