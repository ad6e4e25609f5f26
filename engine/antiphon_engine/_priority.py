"""The engine computes after everything else of its process.

A worker's heartbeats, cancels and pulls run on threads that need little time and need it at once; a step needs all
the time there is. Where every core is busy, the kernel would give each an equal share, and a worker that computes
would seem dead to its peers. So the engine's thread, and with it the compute threads that it starts (OpenMP's and
torch's inherit it), run at a lower priority than the rest of the process. Nobody loses: compute takes what is left.
"""

from __future__ import annotations

import logging
import os
import sys
import threading

logger = logging.getLogger("antiphon.engine")

NICENESS = 5
"""Added to the process's own: about a third of the weight of a thread that is not lowered."""


def compute_after_others() -> None:
    """Lower the calling thread's priority, before it starts threads of its own. Only Linux has it for each thread."""
    if sys.platform != "linux":
        return
    thread_id = threading.get_native_id()
    try:
        os.setpriority(os.PRIO_PROCESS, thread_id, os.getpriority(os.PRIO_PROCESS, thread_id) + NICENESS)
    except OSError as error:  # a seccomp profile may forbid it; the engine computes all the same
        logger.warning("compute threads keep the priority of the process: %s", error)
