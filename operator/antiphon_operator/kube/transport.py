"""One request to the API server, brought to an answer: deadline, retries, permission to write, count.

Owned by one `KubeClient`, on one event loop. Three rules hold for every request:

* each try has a deadline, and all tries together have one too;
* a server that says "not now" (429, 503, any 5xx, no connection) is asked again after what `Retry-After` says, or
  after a back-off with jitter, a few times; the request keeps its slot while it waits, so that a server in trouble
  gets fewer requests from us and not more;
* a request that changes something is sent only while `may_write()` is true, asked when the connection stands and the
  next step is to write to it: a process that was stopped for longer than its Lease lasts sends nothing when it goes on.

All that is sent here may be sent twice: applies, merge patches, deletes of a uid, and creations under a given name.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import aiohttp
from aiohttp.client_reqrep import ClientResponse
from aiohttp.connector import Connection

from antiphon_operator.kube.access import ClusterAccess
from antiphon_operator.kube.errors import ApiError, ApiUnavailable, NotLeader, Unauthorized, refusal
from antiphon_operator.kube.metrics import API_REQUESTS

DEADLINE_S = 10.0
CONCURRENCY = 16


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How long "not now" is taken for an answer to be asked again."""

    tries: int = 5
    patience_s: float = 30.0
    """All tries and waits of one request."""
    first_wait_s: float = 0.2
    longest_wait_s: float = 10.0

    def wait_s(self, failures: int, retry_after_s: float | None, jitter: float) -> float:
        """Before the next try, after `failures` of them; `jitter` is in [0, 1). Never shorter than was asked for,
        unless that is longer than `longest_wait_s`."""
        if retry_after_s is not None:
            return min(retry_after_s, self.longest_wait_s) * (1 + jitter / 4)
        return min(self.first_wait_s * 2.0 ** (failures - 1), self.longest_wait_s) * (0.5 + jitter / 2)


@dataclass(frozen=True, slots=True)
class Call:
    """One request. `verb` and `kind` are for the metric, `about` for messages."""

    verb: str
    kind: str
    about: str
    method: str
    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None
    content_type: str = "application/json"
    deadline_s: float = DEADLINE_S

    def __str__(self) -> str:
        return f"{self.verb} {self.kind} {self.about}".rstrip()


class Transport:
    """See the module's docstring."""

    def __init__(
        self,
        access: ClusterAccess,
        *,
        may_write: Callable[[], bool],
        retries: RetryPolicy,
        concurrency: int = CONCURRENCY,
        random_source: random.Random | None = None,
    ) -> None:
        self._access = access
        self._may_write = may_write
        self._retries = retries
        self._concurrency = concurrency
        self._slots = asyncio.Semaphore(concurrency)
        self._random = random_source or random.Random()
        self._session: aiohttp.ClientSession | None = None

    async def send(self, call: Call) -> bytes:
        """The body of a good answer. Raises ApiError of the kind that fits, NotLeader or AccessError."""
        loop = asyncio.get_running_loop()
        async with self._slots:
            give_up_at = loop.time() + self._retries.patience_s
            failures = 0
            while True:
                try:
                    return await self._try(call)
                except Unauthorized:
                    # A token that was renewed on disk: worth one more try, with what stands there now.
                    failures += 1
                    if failures > 1 or self._access.token is None:
                        raise
                    self._access.token.forget()
                except ApiUnavailable as error:
                    failures += 1
                    wait_s = self._retries.wait_s(failures, error.retry_after_s, self._random.random())
                    if failures >= self._retries.tries or loop.time() + wait_s >= give_up_at:
                        raise
                    await asyncio.sleep(wait_s)

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _try(self, call: Call) -> bytes:
        outcome = "cancelled"
        try:
            body = await self._exchange(call)
            outcome = "ok"
            return body
        except ApiError as error:
            outcome = error.outcome
            raise
        except NotLeader:
            outcome = "not_leader"
            raise
        finally:
            API_REQUESTS.labels(call.verb, call.kind, outcome).inc()

    async def _exchange(self, call: Call) -> bytes:
        headers = {"Accept": "application/json"}
        if call.body is not None:
            headers["Content-Type"] = call.content_type
        if self._access.token is not None:
            headers["Authorization"] = f"Bearer {self._access.token.value()}"
        try:
            async with (
                asyncio.timeout(call.deadline_s),
                self._opened().request(
                    call.method,
                    self._access.server + call.path,
                    params=call.query,
                    data=call.body,
                    headers=headers,
                    allow_redirects=False,
                    proxy=self._access.proxy_url,
                    server_hostname=self._access.tls_server_name,
                ) as response,
            ):
                body = await response.read()
                if 200 <= response.status < 300:
                    return body
                raise refusal(str(call), response.status, response.headers, body)
        except TimeoutError as error:
            raise ApiUnavailable(str(call), 0, "Timeout", f"no answer within {call.deadline_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise ApiUnavailable(str(call), 0, type(error).__name__, str(error) or "the connection broke") from error

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=self._concurrency, ssl=self._access.tls or False)
            self._session = aiohttp.ClientSession(
                connector=connector,
                timeout=aiohttp.ClientTimeout(total=None),
                request_class=_guarded(self._may_write),
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._session


def _guarded(may_write: Callable[[], bool]) -> type[aiohttp.ClientRequest]:
    """Requests that ask for permission with the connection in hand: before it, waits of any length may have passed."""

    class GuardedRequest(aiohttp.ClientRequest):
        async def send(self, conn: Connection) -> ClientResponse:
            if self.method != "GET" and not may_write():
                raise NotLeader(
                    f"{self.method} {self.url.path} was not sent: the Lease is not held any more and another operator "
                    "may act; this process has to end"
                )
            return await super().send(conn)

    return GuardedRequest
