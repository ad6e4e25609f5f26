"""The worked examples of docs/parallelism.md: each command with what it prints.

    python -m tests.support.plan_examples

writes the outputs anew. A test compares them with what the commands print now.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from pathlib import Path

from antiphon.plan import run_plan

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "parallelism.md"
_EXAMPLE = re.compile(r"```sh\nantiphon plan (?P<words>[^\n]+)\n```\n\n```text\n(?P<output>.*?)```\n", re.DOTALL)


def written() -> dict[str, str]:
    """The outputs on the page, by the words of their commands."""
    return {match["words"]: match["output"] for match in _EXAMPLE.finditer(PAGE.read_text())}


def printed(words: str) -> str:
    """What the command prints, from the repository's folder."""
    out = io.StringIO()
    with contextlib.chdir(ROOT), contextlib.redirect_stdout(out):
        run_plan(shlex.split(words), {})
    return out.getvalue()


def main() -> None:
    def anew(match: re.Match[str]) -> str:
        words = match["words"]
        return f"```sh\nantiphon plan {words}\n```\n\n```text\n{printed(words)}```\n"

    PAGE.write_text(_EXAMPLE.sub(anew, PAGE.read_text()))


if __name__ == "__main__":
    main()
