"""The operator's writer of records, at work for the length of a block."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from antiphon_operator.runtime.redis_records import RecordWriter


@contextlib.asynccontextmanager
async def running(writer: RecordWriter) -> AsyncIterator[RecordWriter]:
    task = asyncio.create_task(writer.run())
    try:
        yield writer
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
