"""Numbers among a command's words, and what is wrong with them, for `argparse`."""

from __future__ import annotations

import argparse
from collections.abc import Callable


def at_least(least: int) -> Callable[[str], int]:
    def count(word: str) -> int:
        value = int(word)
        if value < least:
            raise argparse.ArgumentTypeError(f"{word} is less than {least}")
        return value

    return count


def positive(word: str) -> float:
    value = float(word)
    if not 0.0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{word} is not more than 0")
    return value
