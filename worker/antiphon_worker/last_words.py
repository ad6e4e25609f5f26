"""What a container says when it ends, where its orchestrator looks for it."""

from __future__ import annotations

import logging
from pathlib import Path

TERMINATION_LOG = Path("/dev/termination-log")
"""Made by a kubelet for each container. Elsewhere there is none."""
GANG_UNSCHEDULABLE = "GangUnschedulable: "
"""How the last words begin of a worker whose ranks find no place. The operator's condition is made of them."""

log = logging.getLogger("antiphon.worker")


def leave_last_words(words: str, path: Path = TERMINATION_LOG) -> None:
    if not path.is_file():
        return
    try:
        path.write_text(words)
    except OSError as error:
        log.warning("the last words cannot be written to %s: %s", path, error.strerror)
