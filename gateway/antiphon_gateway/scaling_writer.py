"""Tells whoever scales: writes this gateway's news of each Model into Redis, again and again.

Every `EVERY_S` all of them; and that of one Model at once when a request comes for it while it sleeps, so that waking
begins within a fraction of a second, but no more than `AT_ONCE_PER_S` times a second. Also a Model that nobody asked
for is told of: that is data. At the end the gateway's fields are removed; those of a gateway that was killed are
removed by others (`antiphon_kvtransfer.scaling_news`).

Owned by the gateway, which runs `run` as a task. What fails here (Redis, a fault of ours) is logged and tried again
with the next round: requests never notice.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping

from antiphon_kvtransfer.access import RedisAccess
from antiphon_kvtransfer.scaling_news import NewsWriter
from antiphon_policy.scaling.news import GatewayNews, encode_news

from antiphon_gateway.scaling_news import NewsDesk

log = logging.getLogger("antiphon.gateway")

EVERY_S = 2.0
AT_ONCE_PER_S = 5.0
_LAST_WORDS_S = 1.0


class ScalingWriter:
    """See the module."""

    def __init__(self, redis: RedisAccess, gateway_id: str, desk: NewsDesk) -> None:
        """Raises RedisUrlError."""
        self._writer = NewsWriter(redis, gateway_id)
        self._desk = desk
        self._told: set[str] = set()
        """Models that this gateway has a field of."""
        self._urgent: set[str] = set()
        self._hurry = asyncio.Event()

    def at_once(self, model: str) -> None:
        """A request came for a Model that sleeps."""
        self._urgent.add(model)
        self._hurry.set()

    async def run(self) -> None:
        """Until cancelled."""
        loop = asyncio.get_running_loop()
        due_at = loop.time()
        while True:
            whole = loop.time() >= due_at
            if whole:
                due_at = loop.time() + EVERY_S
            urgent, self._urgent = self._urgent, set()
            self._hurry.clear()
            try:
                await self._tell(self._desk.news() if whole else {model: self._desk.news_of(model) for model in urgent})
            except Exception:
                log.exception("news for scaling could not be told, by a fault of this gateway")
            # No sooner again than this, whoever hurries.
            await asyncio.sleep(1.0 / AT_ONCE_PER_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, due_at - loop.time())):
                    await self._hurry.wait()

    async def close(self) -> None:
        """After `run` was cancelled: take away what was told. Bounded; a Redis that is away is not waited for."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORDS_S):
                # What was under way when the task ended is not to be continued on.
                await self._writer.close()
                for model in self._told:
                    if not await self._writer.remove(model):
                        break
                await self._writer.close()

    async def _tell(self, news: Mapping[str, GatewayNews]) -> None:
        for model, told in news.items():
            if not await self._writer.write(model, encode_news(told), told.at_ms):
                return
            self._told.add(model)
        for model in self._told - self._desk.models():
            if not await self._writer.remove(model):
                return
            self._told.discard(model)
