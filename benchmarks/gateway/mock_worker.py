"""Workers that answer at once: the gateway's real gRPC protocol with no engine behind it.

Each of the `--workers` listens on a port of its own, accepts every submission, and gives all of its running requests
one token in each step, as one `StepBatch` a gateway, as an engine does (of an answer that is sent whole, what lies
between its first and last token as seldom as the gateway allows). With `--step-ms 0` a step follows the one
before as soon as that is written, so the gateway never waits for a worker; a longer step paces streams. Prints the
addresses, ends with its standard input.

The card is that of `--model-dir` (tokenizer and chat template of a Hugging Face folder), or has one token a byte.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import uvloop
from antiphon_proto import worker_pb2 as pb
from antiphon_proto import worker_pb2_grpc as pb_grpc

from tests.support.fake_worker import byte_card

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
HEARTBEAT_MS = 200
ANSWER = " fox"
TOKEN_ID = 97


def card_of(folder: Path) -> pb.ModelCard:
    """A card with the folder's tokenizer and template."""
    tokenizer_config = json.loads((folder / "tokenizer_config.json").read_text())
    template = folder / "chat_template.jinja"
    config = json.loads((folder / "config.json").read_text())
    card = byte_card()
    card.vocab_size = config["vocab_size"]
    card.max_context_tokens = config["max_position_embeddings"]
    card.tokenizer_json = (folder / "tokenizer.json").read_bytes()
    card.chat_template = template.read_text() if template.exists() else tokenizer_config["chat_template"]
    card.tokenizer_config_json = json.dumps(tokenizer_config)
    card.bos_token, card.eos_token = "", ""
    card.ClearField("digest")
    card.digest = hashlib.sha256(card.SerializeToString(deterministic=True)).hexdigest()[:32]
    return card


class _Running:
    """One request: tokens still to give."""

    __slots__ = ("every_s", "given", "prompt_tokens", "ref", "told", "told_at", "wanted")

    def __init__(self, submit: pb.Submit) -> None:
        self.ref = submit.ref
        self.prompt_tokens = len(submit.prompt_token_ids)
        self.wanted = submit.sampling.max_tokens
        self.given = self.told = len(submit.output_token_ids)
        self.every_s = submit.tell_every_ms / 1000.0
        self.told_at = 0.0

    def step(self) -> pb.RequestStep | None:
        """One more token; None: it is told later."""
        self.given += 1
        last = self.given == self.wanted
        if self.every_s:
            now = time.monotonic()
            if not last and self.told and now - self.told_at < self.every_s:
                return None
            self.told_at = now
        new = self.given - self.told
        self.told = self.given
        step = pb.RequestStep(ref=self.ref, token_ids=[TOKEN_ID] * new, text=ANSWER * new)
        if last:
            step.finish = pb.FINISH_LENGTH
        if last or self.given == 1:
            step.usage.prompt_tokens = self.prompt_tokens
            step.usage.completion_tokens = self.given
        return step


class MockWorker(pb_grpc.WorkerServicer):
    def __init__(self, worker_id: str, card: pb.ModelCard, step_s: float) -> None:
        self._worker_id = worker_id
        self._card = card
        self._step_s = step_s

    async def GetModelCard(self, request: Any, context: Any) -> pb.ModelCard:  # noqa: N802
        return self._card

    async def Attach(self, messages: AsyncIterator[pb.GatewayMessage], context: Any) -> AsyncIterator[pb.WorkerMessage]:  # noqa: N802
        running: dict[int, _Running] = {}
        outgoing: asyncio.Queue[pb.WorkerMessage] = asyncio.Queue()
        work = asyncio.Event()
        welcome = pb.Welcome(
            worker_id=self._worker_id,
            incarnation=f"{self._worker_id}/1",
            role=pb.ROLE_BOTH,
            card_digest=self._card.digest,
            heartbeat_ms=HEARTBEAT_MS,
            queue=_load(running),
        )
        outgoing.put_nowait(pb.WorkerMessage(welcome=welcome))
        tasks = [
            asyncio.create_task(self._listen(messages, running, outgoing, work)),
            asyncio.create_task(self._step(running, outgoing, work)),
            asyncio.create_task(_beat(running, outgoing)),
        ]
        try:
            while True:
                yield await outgoing.get()
                outgoing.task_done()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _listen(
        self,
        messages: AsyncIterator[pb.GatewayMessage],
        running: dict[int, _Running],
        outgoing: asyncio.Queue[pb.WorkerMessage],
        work: asyncio.Event,
    ) -> None:
        async for message in messages:
            match message.WhichOneof("kind"):
                case "submit":
                    ref = message.submit.ref
                    running[ref] = _Running(message.submit)
                    outgoing.put_nowait(pb.WorkerMessage(accepted=pb.Accepted(ref=ref)))
                    work.set()
                case "cancel":
                    running.pop(message.cancel.ref, None)

    async def _step(
        self, running: dict[int, _Running], outgoing: asyncio.Queue[pb.WorkerMessage], work: asyncio.Event
    ) -> None:
        while True:
            while not running:
                work.clear()
                await work.wait()
            await asyncio.sleep(self._step_s)
            steps = [step for one in running.values() if (step := one.step()) is not None]
            for one in [one for one in running.values() if one.given >= one.wanted]:
                del running[one.ref]
            if steps:
                outgoing.put_nowait(pb.WorkerMessage(step=pb.StepBatch(steps=steps, queue=_load(running))))
                await outgoing.join()


async def _beat(running: dict[int, _Running], outgoing: asyncio.Queue[pb.WorkerMessage]) -> None:
    while True:
        await asyncio.sleep(HEARTBEAT_MS / 1000)
        outgoing.put_nowait(pb.WorkerMessage(heartbeat=pb.Heartbeat(queue=_load(running))))


def _load(running: dict[int, _Running]) -> pb.QueueState:
    return pb.QueueState(running=len(running), free_blocks=100_000, total_blocks=100_000)


async def _serve(count: int, card: pb.ModelCard, step_s: float) -> None:
    options = (("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),)
    servers, addresses = [], []
    for number in range(count):
        server = grpc.aio.server(options=options)
        pb_grpc.add_WorkerServicer_to_server(MockWorker(f"mock-{number}", card, step_s), server)
        addresses.append(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
        await server.start()
        servers.append(server)
    print(json.dumps({"model": card.model, "addresses": addresses}), flush=True)
    await asyncio.to_thread(sys.stdin.read)  # Until whoever started it closes the pipe, or ends.
    for server in servers:
        await server.stop(None)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--step-ms", type=float, default=0.0)
    parser.add_argument("--model-dir", type=Path, default=None)
    given = parser.parse_args()
    card = card_of(given.model_dir) if given.model_dir else byte_card()
    uvloop.run(_serve(given.workers, card, given.step_ms / 1000))
