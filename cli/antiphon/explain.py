"""`antiphon explain ID`: why a request went where it went, told in the terminal.

What a gateway has done lies on that gateway, so each of those named is asked in turn until one knows the request. With
`--replay` every decision is made again here, from the inputs that the gateway kept.
"""

from __future__ import annotations

import argparse
import enum
import shutil
import sys
import textwrap
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec
from antiphon_gateway import explain_text
from antiphon_gateway.explain_document import Attempt, ExplainedChoice, Explanation
from antiphon_gateway.explain_page import PATH
from antiphon_gateway.explain_replay import Replay, replay
from antiphon_gateway.explain_text import Table
from antiphon_telemetry.exit import ExitCode

from antiphon.configuration import ConfigurationError, OptionSpec, add_arguments, check_environment, load, specs
from antiphon.endpoint import api_key, base_url, opener
from antiphon.options import ExplainOptions

_DEADLINE_S = 10.0
_MOST_COLUMNS = 120
_MOST_BYTES = 64 * 1024 * 1024


class _Failure(enum.IntEnum):
    """Why a gateway did not tell, from the least to the most telling."""

    NOT_KNOWN = 0
    UNREACHABLE = 1
    REFUSED = 2


class _NotTold(Exception):
    """This gateway does not tell; the message says why and what to do."""

    def __init__(self, failure: _Failure, message: str) -> None:
        super().__init__(message)
        self.failure = failure


_EXIT_CODES = {
    _Failure.NOT_KNOWN: ExitCode.FAILURE,
    _Failure.UNREACHABLE: ExitCode.UNAVAILABLE,
    _Failure.REFUSED: ExitCode.BAD_INPUT,
}


class _ErrorBody(msgspec.Struct):
    message: str


class _ErrorEnvelope(msgspec.Struct):
    error: _ErrorBody


class ReplayReport(msgspec.Struct):
    """What `--json --replay` says of one attempt."""

    choice: int
    attempt: int
    same: bool
    whole: bool
    """All workers of then took part; else only those that the gateway kept."""
    differences: list[str]


class Report(msgspec.Struct):
    """What `--json --replay` prints."""

    explanation: Explanation
    replays: list[ReplayReport]


def run_explain(arguments: Sequence[str], environment: Mapping[str, str], known: Iterable[OptionSpec]) -> int:
    """The command; its exit code. `known`: the options of all commands. Raises ConfigurationError."""
    parser = argparse.ArgumentParser(
        prog="antiphon explain",
        description="Tells why a request went where it went, what else there was, and what came of it.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "id", help="the request's x-request-id, the id in its answer (chatcmpl-...), or its id in a worker's log"
    )
    add_arguments(parser, specs(ExplainOptions))
    parser.add_argument("--json", action="store_true", help="print what the gateway says, as JSON")
    parser.add_argument("--replay", action="store_true", help="decide again from the recorded inputs, and compare")
    parsed = parser.parse_args(arguments)
    check_environment(environment, known)
    options = load(ExplainOptions, parsed, environment)
    try:
        found = _ask_each(_gateways(options.gateway), parsed.id, api_key(options.api_key_file))
    except _NotTold as error:
        print(f"antiphon: {error}", file=sys.stderr)
        return _EXIT_CODES[error.failure]
    replays = list(_replays(found)) if parsed.replay else []
    if parsed.json:
        reports = [
            ReplayReport(choice.index, attempt.number, again.same, again.whole, list(again.differences))
            for choice, attempt, again in replays
        ]
        document = Report(found, reports) if parsed.replay else found
        print(msgspec.json.format(msgspec.json.encode(document)).decode())
    else:
        width = min(_MOST_COLUMNS, shutil.get_terminal_size((_MOST_COLUMNS, 24)).columns)
        print("\n".join(_told(found, {id(attempt): again for _, attempt, again in replays}, width)))
    differs = any(again.whole and not again.same for _, _, again in replays)
    return ExitCode.FAILURE if differs else ExitCode.OK


# -- asking


def _gateways(given: Sequence[str]) -> list[str]:
    """Their base URLs. Raises ConfigurationError."""
    urls = [url for text in given for url in text.split(",") if url.strip()]
    if not urls:
        raise ConfigurationError("--gateway names no gateway: say http://HOST:PORT")
    return [base_url(url, "--gateway") for url in urls]


