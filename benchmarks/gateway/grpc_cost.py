"""What the gateway takes for a request that comes over gRPC, beside the same one over HTTP: CPU time of its process.

One gateway process with both ways in, before workers that answer at once (`mock_worker.py`); both ways in turn, so that
they meet the same machine. A chat of 1,400 characters; the least and the median of the rounds are told. The share that
is translation between messages and JSON is measured by itself.

    python -m benchmarks.gateway.grpc_cost --output benchmarks/gateway/results/grpc_cost.json
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import psutil
from antiphon_gateway.grpc_front import from_json, to_json
from antiphon_proto import inference_pb2 as api
from antiphon_proto import inference_pb2_grpc as api_grpc

ROUNDS = 8
REQUESTS = 200
AT_ONCE = 16
TRANSLATIONS = 4000
TEXT = "The harbour lay still under a low sky, and nobody spoke. " * 25
SHAPES = (("whole", 1), ("stream", 1), ("stream", 64))

Ask = Callable[[], Awaitable[None]]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < deadline, "the gateway did not start"
        time.sleep(0.05)


@contextlib.contextmanager
def gateway() -> Iterator[tuple[psutil.Process, str, str]]:
    """The process, its HTTP URL and its address for gRPC."""
    worker = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.gateway.mock_worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert worker.stdout is not None
    addresses = ",".join(json.loads(worker.stdout.readline())["addresses"])
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    ready = Path(tempfile.mkdtemp()) / "ready.json"
    command = [sys.executable, "-m", "antiphon", "gateway", "--port", "0", "--grpc-port", str(port)]
    variables = os.environ | {"ANTIPHON_WORKER": addresses}
    process = psutil.Popen([*command, "--ready-file", str(ready), "--log-level", "warning"], env=variables)
    try:
        until(ready.exists)
        url = f"http://{json.loads(ready.read_text())['address']}"
        until(lambda: httpx.get(f"{url}/ready", trust_env=False).status_code == 200)
        yield process, url, f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()
        worker.terminate()
        worker.wait()


async def cpu_us(process: psutil.Process, ask: Ask) -> float:
    """Of the gateway, for one request."""
    left = REQUESTS

    async def go_on() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            await ask()

    before = process.cpu_times()
    await asyncio.gather(*(go_on() for _ in range(AT_ONCE)))
    after = process.cpu_times()
    return (after.user + after.system - before.user - before.system) / REQUESTS * 1e6


def asks(client: httpx.AsyncClient, stub: Any, model: str, kind: str, tokens: int) -> dict[str, Ask]:
    messages = [{"role": "user", "content": TEXT}]
    body = {"model": model, "messages": messages, "max_tokens": tokens, "seed": 1, "stream": kind == "stream"}
    message = api.ChatCompletionRequest(
        model=model, messages=[api.Message(role="user", content=TEXT)], max_tokens=tokens, seed=1
    )

    async def over_http() -> None:
        response = await client.post("/v1/chat/completions", json=body)
        assert response.status_code == 200

    async def over_grpc() -> None:
        if kind == "whole":
            await stub.ChatCompletion(message)
        else:
            async for _ in stub.StreamChatCompletion(message):
                pass

    return {"http": over_http, "grpc": over_grpc}


async def measure() -> dict[str, list[float]]:
    samples: dict[str, list[float]] = {}
    with gateway() as (process, url, address):
        async with (
            httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as client,
            grpc.aio.insecure_channel(address) as channel,
        ):
            model = (await client.get("/v1/models")).json()["data"][0]["id"]
            stub = api_grpc.InferenceStub(channel)
            for round_number in range(ROUNDS + 1):
                for kind, tokens in SHAPES:
                    for way, ask in asks(client, stub, model, kind, tokens).items():
                        cost = await cpu_us(process, ask)
                        if round_number:  # the first one warms up
                            samples.setdefault(f"{kind}, {tokens} tokens, {way}", []).append(cost)
    return samples


def translation() -> dict[str, list[float]]:
    event = (
        b'data: {"id":"chatcmpl-ab980ee39010f383a36ca8bf446b22","object":"chat.completion.chunk","created":1796070337,'
        b'"model":"demo","choices":[{"index":0,"delta":{"content":" fox"},"logprobs":null,"finish_reason":null}]}\n\n'
    )
    messages = [api.Message(role="user", content=TEXT)]
    data = api.ChatCompletionRequest(model="demo", messages=messages, max_tokens=64, seed=1).SerializeToString()

    def chunk() -> None:
        for payload in from_json.events_of(event):
            from_json.chat_chunk(payload).SerializeToString()

    def request() -> None:
        to_json.body_of(api.ChatCompletionRequest.FromString(data), stream=True)

    samples: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        for name, translate in (("translation of a chunk", chunk), ("translation of a request", request)):
            began = time.process_time()
            for _ in range(TRANSLATIONS):
                translate()
            samples.setdefault(name, []).append((time.process_time() - began) / TRANSLATIONS * 1e6)
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=None, help="write the samples here, as JSON")
    arguments = parser.parse_args()
    began = time.time()
    samples = asyncio.run(measure()) | translation()
    for name, costs in samples.items():
        print(f"{name:28} {min(costs):6.1f} us, median {statistics.median(costs):6.1f}")
    if arguments.output is not None:
        record = {"began_at": began, "rounds": ROUNDS, "requests": REQUESTS, "at_once": AT_ONCE, "cpu_us": samples}
        arguments.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
