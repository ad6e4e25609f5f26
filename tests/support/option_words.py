"""Words of a command line, read by the options' own parser: shows that a process would take them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from antiphon.configuration import OptionSpec, add_arguments


def parsed(options: Sequence[OptionSpec], words: Sequence[str]) -> argparse.Namespace:
    """Raises SystemExit, as the process would, on a word that is not understood."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_arguments(parser, options, positional=("model",))
    return parser.parse_args(list(words))
