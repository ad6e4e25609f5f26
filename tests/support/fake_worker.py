"""A worker double for tests of the gateway's side of the protocol: a real gRPC server with a scripted engine.

It speaks `Worker.Attach` and `Worker.GetModelCard` over a real socket. What it does with a submission is a coroutine,
`behaviour`, that a test may replace. By default it answers with letters that depend on prompt, seed, choice and
position, or, where the prompt says "Repeat exactly: ...", with that; one token (a byte) a step.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import grpc.aio
from antiphon_proto import worker_pb2 as pb
from antiphon_proto import worker_pb2_grpc as pb_grpc
from antiphon_worker.channels import MAX_MESSAGE_BYTES
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{%- if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{%- for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "{% if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCAB_SIZE = 256 + len(SPECIALS)


def byte_tokenizer() -> Tokenizer:
    """One token a byte, and three special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={character: index for index, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIALS])
    return tokenizer


def byte_card(
    model: str = "test-model", *, context: int = 4_000_000, template: str = TEMPLATE, block_bytes: int = 1024
) -> pb.ModelCard:
    card = pb.ModelCard(
        model=model,
        revision="r1",
        architecture="Fake",
        kv_format="float32/64/gqa",
        block_tokens=64,
        kv_block_bytes=block_bytes,
        max_context_tokens=context,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=[256],
        tokenizer_json=byte_tokenizer().to_str().encode(),
        chat_template=template,
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
    )
    card.digest = hashlib.sha256(card.SerializeToString(deterministic=True)).hexdigest()[:32]
    return card


class Connection:
    """One gateway's stream, as a behaviour uses it."""

    def __init__(self) -> None:
        self.outgoing: asyncio.Queue[pb.WorkerMessage | None] = asyncio.Queue()
        self.tasks: dict[int, asyncio.Task[None]] = {}

    def send(self, **kind: Any) -> None:
        self.outgoing.put_nowait(pb.WorkerMessage(**kind))

    def accept(self, ref: int) -> None:
        self.send(accepted=pb.Accepted(ref=ref))

    def refuse(self, ref: int, reason: pb.RefusalReason.ValueType, message: str = "no") -> None:
        self.send(refused=pb.Refused(ref=ref, reason=reason, message=message))

    def step(self, ref: int, queue: pb.QueueState | None = None, **fields: Any) -> None:
        self.send(step=pb.StepBatch(steps=[pb.RequestStep(ref=ref, **fields)], queue=queue))

    def close(self) -> None:
        """End the stream, as a worker does that stops."""
        self.outgoing.put_nowait(None)


Behaviour = Callable[["FakeWorker", Connection, pb.Submit], Awaitable[None]]


