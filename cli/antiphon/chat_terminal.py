"""The chat as a person sees it: a prompt with line editing, commands, and answers as they come.

Ctrl-C stops the running answer, which cancels the request; a second one, with no line entered between, ends the chat,
as Ctrl-D and `/quit` do. Nothing that a model or a server says can steer the terminal: control characters are left out.
"""

from __future__ import annotations

import contextlib
import re
import sys

from antiphon_telemetry.exit import ExitCode

from antiphon.chat_client import ChatError, Kind, Piece
from antiphon.chat_session import Chat

_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"
_PROMPT = "> "
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_COMMANDS = {
    "/reset": "forget the conversation",
    "/system [TEXT]": "what the model is told before the conversation; without TEXT shows it, `-` takes it back",
    "/model [NAME]": "talk to another model from now on, or show which there are",
    "/help": "show this",
    "/quit": "end, as Ctrl-D does",
}


def printable(text: str) -> str:
    """Without what could steer a terminal; lines and tabs stay."""
    return _CONTROL.sub("", text)


class ChatTerminal:
    """One chat in one terminal."""

    def __init__(self, chat: Chat, *, colours: bool) -> None:
        self._chat = chat
        self._colours = colours and sys.stdout.isatty()
        self._dim = False
        self._column_0 = True
        """The cursor is at the beginning of a line."""

    def run(self) -> int:
        """Until the person ends it; the exit code."""
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # `input` edits lines and remembers them once this is loaded
        self._notice(f"Talking to {self._chat.model}. /help shows the commands; Ctrl-D ends.")
        interrupted = False
        while True:
            try:
                line = self._line()
                interrupted = False
                if not self._follow(line):
                    return ExitCode.OK
            except EOFError:
                self._write("\n")
                return ExitCode.OK
            except KeyboardInterrupt:
                self._end_line()
                if interrupted:
                    return ExitCode.OK
                interrupted = True
                self._notice("Stopped. Ctrl-C again, or Ctrl-D, ends the chat.")

    def _line(self) -> str:
        self._column_0 = False
        if sys.stdout.isatty():
            line = input(_PROMPT)
        else:  # the prompt is for the person, the answers are for a file
            print(_PROMPT, end="", file=sys.stderr, flush=True)
            line = sys.stdin.readline()
            if not line:
                raise EOFError
        self._column_0 = True
        return line.encode(errors="replace").decode().strip()

    def _follow(self, line: str) -> bool:
        """Do what a line says; whether the chat goes on."""
        command, _, rest = line.partition(" ")
        rest = rest.strip()
        match command:
            case "":
                pass
            case "/quit":
                return False
            case "/reset":
                self._chat.messages.clear()
                self._notice("The conversation is forgotten.")
            case "/system":
                self._system(rest)
            case "/model":
                self._model(rest)
            case "/help":
                for name, about in _COMMANDS.items():
                    self._notice(f"{name:<15} {about}")
                self._notice("A question that begins with a slash is written with two.")
            case _ if command.startswith("/") and not command.startswith("//"):
                self._notice(f"There is no command {command}: /help shows those there are. (A question: two slashes.)")
            case _:
                self._turn(line.removeprefix("/") if command.startswith("//") else line)
        return True

    def _system(self, text: str) -> None:
        if text:
            self._chat.system = "" if text == "-" else text
        self._notice(f"The model is told: {self._chat.system}" if self._chat.system else "The model is told nothing.")

    def _model(self, name: str) -> None:
        try:
            models = self._chat.client.models()
        except ChatError as error:
            self._notice(str(error))
            return
        if name in models:
            self._chat.model = name
        elif name:
            self._notice(f"There is no model {name!r}.")
        others = [model for model in models if model != self._chat.model]
        self._notice(f"Talking to {self._chat.model}." + (f" There are also {', '.join(others)}." if others else ""))

    def _turn(self, text: str) -> None:
        try:
            self._chat.turn(text, self._show, self._notice)
        except ChatError as error:
            self._end_line()
            self._notice(str(error))
        self._end_line()

    # -- writing

    def _show(self, piece: Piece) -> None:
        match piece.kind:
            case Kind.FINISH:
                self._end_line()
                if piece.text != "stop":
                    self._notice(f"(ended early: {piece.text})")
            case Kind.REASONING:
                self._set_dim(True)
                self._write(piece.text)
            case Kind.TEXT:
                if self._dim:
                    self._end_line()
                    self._set_dim(False)
                self._write(piece.text)

    def _set_dim(self, dim: bool) -> None:
        if dim is not self._dim:
            self._dim = dim
            if self._colours:
                sys.stdout.write(_DIM if dim else _PLAIN)
                sys.stdout.flush()

    def _end_line(self) -> None:
        self._set_dim(False)
        if not self._column_0:
            self._write("\n")

    def _notice(self, line: str) -> None:
        """Something that is not the model's word."""
        self._end_line()
        text = printable(line)
        print(f"{_DIM}{text}{_PLAIN}" if self._colours else text, file=sys.stderr, flush=True)

    def _write(self, text: str) -> None:
        text = printable(text) if sys.stdout.isatty() else text
        if text:
            self._column_0 = text.endswith("\n")
            sys.stdout.write(text)
            sys.stdout.flush()
