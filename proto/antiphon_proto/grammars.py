"""What a `Grammar` of the protocol means, to llguidance: the same at the gateway, which checks it, and at the worker,
which keeps to it.

Kinds are named by strings (`json_schema`, `json_object`, `regex`, `choice`, `lark`), so that neither side needs the
other's types. llguidance is imported here and nowhere before a grammar is used.

Whitespace between the parts of a JSON text is at most `MOST_WHITESPACE` characters: enough for any usual layout, and a
model that likes blanks cannot spend its whole answer on them. So a schema that bounds its values bounds its texts.
"""

from __future__ import annotations

import json

import llguidance

MOST_WHITESPACE = 20
JSON_OPTIONS: llguidance.JsonCompileOptions = {
    "whitespace_pattern": rf"[\x20\x0A\x0D\x09]{{1,{MOST_WHITESPACE}}}",
    "lenient": False,
}
"""Of every schema, also of those within a Lark grammar (their `x-guidance`)."""
_DEAD_END = "NoExtension"
_ANY_OBJECT = '{"type":"object"}'


class GrammarInvalid(ValueError):
    """The grammar cannot be compiled; the message says what is wrong with it."""


class NoGrammars(ValueError):
    """The tokenizer is of a kind that grammars cannot be compiled for; the message says why."""


def limits() -> llguidance.LLParserLimits:
    """What one grammar may cost: about 20 ms of lexer to begin with, 15 ms a token, 40 MB."""
    return llguidance.LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_lexer_states=20_000,
        max_grammar_size=100_000,
        verbose_errors=False,
    )


def load_tokenizer(tokenizer_json: bytes, vocab_size: int, eos_token_ids: list[int]) -> llguidance.LLTokenizer:
    """Of a model's card; `vocab_size`: of its logits. Takes up to a second. Raises NoGrammars."""
    if not eos_token_ids:
        raise NoGrammars("the model has no end token, so nothing could say that a structured answer is over")
    try:
        return llguidance.LLTokenizer(tokenizer_json.decode(), n_vocab=vocab_size, eos_token=eos_token_ids)
    except Exception as error:  # the library raises bare exceptions
        raise NoGrammars(f"grammars cannot be compiled for this model's tokenizer: {error}") from error


def source_of(kind: str, text: str) -> str:
    """The grammar as llguidance reads it. Raises GrammarInvalid; what compiles is said by `compile_grammar`."""
    try:
        if kind == "json_schema":
            return llguidance.LLMatcher.grammar_from_json_schema(text, overrides=JSON_OPTIONS)
        if kind == "json_object":
            return llguidance.LLMatcher.grammar_from_json_schema(_ANY_OBJECT, overrides=JSON_OPTIONS)
        if kind == "regex":
            return llguidance.LLMatcher.grammar_from_regex(text)
        if kind == "choice":
            return "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in json.loads(text))
        if kind == "lark":
            return llguidance.LLMatcher.grammar_from_lark(text)
    except ValueError as error:
        raise GrammarInvalid(_first_lines(str(error))) from error
    raise GrammarInvalid(f"{kind!r} is no kind of grammar")


def compile_grammar(tokenizer: llguidance.LLTokenizer, kind: str, text: str) -> llguidance.LLMatcher:
    """A matcher at the grammar's beginning; requests get copies of it. Raises GrammarInvalid.

    Also where it compiles and no text at all satisfies it.
    """
    matcher = llguidance.LLMatcher(tokenizer, source_of(kind, text), log_level=0, limits=limits())
    if not matcher.is_error():
        probe = matcher.deep_copy()
        probe.compute_bitmask()
        if problem := problem_of(probe):
            raise GrammarInvalid(problem)
        return matcher
    raise GrammarInvalid(_first_lines(matcher.get_error()))


def problem_of(matcher: llguidance.LLMatcher) -> str:
    """Why the matcher cannot go on, after its mask was computed. Empty: it can, or its text is complete."""
    if not matcher.is_error():
        return ""
    error = matcher.get_error()
    return "no text satisfies the grammar" if error.startswith(_DEAD_END) else _first_lines(error)


def _first_lines(text: str) -> str:
    """One line, not too long, of an error that may quote a whole grammar."""
    line = " ".join(text.split("<non-verbose/>")[0].split())
    return line if len(line) <= 500 else f"{line[:500]}..."
