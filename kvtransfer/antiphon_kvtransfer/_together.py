"""Several calls at the same time, as one."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

_T = TypeVar("_T")


async def together(calls: Iterable[Coroutine[Any, Any, _T]]) -> list[_T]:
    """What all of them return, in order, or the error of the first that fails: then the others were cancelled."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in calls]
    except ExceptionGroup as failed:
        error = failed.exceptions[0]
    else:
        return [task.result() for task in tasks]
    raise error  # Outside, so that it keeps its own cause.
