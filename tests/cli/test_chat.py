"""`antiphon chat`: a person in a terminal, a pipe, and what it says where there is no answer."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest
from antiphon.__main__ import run
from antiphon.chat_client import Busy, ChatClient, ChatError, Kind, Message, Piece, Question
from antiphon.chat_events import EventParser, EventTooLong
from antiphon.chat_session import Chat
from antiphon_proto import worker_pb2 as pb
from antiphon_telemetry.exit import ExitCode

from tests.support.fake_worker import Connection, FakeWorker, byte_card, byte_tokenizer, endless, tokens
from tests.support.gateway import running_gateway
from tests.support.serve import COMMAND, environment
from tests.support.terminal import CTRL_C, CTRL_D, in_terminal

STREAM = (
    "\ufeff: a comment\r\ndata: one\r\n\r\n"
    "event: x\ndata:two\ndata: lines\n\n"
    "id: 7\rdata: Größe\r\r"
    "retry: 5\n\n"
    "data\n\n"
    "data: [DONE]\n\n"
).encode()
EVENTS = [b"one", b"two\nlines", "Größe".encode(), b"", b"[DONE]"]


# -- events


def test_events_are_the_same_wherever_the_bytes_are_cut() -> None:
    for cut in range(len(STREAM) + 1):
        parser = EventParser()
        assert parser.feed(STREAM[:cut]) + parser.feed(STREAM[cut:]) == EVENTS, cut


def test_events_are_the_same_byte_by_byte() -> None:
    parser = EventParser()
    assert [event for byte in STREAM for event in parser.feed(bytes([byte]))] == EVENTS


def test_an_event_without_end_is_refused() -> None:
    parser = EventParser()
    megabyte = b"data: " + b"x" * 1024 * 1024 + b"\n"
    assert parser.feed(megabyte * 15) == []
    with pytest.raises(EventTooLong):
        parser.feed(megabyte)


# -- a terminal


async def echo(worker: FakeWorker, connection: Connection, submit: pb.Submit) -> None:
    """Answer with the whole prompt, in capitals."""
    prompt = asked(submit)
    connection.accept(submit.ref)
    await tokens(connection, submit, prompt.upper().encode())


def asked(submit: pb.Submit) -> str:
    """The prompt, in one line."""
    text = byte_tokenizer().decode(list(submit.prompt_token_ids), skip_special_tokens=False)
    return text.replace("<|im_start|>", "{").replace("<|im_end|>\n", "}").replace("\n", ":")


async def test_a_conversation_its_commands_and_its_end() -> None:
    worker = FakeWorker(behaviour=echo)
    async with running_gateway(worker) as running, in_terminal(["chat", "--url", running.url]) as terminal:
        await terminal.until("Talking to test-model.")
        await terminal.until("> ")
        terminal.type("hallo\n")
        await terminal.until("{USER:HALLO}{ASSISTANT:\r\n")
        terminal.type("/system be short\n")
        await terminal.until("The model is told: be short")
        terminal.type("//etc?\n")
        await terminal.until(
            "{SYSTEM:BE SHORT}{USER:HALLO}{ASSISTANT:{USER:HALLO}{ASSISTANT:}{USER:/ETC?}{ASSISTANT:\r\n"
        )
        terminal.type("/reset\n/system -\n")
        await terminal.until("The model is told nothing.")
        terminal.type("anew\x7f\x7f\x7fgain\n")  # edited with the backspace key
        await terminal.until("{USER:AGAIN}{ASSISTANT:\r\n")
        terminal.type("/modell x\n")
        await terminal.until("There is no command /modell")
        terminal.type("/model other\n")
        await terminal.until("There is no model 'other'.")
        await terminal.until("Talking to test-model.")
        terminal.type("/help\n")
        await terminal.until("/quit")
        terminal.type("/quit\n")
        assert await terminal.code() == ExitCode.OK
        assert len(worker.submits) == 3
        assert running.at_rest


async def test_ctrl_c_stops_the_answer_and_a_second_one_ends() -> None:
    worker = FakeWorker(behaviour=endless)
    async with running_gateway(worker) as running, in_terminal(["chat", "--url", f"{running.url}/v1"]) as terminal:
        await terminal.until("> ")
        terminal.type("go\n")
        await terminal.until("aaaa")
        terminal.type(CTRL_C)
        await terminal.until("Stopped.")
        await worker.until(lambda: worker.running == 0)
        await terminal.until("> ")
        terminal.type("more\n")
        await terminal.until("aaaa")
        # What had come of the stopped answer is part of the conversation.
        assert "{user:go}{assistant:aaaa" in asked(worker.submits[1])
        terminal.type(CTRL_C)
        await terminal.until("Stopped.")
        await terminal.until("> ")
        terminal.type(CTRL_C)
        assert await terminal.code() == ExitCode.OK
        await worker.until(lambda: worker.running == 0)


async def test_reasoning_is_dimmed_and_no_answer_steers_the_terminal() -> None:
    async def think(worker: FakeWorker, connection: Connection, submit: pb.Submit) -> None:
        connection.accept(submit.ref)
        await tokens(connection, submit, b"<think>well</think>red: \x1b[31m\x07!")

    async with (
        running_gateway(FakeWorker(behaviour=think), reasoning_parser="think") as running,
        in_terminal(["chat", "--url", running.url]) as terminal,
    ):
        await terminal.until("> ")
        terminal.type("go\n")
        assert "\x1b[2mwell\x1b[0m\r\n" in await terminal.until("red: [31m!")
        await terminal.until("> ")
        terminal.type(CTRL_D)
        assert await terminal.code() == ExitCode.OK


async def test_a_failing_turn_leaves_the_conversation_as_it_was() -> None:
    async def failing(worker: FakeWorker, connection: Connection, submit: pb.Submit) -> None:
        connection.accept(submit.ref)
        if "{user:one}" in asked(submit):
            await tokens(connection, submit, b"half", finish=False)
            connection.step(submit.ref, finish=pb.FINISH_ERROR, error="out of luck")
        else:
            await tokens(connection, submit, b"whole")

    worker = FakeWorker(behaviour=failing)
    async with (
        running_gateway(worker) as running,
        in_terminal(["chat", "--url", running.url], NO_COLOR="1") as terminal,
    ):
        await terminal.until("> ")
        terminal.type("one\n")
        await terminal.until("the answer broke off (")
        await terminal.until("> ")
        terminal.type("two\n")
        await terminal.until("whole\r\n")
        assert asked(worker.submits[-1]) == "{user:two}{assistant:"
        assert "\x1b[2m" not in terminal.shown


# -- a pipe


async def piped(text: str, *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the command with `text` on stdin."""
    process = await asyncio.create_subprocess_exec(
        *(*COMMAND, "chat", *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment(),
    )
    output, errors = await asyncio.wait_for(process.communicate(text.encode()), 30)
    assert process.returncode is not None
    return process.returncode, output.decode(), errors.decode()


async def test_a_pipe_gets_the_answer_and_nothing_else() -> None:
    worker = FakeWorker(behaviour=echo)
    async with running_gateway(worker) as running:
        options = ("--url", running.url, "--system", "be short", "--max-tokens", "1000", "--temperature", "0")
        assert await piped("Grüße\n", *options) == (0, "{SYSTEM:BE SHORT}{USER:GRÜSSE}{ASSISTANT:\n", "")
        assert worker.submits[0].sampling.max_tokens == 1000
        assert worker.submits[0].sampling.temperature == 0
        code, output, errors = await piped("hallo", "--url", running.url, "--max-tokens", "5")
        assert (code, output) == (0, "{USER\n")
        assert errors == "antiphon: the answer ended early (length)\n"


async def test_a_key_is_shown_and_a_missing_one_told(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("secret-1\n")
    async with running_gateway(FakeWorker(behaviour=echo), keys={"secret-1": "tenant"}) as running:
        code, output, errors = await piped("hallo", "--url", running.url)
        assert (code, output) == (ExitCode.BAD_INPUT, "")
        assert "Name a file that holds the key with --api-key-file." in errors
        code, output, _ = await piped("hallo", "--url", running.url, "--api-key-file", str(key))
        assert (code, output) == (0, "{USER:HALLO}{ASSISTANT:\n")


async def test_a_model_that_is_not_there_is_told_with_those_that_are() -> None:
    async with running_gateway(FakeWorker(), FakeWorker(byte_card("second"), worker_id="worker-2")) as running:
        code, output, errors = await piped("hallo", "--url", running.url, "--model", "third")
        assert (code, output) == (ExitCode.BAD_INPUT, "")
        assert f"there is no model 'third' at {running.url}: it has " in errors
        assert "test-model" in errors
        assert "second" in errors


async def test_no_server_no_endpoint_and_no_question_are_told() -> None:
    code, _, errors = await piped("hallo", "--url", "http://127.0.0.1:9")
    assert code == ExitCode.UNAVAILABLE
    assert "start one with `antiphon serve`, or correct --url" in errors
    code, _, errors = await piped("hallo", "--url", "localhost:8000")
    assert code == ExitCode.BAD_INPUT
    assert "say http://HOST:PORT" in errors
    with scripted([(404, {}, b"nothing here"), (404, {}, b"nothing here")]) as url:
        code, _, errors = await piped("hallo", "--url", url, "--model", "m")
    assert code == ExitCode.BAD_INPUT
    assert "is no OpenAI-compatible endpoint" in errors
    code, _, errors = await piped("  \n", "--url", "http://127.0.0.1:9", "--model", "m")
    assert code == ExitCode.BAD_INPUT
    assert "stdin holds no question" in errors


async def test_a_reader_that_went_away_ends_the_request() -> None:
    worker = FakeWorker(behaviour=endless)
    async with running_gateway(worker) as running:
        command = f"echo hallo | {sys.executable} -m antiphon chat --url {running.url} | head -c 3"
        process = await asyncio.create_subprocess_shell(
            command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=environment()
        )
        assert await asyncio.wait_for(process.communicate(), 30) == (b"aaa", b"")
        await worker.until(lambda: worker.running == 0)


def test_a_temperature_is_a_number(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["chat", "--temperature", "nan"], {}) == ExitCode.BAD_INPUT
    assert "argument --temperature: 'nan' is not a number" in capsys.readouterr().err


# -- an endpoint that answers by the book


Answer = tuple[int, dict[str, str], bytes]
EVENT_STREAM = {"content-type": "text/event-stream"}
SAID = b'data: {"choices":[{"delta":{"content":"yes"}}]}\n\n'
BUSY = b'{"error":{"message":"All are busy."}}'
QUESTION = Question(True, "m", [Message("user", "?")])


@contextlib.contextmanager
def scripted(answers: Sequence[Answer]) -> Iterator[str]:
    """A server that gives these answers, one a request."""
    left = list(answers)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("content-length", 0)))
            status, headers, body = left.pop(0)
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET  # noqa: N815

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert not left