class FakeWorker(pb_grpc.WorkerServicer):
    def __init__(
        self,
        card: pb.ModelCard | None = None,
        *,
        worker_id: str = "worker-1",
        role: pb.Role.ValueType = pb.ROLE_BOTH,
        behaviour: Behaviour | None = None,
        heartbeat_ms: int = 100,
        revision: str = "",
    ) -> None:
        self.card = card or byte_card()
        self.revision = revision
        self.worker_id = worker_id
        self.role = role
        self.behaviour = behaviour or generate
        self.heartbeat_ms = heartbeat_ms
        self.queue = pb.QueueState(free_blocks=1000, total_blocks=1000)
        self.submits: list[pb.Submit] = []
        self.cancelled: list[int] = []
        self.peers: list[list[str]] = []
        self.cards_read = 0
        self.heartbeats = 0
        self.silent = False
        self.connections: list[Connection] = []
        self.changed = asyncio.Condition()
        self.address = ""
        self._server: grpc.aio.Server | None = None

    # -- life

    async def start(self, port: int = 0) -> FakeWorker:
        self._server = grpc.aio.server(options=[("grpc.max_receive_message_length", MAX_MESSAGE_BYTES)])
        pb_grpc.add_WorkerServicer_to_server(self, self._server)
        port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        await self._server.start()
        self.address = f"127.0.0.1:{port}"
        return self

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    @property
    def running(self) -> int:
        """Requests that it works on."""
        return sum(len(connection.tasks) for connection in self.connections)

    async def until(self, condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
        """Wait for something that a message from a gateway, or the end of a request, brings about."""
        async with asyncio.timeout(timeout_s), self.changed:
            await self.changed.wait_for(condition)

    async def _tell(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    # -- the service

    async def GetModelCard(self, request: Any, context: Any) -> pb.ModelCard:  # noqa: N802
        self.cards_read += 1
        return self.card

    async def Attach(self, messages: AsyncIterator[pb.GatewayMessage], context: Any) -> AsyncIterator[pb.WorkerMessage]:  # noqa: N802
        connection = Connection()
        connection.send(
            welcome=pb.Welcome(
                worker_id=self.worker_id,
                incarnation=f"{self.worker_id}/1",
                role=self.role,
                card_digest=self.card.digest,
                heartbeat_ms=self.heartbeat_ms,
                queue=self.queue,
                revision=self.revision,
            )
        )
        self.connections.append(connection)
        listening = asyncio.create_task(self._listen(connection, messages))
        beating = asyncio.create_task(self._beat(connection))
        try:
            while (message := await connection.outgoing.get()) is not None:
                yield message
        finally:
            self.connections.remove(connection)
            tasks = [listening, beating, *connection.tasks.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._tell()

    async def _listen(self, connection: Connection, messages: AsyncIterator[pb.GatewayMessage]) -> None:
        async for message in messages:
            match message.WhichOneof("kind"):
                case "submit":
                    submit = message.submit
                    self.submits.append(submit)
                    task = asyncio.create_task(self._run(connection, submit))
                    connection.tasks[submit.ref] = task
                case "cancel":
                    self.cancelled.append(message.cancel.ref)
                    task = connection.tasks.get(message.cancel.ref)
                    if task is not None:
                        task.cancel()
                case "peers":
                    self.peers.append(sorted(peer.worker_id for peer in message.peers.peers))
                case "heartbeat":
                    self.heartbeats += 1
            await self._tell()
        connection.close()

    async def _run(self, connection: Connection, submit: pb.Submit) -> None:
        try:
            await self.behaviour(self, connection, submit)
        finally:
            connection.tasks.pop(submit.ref, None)
            await asyncio.shield(self._tell())

    async def _beat(self, connection: Connection) -> None:
        while True:
            await asyncio.sleep(self.heartbeat_ms / 1000)
            if not self.silent:
                connection.send(heartbeat=pb.Heartbeat(queue=self.queue))


# -- behaviours


def answer_bytes(submit: pb.Submit) -> bytes:
    """What the double answers, one byte a token."""
    prompt = byte_tokenizer().decode(list(submit.prompt_token_ids), skip_special_tokens=False)
    _, found, wanted = prompt.rpartition("Repeat exactly: ")
    if found:
        return wanted.split("<|im_end|>")[0].encode()
    key = repr((list(submit.prompt_token_ids[-64:]), submit.sampling.seed, submit.sampling.choice)).encode()
    length = submit.sampling.max_tokens
    letters = bytearray()
    position = 0
    while len(letters) < length:
        letters += bytes(97 + value % 26 for value in hashlib.sha256(key + position.to_bytes(4, "little")).digest())
        position += 1
    return bytes(letters[:length])


async def generate(worker: FakeWorker, connection: Connection, submit: pb.Submit) -> None:
    """Accept and answer to the end."""
    connection.accept(submit.ref)
    if submit.sampling.HasField("prompt_logprobs"):
        connection.step(submit.ref, prompt_logprobs=prompt_scores(submit))
        if not submit.sampling.max_tokens:
            usage = pb.Usage(prompt_tokens=len(submit.prompt_token_ids))
            connection.step(submit.ref, finish=pb.FINISH_LENGTH, usage=usage)
            return
    await tokens(connection, submit, answer_bytes(submit))


async def tokens(
    connection: Connection, submit: pb.Submit, data: bytes, *, finish: bool = True, cached_tokens: int = 0
) -> None:
    """Send `data`, one byte a step, whole characters only; then the end."""
    sampling = submit.sampling
    data_sent = data[: sampling.max_tokens]
    held = b""
    alphabet = token_ids_of_bytes()
    held_logprobs: list[pb.TokenLogprob] = []
    for position, byte in enumerate(data_sent):
        held += bytes([byte])
        if sampling.HasField("logprobs"):
            held_logprobs.append(_logprob(alphabet[byte], sampling.logprobs))
        try:
            text = held.decode()
        except UnicodeDecodeError:
            text = ""
        logprobs = held_logprobs if text else []
        if text:
            held, held_logprobs = b"", []
        usage = None
        last = finish and position == len(data_sent) - 1
        if position == 0 or last:
            usage = pb.Usage(
                prompt_tokens=len(submit.prompt_token_ids), cached_tokens=cached_tokens, completion_tokens=position + 1
            )
        reason = pb.FINISH_NONE
        if last:
            reason = pb.FINISH_LENGTH if len(data_sent) == sampling.max_tokens else pb.FINISH_STOP
        connection.step(
            submit.ref, token_ids=[alphabet[byte]], text=text, logprobs=logprobs, finish=reason, usage=usage
        )
        await asyncio.sleep(0)


def prompt_scores(submit: pb.Submit) -> list[pb.TokenLogprob]:
    """Of the prompt's tokens from the second on: minus their place, over 8."""
    top = submit.sampling.prompt_logprobs
    return [
        pb.TokenLogprob(
            token_id=token_id,
            logprob=-place / 8,
            top_ids=[(token_id + step) % 256 for step in range(1, top + 1)],
            top_logprobs=[-0.125 * step for step in range(1, top + 1)],
            rank=top + place,
        )
        for place, token_id in enumerate(submit.prompt_token_ids[1:], start=1)
    ]


def _logprob(token_id: int, top: int) -> pb.TokenLogprob:
    """The chosen token's is minus infinity at times, as a biased sampler's may be."""
    ids = [(token_id + offset) % 256 for offset in range(top)]
    chosen = float("-inf") if token_id % 3 == 0 else -0.5
    return pb.TokenLogprob(
        token_id=token_id, logprob=chosen, top_ids=ids, top_logprobs=[chosen, *[float("-inf")] * top][:top]
    )


def token_ids_of_bytes() -> Sequence[int]:
    """Token id of each byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    characters = {byte: chr(byte) for byte in printable}
    others = [byte for byte in range(256) if byte not in characters]
    characters.update({byte: chr(0x100 + offset) for offset, byte in enumerate(others)})
    order = {character: index for index, character in enumerate(sorted(characters.values()))}
    return [order[characters[byte]] for byte in range(256)]


async def accept_and_hang(worker: FakeWorker, connection: Connection, submit: pb.Submit) -> None:
    """Accept, and say nothing more until cancelled."""
    connection.accept(submit.ref)
    await asyncio.Event().wait()


async def endless(worker: FakeWorker, connection: Connection, submit: pb.Submit) -> None:
    """Accept, and send a token a millisecond until cancelled."""
    connection.accept(submit.ref)
    while True:
        connection.step(submit.ref, token_ids=[97], text="a")
        await asyncio.sleep(0.001)


@contextlib.asynccontextmanager
async def fake_workers(*workers: FakeWorker) -> AsyncIterator[tuple[str, ...]]:
    """Start them; their addresses."""
    try:
        yield tuple([(await worker.start()).address for worker in workers])
    finally:
        for worker in workers:
            await worker.stop()
