"""The client: closed-loop load over kept connections, in a process of its own.

Reads one `Job` a line from the standard input, opens the connections, answers "ready", waits for a line, runs the job,
and answers with one `Outcome`. So whoever measures can read the server's CPU time right before and right after.
Chats are of three kinds (`Chats`), by how much of them the server has seen before. Prompts of ids are of one length and
differ from request to request in their second half, as with a shared system prompt.

Every answer is checked: its status, and that as many events came as tokens were asked for. Other answers end the run.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import statistics
import sys
import time
from enum import StrEnum
from typing import Any

import httptools
import msgspec
import uvloop

SYSTEM_CHARACTERS = 1100
USER_CHARACTERS = 960
PROMPT_TOKEN_IDS = 2080
"""About as many tokens as the chat prompt has with a byte-level tokenizer."""
TURNS = 4
"""Of a conversation."""
CONVERSATIONS = 50
"""At once. Jobs are of whole multiples of their turns."""
DEADLINE_S = 110.0

_SYSTEM = ("You are a patient assistant who answers briefly and says what is not known. " * 20)[:SYSTEM_CHARACTERS]
_SENTENCE = "The quick brown fox jumps over the lazy dog while seven judges quietly boxed the wizard. " * 20
_nonces = itertools.count(int(time.time() * 1000) % 10**9 * 1000)


class Chats(StrEnum):
    SYSTEM = "system"
    """A system prompt that all share, and a question that nobody asked before."""
    NEW = "new"
    """Of the same length, and nothing in it that was there before."""
    TURNS = "turns"
    """Conversations of four turns, one request a turn: the system prompt and the earlier turns come again, the last
    answer and the new question are new."""


class Job(msgspec.Struct, frozen=True):
    port: int
    model: str
    endpoint: str
    """chat or completions (with the prompt as token ids)."""
    stream: bool
    tokens: int
    connections: int
    requests: int
    prompt_tokens: int = PROMPT_TOKEN_IDS
    """Of a completions prompt."""
    prompt_characters: int = SYSTEM_CHARACTERS + USER_CHARACTERS
    """Of a chat's system prompt and one question. An answer is as long as a question."""
    chats: Chats = Chats.SYSTEM


class Outcome(msgspec.Struct, frozen=True):
    wall_s: float
    first_byte_p50_ms: float
    whole_p50_ms: float
    chunks: int
    """Pieces of the chunked encoding, so writes of the server; 0 where the answer is whole."""
    request_bytes: int


class WrongAnswer(Exception):
    """The server did not answer as it was asked to; figures would mean nothing."""


