"""Options are declared once, as fields of a frozen dataclass, by the package that uses them.

`option()` makes such a field and keeps its help text beside it. The command line (`antiphon.configuration`) turns
every field `some_name` into a flag `--some-name` and an environment variable `ANTIPHON_SOME_NAME`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any


def option(default: Any, help: str, *, choices: Sequence[str] = (), secret: bool = False) -> Any:
    """A dataclass field that is an option.

    `default` also gives the type: str, int, float, bool, or a tuple of str (a flag that may be repeated; in the
    environment, separated by commas). `secret` values are never logged.
    """
    metadata = {"help": help, "choices": tuple(choices), "secret": secret}
    return dataclasses.field(default=default, metadata=metadata)