def _ask_each(gateways: Sequence[str], request_id: str, api_key: str) -> Explanation:
    """The first one's answer that knows it. Raises _NotTold with what each of them said."""
    failures: list[_NotTold] = []
    for gateway in gateways:
        try:
            return _ask(gateway, request_id, api_key)
        except _NotTold as error:
            failures.append(error)
    worst = max(error.failure for error in failures)
    raise _NotTold(worst, "\nantiphon: ".join(str(error) for error in failures))


def _ask(gateway: str, request_id: str, api_key: str) -> Explanation:
    url = f"{gateway}{PATH}{urllib.parse.quote(request_id, safe=':')}"
    request = urllib.request.Request(url, headers={"accept": "application/json"})
    if api_key:
        request.add_unredirected_header("authorization", f"Bearer {api_key}")
    try:
        with opener(gateway).open(request, timeout=_DEADLINE_S) as response:
            body = response.read(_MOST_BYTES)
    except urllib.error.HTTPError as error:
        with error:
            raise _refused(gateway, error.code, error.read(_MOST_BYTES)) from error
    except (OSError, ValueError) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise _NotTold(
            _Failure.UNREACHABLE, f"no gateway answers at {gateway} ({reason}): start it, or correct --gateway"
        ) from error
    try:
        return msgspec.json.decode(body, type=Explanation)
    except msgspec.DecodeError as error:
        raise _NotTold(
            _Failure.REFUSED, f"what {gateway} answers is no explanation ({error}): is it a gateway of this version?"
        ) from error


def _refused(gateway: str, status: int, body: bytes) -> _NotTold:
    try:
        said = msgspec.json.decode(body, type=_ErrorEnvelope).error.message
    except msgspec.DecodeError:
        said = f"it answers {status}, which is no answer of a gateway: correct --gateway"
        return _NotTold(_Failure.REFUSED, f"{gateway}: {said}")
    if status == 401:
        return _NotTold(_Failure.REFUSED, f"{gateway}: {said} Name a file that holds it with --api-key-file.")
    return _NotTold(_Failure.NOT_KNOWN if status == 404 else _Failure.REFUSED, f"{gateway}: {said}")


# -- telling


def _replays(found: Explanation) -> Iterator[tuple[ExplainedChoice, Attempt, Replay]]:
    for choice in found.choices:
        for attempt in choice.attempts:
            yield choice, attempt, replay(attempt)


def _told(found: Explanation, replays: Mapping[int, Replay], width: int) -> Iterator[str]:
    """The explanation as lines."""
    yield f"request {found.client_request_id or found.request_id} ({found.request_id})"
    yield _wrapped(explain_text.summary(found), width)
    for choice in found.choices:
        for attempt in choice.attempts:
            of = f"choice {choice.index}, " if len(found.choices) > 1 else ""
            yield f"\n{of}attempt {attempt.number}, {attempt.since_arrival_ms:.1f} ms after arrival"
            yield _wrapped(explain_text.decided(attempt), width)
            yield from _columns(explain_text.options(attempt))
            yield _wrapped("What the gateway knew of them:", width)
            yield from _columns(explain_text.workers(attempt))
            yield _wrapped(explain_text.happened(attempt), width)
            if id(attempt) in replays:
                yield _wrapped(_replayed(attempt, replays[id(attempt)]), width)
            if attempt is choice.attempts[0] and choice.attempts_left_out:
                yield f"\n({choice.attempts_left_out} further attempts are not kept)"


def _replayed(attempt: Attempt, again: Replay) -> str:
    over = (
        f"all {attempt.inputs.workers_in_all} workers"
        if again.whole
        else f"the {len(attempt.inputs.workers)} of {attempt.inputs.workers_in_all} workers that are kept"
    )
    if again.same:
        return f"Replayed over {over}: the same decision."
    return f"Replayed over {over}: another decision. {'; '.join(again.differences)}."


def _wrapped(text: str, width: int) -> str:
    return textwrap.fill(text, width, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)


def _columns(table: Table) -> Iterator[str]:
    lines = [table.head, *table.rows]
    widths = [max(len(line[at]) for line in lines) for at in range(len(table.head))]
    for line in lines:
        cells = (
            cell.ljust(width) if at < table.left else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        yield f"    {'  '.join(cells)}".rstrip()
