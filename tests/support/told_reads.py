"""A read that completes, fails and ends when the test says so."""

from __future__ import annotations

import asyncio

from antiphon_kvtransfer.transport import ReadHandle, TransportError


class ToldRead(ReadHandle):
    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self._result: asyncio.Future[None] = loop.create_future()
        self._result.add_done_callback(lambda done: done.exception())
        self._ended: asyncio.Future[None] = loop.create_future()
        self.given_up = False

    async def wait(self, deadline_s: float) -> None:
        try:
            async with asyncio.timeout(deadline_s):
                await asyncio.shield(self._result)
        except TimeoutError as error:
            self._give_up()
            raise TransportError(f"not within {deadline_s:g} s") from error
        except asyncio.CancelledError:
            self._give_up()
            raise

    @property
    def ended(self) -> asyncio.Future[None]:
        return self._ended

    def complete(self) -> None:
        self._result.set_result(None)
        self._ended.set_result(None)

    def fail(self, why: str) -> None:
        self._result.set_exception(TransportError(why))

    def end(self) -> None:
        self._ended.set_result(None)

    def _give_up(self) -> None:
        self.given_up = True
        if not self._result.done():
            self.fail("given up")
