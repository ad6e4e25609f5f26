"""`antiphon chat`: a conversation with a model, in the terminal.

With a terminal, lines are questions and lines that begin with a slash are commands. Without one, everything on stdin is
one question, and stdout gets the answer and nothing else, so that it can stand in a pipe.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable, Mapping, Sequence

from antiphon_telemetry.exit import ExitCode

from antiphon.chat_client import ChatClient, ChatError, Kind, Piece
from antiphon.chat_session import Chat
from antiphon.chat_terminal import ChatTerminal, printable
from antiphon.configuration import OptionSpec, add_arguments, check_environment, load, specs
from antiphon.endpoint import api_key, base_url
from antiphon.options import ChatOptions


def run_chat(arguments: Sequence[str], environment: Mapping[str, str], known: Iterable[OptionSpec]) -> int:
    """The command; its exit code. `known`: the options of all commands. Raises ConfigurationError."""
    parser = argparse.ArgumentParser(
        prog="antiphon chat",
        description="A chat with a model behind an OpenAI-compatible endpoint. Without a terminal, stdin is the "
        "question and stdout gets the answer.",
        allow_abbrev=False,
    )
    add_arguments(parser, specs(ChatOptions))
    # What a conversation is about is no matter of the environment, where ANTIPHON_MODEL is what workers load.
    parser.add_argument("--model", metavar="NAME", help="model to talk to (default: the first that the endpoint has)")
    parser.add_argument("--system", metavar="TEXT", default="", help="what the model is told before the conversation")
    parser.add_argument("--max-tokens", metavar="N", type=int, help="longest answer (default: the endpoint's)")
    parser.add_argument("--temperature", metavar="X", type=_number, help="of sampling (default: the endpoint's)")
    parsed = parser.parse_args(arguments)
    check_environment(environment, known)
    options = load(ChatOptions, parsed, environment)
    client = ChatClient(base_url(options.url, "--url"), api_key(options.api_key_file))
    try:
        chat = Chat(client, parsed.model or _first(client), parsed.system, parsed.max_tokens, parsed.temperature)
        if sys.stdin.isatty():
            return ChatTerminal(chat, colours="NO_COLOR" not in environment).run()
        return _once(chat)
    except ChatError as error:
        _say(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        return ExitCode.FAILURE
    except BrokenPipeError:  # nobody reads the answer any more
        return ExitCode.FAILURE


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number")
    return value


def _first(client: ChatClient) -> str:
    models = client.models()
    if not models:
        raise ChatError(
            "the endpoint has no model yet: wait until its workers are ready, or name one with --model",
            ExitCode.UNAVAILABLE,
        )
    return models[0]


def _once(chat: Chat) -> int:
    """One question from stdin, one answer to stdout."""
    try:
        question = sys.stdin.buffer.read().decode().strip()
    except UnicodeDecodeError as error:
        _say(f"stdin is no UTF-8 text: {error}")
        return ExitCode.BAD_INPUT
    if not question:
        _say("stdin holds no question: write one to it, or start `antiphon chat` in a terminal")
        return ExitCode.BAD_INPUT
    ends: list[str] = []

    def show(piece: Piece) -> None:
        if piece.kind is Kind.TEXT:
            sys.stdout.write(piece.text)
            sys.stdout.flush()
        elif piece.kind is Kind.FINISH and piece.text != "stop":
            ends.append(piece.text)

    chat.turn(question, show, _say)
    sys.stdout.write("\n")
    sys.stdout.flush()
    for end in ends:
        _say(f"the answer ended early ({end})")
    return ExitCode.OK


def _say(line: str) -> None:
    print(f"antiphon: {printable(line)}", file=sys.stderr, flush=True)
