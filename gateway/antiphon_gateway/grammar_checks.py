"""Whether grammars compile, said before any worker is asked.

A grammar is compiled as the worker will do it, by the same code with the same limits, with the tokenizer of the
model's card. In a thread, as it may take a while (llguidance releases the interpreter's lock); what was said of a
grammar is kept, as the same schemas come again and again. Matchers are not kept: nothing is generated here.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from antiphon_proto import worker_pb2 as pb

from antiphon_gateway import errors
from antiphon_gateway.models import Model

if TYPE_CHECKING:
    from llguidance import LLTokenizer

log = logging.getLogger("antiphon.gateway")

KEPT_VERDICTS = 4096
KEPT_TOKENIZERS = 8
DEADLINE_S = 10.0
"""For one grammar, those before it included. llguidance's limits end each after a fraction of a second."""

_KINDS = {
    pb.GRAMMAR_JSON_SCHEMA: "json_schema",
    pb.GRAMMAR_JSON_OBJECT: "json_object",
    pb.GRAMMAR_REGEX: "regex",
    pb.GRAMMAR_CHOICE: "choice",
    pb.GRAMMAR_LARK: "lark",
}


class GrammarChecks:
    """Owned by the gateway; `close` ends its threads."""

    def __init__(self, threads: int = 2) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="antiphon-grammar")
        self._verdicts: OrderedDict[bytes, str] = OrderedDict()
        """What is wrong with each; empty: nothing. Last used last. Used on the event loop only."""
        self._running: dict[bytes, asyncio.Future[str]] = {}
        self._tokenizers: OrderedDict[str, LLTokenizer] = OrderedDict()
        self._lock = threading.Lock()

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def check(self, grammar: pb.Grammar, model: Model, param: str) -> None:
        """Raises ApiError: 400 naming `param` for a grammar that does not compile, 503 where there is no time."""
        key = _key(grammar, model)
        problem = self._verdicts.get(key)
        if problem is None:
            problem = await self._compile(key, grammar, model)
        else:
            self._verdicts.move_to_end(key)
        if problem:
            raise errors.invalid(f"{param}: {problem}", param=param, code="invalid_grammar")

    async def _compile(self, key: bytes, grammar: pb.Grammar, model: Model) -> str:
        """Once for all who ask at the same time, and whoever of them leaves."""
        running = self._running.get(key)
        if running is None:
            loop = asyncio.get_running_loop()
            running = loop.run_in_executor(self._pool, self._problem_of(grammar, model))
            self._running[key] = running
            running.add_done_callback(lambda done: self._take(key, done))
        try:
            async with asyncio.timeout(DEADLINE_S):
                return await asyncio.shield(running)
        except TimeoutError:
            raise errors.busy_with_grammars(DEADLINE_S) from None

    def _take(self, key: bytes, done: asyncio.Future[str]) -> None:
        del self._running[key]
        if done.cancelled():
            return
        if done.exception() is not None:
            log.error("a grammar could not be checked", exc_info=done.exception())
            return
        self._verdicts[key] = done.result()
        while len(self._verdicts) > KEPT_VERDICTS:
            self._verdicts.popitem(last=False)

    def _problem_of(self, grammar: pb.Grammar, model: Model) -> Callable[[], str]:
        kind, text = _KINDS[grammar.kind], grammar.text

        def compile_it() -> str:
            from antiphon_proto.grammars import GrammarInvalid, NoGrammars, compile_grammar

            try:
                compile_grammar(self._tokenizer(model), kind, text)
            except (GrammarInvalid, NoGrammars) as error:
                return str(error)
            except BaseException as error:  # also a panic of the library, which is no Exception
                log.exception("a grammar of kind %s could not be compiled", kind)
                return f"it cannot be compiled: {type(error).__name__}"
            return ""

        return compile_it

    def _tokenizer(self, model: Model) -> LLTokenizer:
        """On a thread of the pool. Raises NoGrammars."""
        from antiphon_proto.grammars import load_tokenizer

        with self._lock:
            tokenizer = self._tokenizers.get(model.digest)
            if tokenizer is None:
                tokenizer = load_tokenizer(model.tokenizer_json, model.vocab_size, list(model.eos_token_ids))
                self._tokenizers[model.digest] = tokenizer
            self._tokenizers.move_to_end(model.digest)
            while len(self._tokenizers) > KEPT_TOKENIZERS:
                self._tokenizers.popitem(last=False)
            return tokenizer


def _key(grammar: pb.Grammar, model: Model) -> bytes:
    return hashlib.sha256(f"{model.digest}\0{grammar.kind}\0{grammar.text}".encode()).digest()
