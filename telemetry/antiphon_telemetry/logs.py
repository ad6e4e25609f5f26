"""Log lines: one per event, on stderr, for people by default and as JSON for machines.

Owned by the process's entry point, which calls `configure` once. Everything else asks for
`logging.getLogger("antiphon.<area>")` and never thinks of formats. A line break in a message is escaped, so an event
cannot pass for two; only a traceback, which follows its event for people, has lines of its own. What looks like a
credential (a password in a URL, a bearer token) is hidden on the way out, as the last line of defence: callers should
not log secrets in the first place.
"""

from __future__ import annotations

import logging
import re
import sys
import time

import msgspec

LEVELS = ("debug", "info", "warning", "error")

_CREDENTIALS = (
    (re.compile(r"(\b[a-z][a-z0-9+.-]*://[^\s:/@]*):[^\s/@]+@", re.IGNORECASE), r"\1:***@"),
    (re.compile(r"(\bBearer\s+)[^\s\"']+", re.IGNORECASE), r"\1***"),
)


def hide_credentials(text: str) -> str:
    """`text` without passwords in URLs and without bearer tokens."""
    for pattern, replacement in _CREDENTIALS:
        text = pattern.sub(replacement, text)
    return text


def configure(process: str, *, level: str = "info", json: bool = False) -> None:
    """Send this process's log to stderr. Calling it again replaces the former set-up.

    `process` names the process in every JSON line; people read one process's log at a time, or have it prefixed.

    Libraries are heard from `warning` on, whatever the level of our own lines.
    """
    if level not in LEVELS:
        raise ValueError(f"unknown log level {level!r}: use one of {', '.join(LEVELS)}")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter(process) if json else _LineFormatter())
    root = logging.getLogger()
    for former in list(root.handlers):
        root.removeHandler(former)
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger("antiphon").setLevel(level.upper())
    logging.captureWarnings(True)


def _message(record: logging.LogRecord) -> str:
    return hide_credentials(record.getMessage()).replace("\r", "\\r").replace("\n", "\\n")


def _timestamp(record: logging.LogRecord) -> str:
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{seconds}.{int(record.msecs):03d}Z"


class _LineFormatter(logging.Formatter):
    """`2026-01-31T12:00:00.123Z info    antiphon.gateway: message`"""

    def format(self, record: logging.LogRecord) -> str:
        line = f"{_timestamp(record)} {record.levelname.lower():<7} {record.name}: {_message(record)}"
        if record.exc_info:
            line = f"{line}\n{hide_credentials(self.formatException(record.exc_info))}"
        return line


class _Event(msgspec.Struct, omit_defaults=True):
    time: str
    level: str
    process: str
    logger: str
    message: str
    exception: str = ""


class _JsonFormatter(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        exception = hide_credentials(self.formatException(record.exc_info)) if record.exc_info else ""
        event = _Event(
            time=_timestamp(record),
            level=record.levelname.lower(),
            process=self._process,
            logger=record.name,
            message=hide_credentials(record.getMessage()),
            exception=exception,
        )
        return msgspec.json.encode(event).decode()