def request_bytes(job: Job) -> bytes:
    """One request, head and body."""
    nonce = next(_nonces)
    common = {"model": job.model, "max_tokens": job.tokens, "stream": job.stream, "temperature": 0, "ignore_eos": True}
    if job.endpoint == "chat":
        body = common | {"messages": _messages(job, nonce)}
    else:
        half = job.prompt_tokens // 2
        own = [int(digit) for digit in f"{nonce:014d}"]
        body = common | {"prompt": [*_ids(half), *own, *_ids(half - len(own))]}
    data = msgspec.json.encode(body)
    path = "/v1/chat/completions" if job.endpoint == "chat" else "/v1/completions"
    head = (
        f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\naccept: */*\r\nuser-agent: antiphon-benchmark\r\n"
        f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


def _messages(job: Job, nonce: int) -> list[dict[str, str]]:
    system = _SYSTEM[: job.prompt_characters * SYSTEM_CHARACTERS // (SYSTEM_CHARACTERS + USER_CHARACTERS)]
    characters = job.prompt_characters - len(system)
    if job.chats is Chats.NEW:
        system = f"{nonce:014d} {system}"[: len(system)]
    conversation, turn = nonce, 0
    if job.chats is Chats.TURNS:
        # All first turns of some conversations, then all second ones: whoever asks has had its answer.
        block, at = divmod(nonce, TURNS * CONVERSATIONS)
        turn, number = divmod(at, CONVERSATIONS)
        conversation = block * CONVERSATIONS + number
    messages = [{"role": "system", "content": system}]
    for number in range(2 * turn + 1):
        text = f"{conversation:014d} {number} {_SENTENCE}"[:characters]
        messages.append({"role": "assistant" if number % 2 else "user", "content": text})
    return messages


def _ids(count: int) -> list[int]:
    return [97 + number % 26 for number in range(count)]


class _Client(asyncio.Protocol):
    """One connection: sends a request when the answer to the one before has ended."""

    def __init__(self, run: _Run) -> None:
        self._run = run
        self._transport: Any = None
        self._parser = httptools.HttpResponseParser(self)
        self._parts: list[bytes] = []
        self._chunks = 0
        self._sent_at = 0.0
        self._first_at = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def send(self) -> None:
        request = self._run.take()
        if request is None:
            return
        self._parts.clear()
        self._chunks = 0
        self._first_at = 0.0
        self._sent_at = time.perf_counter()
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        if not self._first_at:
            self._first_at = time.perf_counter()
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)

    def on_chunk_header(self) -> None:
        self._chunks += 1

    def on_message_complete(self) -> None:
        now = time.perf_counter()
        status = self._parser.get_status_code()
        self._run.ended(
            status, b"".join(self._parts), self._chunks, now - self._sent_at, self._first_at - self._sent_at
        )
        self.send()

    def connection_lost(self, exc: Exception | None) -> None:
        self._run.failed(WrongAnswer(f"the server closed the connection: {exc}"))

    def close(self) -> None:
        self._transport.abort()


class _Run:
    """One job."""

    def __init__(self, job: Job) -> None:
        self._job = job
        # Taken from the end, in the order in which they were made: a conversation's first turn comes first.
        self._requests = [request_bytes(job) for _ in range(job.requests)][::-1]
        self.request_bytes = len(self._requests[-1])
        self._open = job.requests
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._whole_s: list[float] = []
        self._first_s: list[float] = []
        self._chunks = 0

    def take(self) -> bytes | None:
        return self._requests.pop() if self._requests else None

    def ended(self, status: int, body: bytes, chunks: int, whole_s: float, first_s: float) -> None:
        # The text events; the chat endpoint also has one for the role and one for the finish reason.
        events = body.count(b'"delta":{"content":') + body.count(b'"text":')
        wanted = self._job.tokens if self._job.stream else events
        if status != 200 or events != wanted or (self._job.stream and not body.endswith(b"data: [DONE]\n\n")):
            self.failed(WrongAnswer(f"status {status}, {events} events instead of {wanted}: {body[-500:]!r}"))
            return
        self._whole_s.append(whole_s)
        self._first_s.append(first_s)
        self._chunks += max(0, chunks - 1)  # The last one is the empty one.
        self._open -= 1
        if not self._open and not self._done.done():
            self._done.set_result(None)

    def failed(self, error: WrongAnswer) -> None:
        if not self._done.done():
            self._done.set_exception(error)

    async def outcome(self, clients: list[_Client]) -> Outcome:
        began = time.perf_counter()
        for client in clients:
            client.send()
        async with asyncio.timeout(DEADLINE_S):
            await self._done
        return Outcome(
            wall_s=time.perf_counter() - began,
            first_byte_p50_ms=statistics.median(self._first_s) * 1000,
            whole_p50_ms=statistics.median(self._whole_s) * 1000,
            chunks=self._chunks,
            request_bytes=self.request_bytes,
        )


async def _main() -> None:
    loop = asyncio.get_running_loop()
    while line := await asyncio.to_thread(sys.stdin.readline):
        job = msgspec.json.decode(line, type=Job)
        run = _Run(job)
        clients = []
        for _ in range(job.connections):
            _, client = await loop.create_connection(functools.partial(_Client, run), "127.0.0.1", job.port)
            clients.append(client)
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        outcome = await run.outcome(clients)
        print(msgspec.json.encode(outcome).decode(), flush=True)
        for client in clients:
            client.close()


if __name__ == "__main__":
    uvloop.run(_main())
