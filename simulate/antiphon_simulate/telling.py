"""What a command tells: progress on stderr, and its result on stdout alone, and in a folder where one is named."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path


def say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def tell(
    document: bytes,
    table: str,
    *,
    as_json: bool,
    out: Path | None,
    draw: Callable[[], bytes],
    page: Callable[[bytes], str],
) -> None:
    """The result as JSON or as a table. `draw` makes the plots and `page` the page that holds them, for `out` only."""
    if out is not None:
        plots = draw()
        for name, content in (
            ("result.json", document),
            ("table.txt", table.encode()),
            ("plots.png", plots),
            ("report.html", page(plots).encode()),
        ):
            (out / name).write_bytes(content)
        say(f"written: {out}/result.json, table.txt, plots.png, report.html")
    sys.stdout.write(document.decode() + "\n" if as_json else table)
    sys.stdout.flush()
