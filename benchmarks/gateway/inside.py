"""What the gateway's own Python takes for a request, and which part of it: no sockets, no gRPC, one thread.

Bytes of a request are fed to a connection whose transport keeps what is written; workers are clients without a stream,
and their messages are handed over as the stream would. The time is the process's CPU time, so what is done in the
threads for long texts counts; the least of several batches. `--profile` gives the shares of cProfile instead (which
weigh calls more than they cost). With `--model-dir` requests are chats (`--chats`: `load.Chats`), else prompts of ids.

    python -m benchmarks.gateway.inside --tokens 1
    python -m benchmarks.gateway.inside --tokens 1 --model-dir FOLDER --chats turns
    python -m benchmarks.gateway.inside --tokens 1 --profile 40
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import pstats
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvloop
from antiphon_gateway import ApiKeys, Gateway, GatewayOptions
from antiphon_gateway.groups import Group
from antiphon_gateway.http_server import HttpServer
from antiphon_gateway.models import Model
from antiphon_gateway.worker_client import Attachment, Timing, WorkerClient
from antiphon_policy.routing import WorkerRole
from antiphon_proto import worker_pb2 as pb

from benchmarks.gateway.load import Chats, Job, request_bytes
from benchmarks.gateway.mock_worker import card_of
from tests.support.fake_worker import byte_card

PROMPT_TOKENS = 512
PROMPT_CHARACTERS = 1400
BATCH = 200
BATCHES = 15


class _Kept:
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        self.written: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


class _Nowhere:
    """A stream to a worker that is not there."""

    def send(self, message: bytes) -> None:
        """Made, and sent nowhere."""


class Inside:
    def __init__(self, workers: int, tokens: int, *, stream: bool, model_dir: Path | None, chats: Chats) -> None:
        self._tokens = tokens
        self._gateway = Gateway(GatewayOptions(), ApiKeys(None), "inside")
        card = byte_card() if model_dir is None else card_of(model_dir)
        self._gateway.models.add(Model(card, self._gateway.models.encodings))
        self._load = pb.QueueState(free_blocks=100_000, total_blocks=100_000)
        self._clients = [self._client(f"w{number}", card) for number in range(workers)]
        server = HttpServer(self._gateway.handle, last_words_s=1.0)
        server._loop = asyncio.get_running_loop()
        self.transport = _Kept()
        self._connection = server._connect()
        self._connection.connection_made(self.transport)  # type: ignore[arg-type]
        endpoint = "completions" if model_dir is None else "chat"
        self._job = Job(0, card.model, endpoint, stream, tokens, 1, 1, PROMPT_TOKENS, PROMPT_CHARACTERS, chats)

    def _client(self, name: str, card: pb.ModelCard) -> WorkerClient:
        client = WorkerClient(f"{name}:1", "inside", Timing(500, 1500), self._gateway.fleet)
        client.attachment = Attachment(name, f"{name}/1", WorkerRole.BOTH, Group(card.model, "", card.digest))
        client._stream = _Nowhere()  # type: ignore[assignment]
        client._take_queue(self._load)
        self._gateway.fleet.attached(client)
        return client

    async def batch(self) -> float:
        """CPU time of a request, in microseconds."""
        self.transport.written.clear()
        requests = [request_bytes(self._job) for _ in range(BATCH)]
        begun = time.process_time()
        for request in requests:
            await self._serve(request)
        return (time.process_time() - begun) / BATCH * 1e6

    async def _serve(self, request: bytes) -> None:
        self._connection.data_received(request)
        client = None
        while client is None:
            await asyncio.sleep(0)
            client = next((one for one in self._clients if one.requests), None)
        (ref,) = client._requests
        client._take(pb.WorkerMessage(accepted=pb.Accepted(ref=ref)))
        for number in range(1, self._tokens + 1):
            step = pb.RequestStep(ref=ref, token_ids=(97,), text=" fox")
            if number == self._tokens:
                step.finish = pb.FINISH_LENGTH
            if number in (1, self._tokens):
                step.usage.prompt_tokens, step.usage.completion_tokens = PROMPT_TOKENS, number
            client._take(pb.WorkerMessage(step=pb.StepBatch(steps=[step], queue=self._load)))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        while self._connection.active is not None:  # noqa: ASYNC110  # nothing tells but the connection
            await asyncio.sleep(0)


async def measure(options: argparse.Namespace) -> None:
    inside = Inside(
        options.workers, options.tokens, stream=options.stream, model_dir=options.model_dir, chats=Chats(options.chats)
    )
    await inside.batch()
    if b"200 OK" not in inside.transport.written[0]:
        raise RuntimeError(f"the gateway answered {inside.transport.written[0]!r}")
    if options.profile:
        profile = cProfile.Profile()
        profile.enable()
        for _ in range(3):
            await inside.batch()
        profile.disable()
        pstats.Stats(profile).sort_stats("cumulative").print_stats(options.profile)
        return
    taken = [await inside.batch() for _ in range(BATCHES)]
    print(f"{min(taken):.0f} us a request (median of the batches {statistics.median(taken):.0f})")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=1)
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--model-dir", type=Path, default=None, help="chats with this Hugging Face folder's tokenizer")
    parser.add_argument("--chats", choices=list(Chats), default=Chats.SYSTEM)
    parser.add_argument("--profile", type=int, default=0, help="show so many functions")
    uvloop.run(measure(parser.parse_args(arguments)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
