"""What one rendering of a chat template may take: processor time, and characters of what it makes on the way.

Kept for each thread: a rendering begins and ends in one. Whatever goes beyond it raises TemplateWild, which is the
request's 400, as any other fault of a template.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterable
from typing import Any

import jinja2

LIMIT_CPU_S = 5.0
"""A chat of thousands of messages takes milliseconds."""
ROOM = 32 * 1024 * 1024
"""Characters beyond what the length of the prompt lets expect."""
TIMES_PROMPT = 16
"""As often as templates may copy what they are given, on its way into the prompt."""
FREE = 1024
"""Shorter texts are not counted: what can be made of them is bounded by the time that it takes."""
_TICKS_BETWEEN_LOOKS = 64
_ITEM = 48
"""What an item of a list counts for."""
_WIDE_NUMBER = re.compile(r"[0-9]{7}")
_BROAD_NUMBER = re.compile(r"[0-9]{4}")
_WIDTH_FROM_VALUE = re.compile(r"%[^a-zA-Z%]*\*|\{[^{}]*\{")
_WIDEST = 10**6


class TemplateWild(jinja2.TemplateError):
    """The template takes too long or makes too much; the message says which."""


class _Allowance(threading.local):
    until_s = 0.0
    ticks = 0
    characters = ROOM


_left = _Allowance()


def begin(limit_characters: int = 0) -> None:
    """A template is compiled, or rendered to a prompt of at most so many characters, in this thread, from now on."""
    _left.until_s = time.thread_time() + LIMIT_CPU_S
    _left.ticks = 0
    _left.characters = ROOM + TIMES_PROMPT * limit_characters


def tick() -> None:
    _left.ticks += 1
    if _left.ticks % _TICKS_BETWEEN_LOOKS == 0 and time.thread_time() > _left.until_s:
        raise TemplateWild("it takes too long")


def pay(characters: int) -> None:
    left = _left.characters - characters
    if left < 0:
        raise TemplateWild("it makes too much on the way to the prompt")
    _left.characters = left


def weight(value: Any) -> int:
    """Characters that it has, or about as many as it comes to as a text. What is nested is counted as it is found:
    a small value may hold itself a thousand times."""
    if isinstance(value, str):
        return len(value)
    if not isinstance(value, list | tuple | dict):
        return 0
    open_values: list[Any] = [value]
    total = 0
    while open_values:
        item = open_values.pop()
        if isinstance(item, str):
            total += len(item)
        elif isinstance(item, list | tuple | dict):
            open_values.extend(item)
            if isinstance(item, dict):
                open_values.extend(item.values())
        total += _ITEM
        if total > _left.characters:
            pay(total)
    return total


def joined(values: tuple[Any, ...]) -> str:
    """What `~` makes."""
    characters = 0
    for value in values:
        characters += weight(value)
    if characters > FREE:
        pay(characters)
    return "".join(map(str, values))


def added(terms: tuple[Any, ...]) -> Any:
    """What `+` makes of several terms, from left to right."""
    characters = 0
    for term in terms:
        if type(term) is not str:
            return _added_one_by_one(terms)
        characters += len(term)
    if characters > FREE:
        pay(characters)
    return "".join(terms)


def _added_one_by_one(terms: tuple[Any, ...]) -> Any:
    result = terms[0]
    for term in terms[1:]:
        if isinstance(result, str | list | tuple):
            pay(_length(result) + _length(term))
        result = result + term
    return result


def multiply(left: Any, right: Any) -> Any:
    for value, count in ((left, right), (right, left)):
        if isinstance(count, int):
            pay(max(0, count) * _length(value))
    if isinstance(left, int) and isinstance(right, int):
        pay(left.bit_length() + right.bit_length())
    return left * right


def power(left: Any, right: Any) -> Any:
    if isinstance(left, int) and isinstance(right, int):
        pay(_ITEM * left.bit_length() * abs(right))
    return left**right


def modulo(left: Any, right: Any) -> Any:
    if isinstance(left, str):
        pay_format(left, right if isinstance(right, tuple) else (right,))
    return left % right


def pay_format(form: str, values: Iterable[Any]) -> None:
    """A format may name a width, or take it from a value."""
    values = tuple(values)
    wide = _WIDE_NUMBER.search(form) is not None
    if not wide and _WIDTH_FROM_VALUE.search(form):
        wide = any(isinstance(value, int) and abs(value) > _WIDEST for value in values)
    if wide:
        raise TemplateWild("it formats a value too wide")
    pay((form.count("%") + form.count("{")) * _WIDEST if _has_width(form) else len(form))
    for value in values:
        pay(weight(value) * max(1, form.count("{")))


def _has_width(form: str) -> bool:
    return _BROAD_NUMBER.search(form) is not None or _WIDTH_FROM_VALUE.search(form) is not None


def _length(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    return _ITEM * len(value) if isinstance(value, list | tuple) else 0
