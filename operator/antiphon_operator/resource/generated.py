"""Files that are made from the types: written into a folder, or only compared with what lies there (`--check`)."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path


def stale(folder: Path, files: Mapping[str, str]) -> list[str]:
    """Names of the files (name -> contents) that are not in `folder` as they should be."""
    return [
        name
        for name, text in files.items()
        if not (folder / name).is_file() or (folder / name).read_text(encoding="utf-8") != text
    ]


def run(module: str, about: str | None, folder: Path, files: Mapping[str, str], arguments: Sequence[str] | None) -> int:
    """The command `python -m MODULE [--check] [--folder FOLDER]`: its exit code."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=about)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a file is not current")
    parser.add_argument("--folder", type=Path, default=folder, help=f"where the files lie (default: {folder})")
    options = parser.parse_args(arguments)
    old = stale(options.folder, files)
    if options.check:
        for name in old:
            sys.stderr.write(f"{options.folder / name} is not current: run python -m {module}\n")
        return 1 if old else 0
    options.folder.mkdir(parents=True, exist_ok=True)
    for name in old:
        (options.folder / name).write_text(files[name], encoding="utf-8")
    return 0
