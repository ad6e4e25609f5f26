"""Log lines: one per event, in two forms, without credentials."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest
from antiphon_telemetry import logs


@pytest.fixture(autouse=True)
def _restore_logging() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger("antiphon")
    before = (list(root.handlers), root.level, ours.level)
    yield
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    ours.setLevel(before[2])
    logging.captureWarnings(False)


def test_an_event_is_one_line_even_with_a_line_break_in_it(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("gateway")
    logging.getLogger("antiphon.gateway").info("from %s", "a client\n2026-01-01T00:00:00.000Z error forged")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("antiphon.gateway: from a client\\n2026-01-01T00:00:00.000Z error forged")


def test_a_traceback_follows_its_event(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("gateway")
    try:
        raise KeyError("gone")
    except KeyError:
        logging.getLogger("antiphon.gateway").exception("failed")
    shown = capsys.readouterr().err
    assert "error" in shown.splitlines()[0]
    assert shown.rstrip().endswith("KeyError: 'gone'")


def test_json_lines_carry_process_level_and_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("decode-0", json=True)
    try:
        raise KeyError("gone")
    except KeyError:
        logging.getLogger("antiphon.worker").exception("two\nlines")
    event = json.loads(capsys.readouterr().err)
    assert event["process"] == "decode-0"
    assert event["level"] == "error"
    assert event["logger"] == "antiphon.worker"
    assert event["message"] == "two\nlines"
    assert event["exception"].endswith("KeyError: 'gone'")


@pytest.mark.parametrize("as_json", [False, True])
def test_credentials_are_hidden(as_json: bool, capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("worker", json=as_json)
    logger = logging.getLogger("antiphon.worker")
    logger.info("connecting to %s", "redis://user:open-sesame@host:6379/0")
    logger.info("header Authorization: Bearer open-sesame")
    try:
        raise OSError("cannot reach redis://:open-sesame@host")
    except OSError:
        logger.exception("failed")
    shown = capsys.readouterr().err
    assert "open-sesame" not in shown
    assert "redis://user:***@host:6379/0" in shown


def test_levels_hold_for_our_lines_and_libraries_are_heard_from_warning_on(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("worker", level="debug")
    logging.getLogger("antiphon.worker").debug("ours")
    logging.getLogger("library").info("chatter")
    logging.getLogger("library").warning("trouble")
    assert [line.rsplit(" ", 1)[1] for line in capsys.readouterr().err.splitlines()] == ["ours", "trouble"]


def test_configuring_again_does_not_double_the_lines(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("worker")
    logs.configure("worker")
    logging.getLogger("antiphon.worker").info("once")
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown log level 'loud'"):
        logs.configure("worker", level="loud")