def turn(url: str) -> tuple[str, list[str]]:
    """The answer's text, and what was said beside it."""
    said: list[str] = []
    shown: list[Piece] = []
    Chat(ChatClient(url, ""), "m").turn("?", shown.append, said.append)
    return "".join(piece.text for piece in shown if piece.kind is Kind.TEXT), said


@pytest.mark.parametrize("when", ["0", "Mon, 01 Jan 2024 00:00:00 GMT"])
def test_a_busy_endpoint_is_asked_once_more_when_it_says(when: str) -> None:
    busy, done = (429, {"retry-after": when}, BUSY), (200, EVENT_STREAM, SAID + b"data: [DONE]\n\n")
    with scripted([busy, done]) as url:
        text, (said,) = turn(url)
    assert text == "yes"
    assert "All are busy. (waiting 0 s, then asking once more)" in said
    with scripted([busy, busy]) as url, pytest.raises(Busy, match="All are busy"):
        turn(url)


@pytest.mark.parametrize("headers", [{}, {"retry-after": "nan"}, {"retry-after": "soon"}, {"retry-after": "86400"}])
def test_without_a_time_that_can_be_waited_busy_is_the_end(headers: dict[str, str]) -> None:
    with scripted([(429, headers, BUSY)]) as url, pytest.raises(ChatError, match="All are busy") as caught:
        turn(url)
    assert caught.value.exit_code == ExitCode.UNAVAILABLE


@pytest.mark.parametrize(
    ("stream", "why"),
    [
        (SAID, "the connection ended"),
        (SAID + b'data: {"error":{"message":"gone"}}\n\n', "gone"),
        (SAID + b'data: {"error":"gone"}\n\n', "gone"),
        (SAID + b"data: <html>\n\n", "no part of an answer"),
    ],
)
def test_an_answer_that_breaks_off_is_no_answer(stream: bytes, why: str) -> None:
    with scripted([(200, EVENT_STREAM, stream)]) as url, pytest.raises(ChatError, match=why):
        turn(url)


def test_a_finish_ends_an_answer_too_and_unknown_fields_are_passed_over() -> None:
    stream = (
        b'data: {"choices":[{"delta":{"reasoning_content":"hm","role":"assistant","new":1}}],"usage":null}\n\n'
        + SAID
        + b'data: {"choices":[{"delta":{},"finish_reason":"length"}]}\n\ndata: {"choices":[],"usage":{"a":1}}\n\n'
    )
    with scripted([(200, EVENT_STREAM, stream)]) as url:
        assert list(ChatClient(url, "").ask(QUESTION)) == [
            Piece(Kind.REASONING, "hm"),
            Piece(Kind.TEXT, "yes"),
            Piece(Kind.FINISH, "length"),
        ]


def test_what_is_not_said_is_left_to_the_endpoint() -> None:
    assert msgspec.json.decode(msgspec.json.encode(QUESTION)) == {
        "stream": True,
        "model": "m",
        "messages": [{"role": "user", "content": "?"}],
    }
