"""What becomes of each parameter with other servers, beside our own table (`antiphon_gateway.parameters`).

Made from the answers that `benchmarks/api_peers/run.py` got: from smg and Dynamo by asking them, from vLLM by asking
its own request records, from OpenAI by the types of its SDK. What those cannot tell, because it depends on how the
server was started or what it serves, is said by hand (`_VLLM_SAYS`).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from antiphon_gateway.openapi import OPERATIONS
from antiphon_gateway.parameters import PARAMETERS, Endpoint, Parameter

ANSWERS = Path(__file__).parents[2] / "benchmarks" / "api_peers" / "results" / "answers.json"
NOT_ASKED = "not asked"
_YES = "honoured"
_IN_EVERY_REQUEST = frozenset({"model", "messages", "prompt"})
"""They are in all that was asked."""
_ONLY_IN_THE_ANSWER = frozenset({"stream", "stream_options"})
"""What a gateway does itself, so that no worker sees it; the answer shows it."""

_RECORDS = "vllm/entrypoints/openai/chat_completion/protocol.py"
_RENDERER = "vllm/renderers/online_renderer.py"
_VLLM_SAYS = {
    "user": ("ignored", _RECORDS),
    "suffix": ("with models that can fill in, else refused", _RENDERER),
    "chat_template": ("where the server trusts requests with it, else refused", _RENDERER),
    "priority": ("with priority scheduling, else refused", _RECORDS),
    "prompt_embeds": ("where the server enables it, else refused", "vllm/renderers/base.py"),
    "return_token_offsets": ("on its render endpoints only", _RECORDS),
    "return_mm_kwargs": ("on its render endpoints only", _RECORDS),
    "mm_payload": ("on its render endpoints only", _RECORDS),
}
"""Word, and the file of the release that says so."""
_NOT_SEEN = frozenset({"model", "messages", "response_format"})
"""What vLLM looks at where a model is."""


@functools.cache
def answers() -> dict[str, Any]:
    return dict(json.loads(ANSWERS.read_text()))


def _openai(name: str, path: str) -> str:
    return _YES if name in answers()["openai"]["parameters"][path] else "no such parameter"


def _vllm(name: str, path: str) -> str:
    if name in _IN_EVERY_REQUEST:
        return _YES
    said = answers()["vllm"]["parameters"][path].get(name)
    if said is None:
        return NOT_ASKED
    if not said["known"]:
        return "ignored in silence"
    if "refused" in said:
        return "refused"
    return _VLLM_SAYS[name][0] if name in _VLLM_SAYS else _YES


def _router(peer: str, name: str, path: str) -> str:
    """smg or Dynamo: by what came out at the worker."""
    if name in _IN_EVERY_REQUEST:
        return "passed on"
    said = answers()[peer]["parameters"][path].get(name)
    if said is None:
        return NOT_ASKED
    if said["status"] != 200:
        return "refused"
    if said["at_worker"]:
        return _passed_on(name, said["at_worker"])
    if name in _ONLY_IN_THE_ANSWER and said["told"].startswith("data: "):
        return _YES if name == "stream" or '"usage":{' in said["told"] else "ignored in silence"
    return "ignored in silence"


def _passed_on(name: str, changed: dict[str, Any]) -> str:
    parts = [key.split(".") for key, value in changed.items() if value is not None]
    if any(name in part for part in parts):
        return "passed on"
    if any("token_ids" in part for part in parts):
        return "given to the template"
    words = sorted({_word(part) for part in parts})
    return f"passed on as {', '.join(words)}"


def _word(part: list[str]) -> str:
    """Of a.b.c: the group that a field is in says nothing."""
    groups = ("sampling_options", "stop_conditions", "output_options", "extra_args")
    return next(word for word in part if word not in groups)


_Cell = Callable[[str, str], str]
_COLUMNS: tuple[tuple[str, _Cell], ...] = (
    ("OpenAI", _openai),
    ("vLLM", _vllm),
    ("smg", functools.partial(_router, "smg")),
    ("Dynamo", functools.partial(_router, "dynamo")),
)


def _cell(column: _Cell, row: Parameter) -> str:
    """One word for all endpoints of the row, or one for each."""
    said = {endpoint: column(row.name, endpoint.value) for endpoint in row.endpoints}
    if len(set(said.values())) == 1:
        return next(iter(said.values()))
    return "; ".join(f"{endpoint.name.lower()}: {word}" for endpoint, word in said.items())


def _rows(rows: Iterable[Parameter]) -> Iterable[str]:
    for row in rows:
        endpoints = [endpoint.name.lower() for endpoint in row.endpoints]
        ours = f"{row.standing.value}. {row.sentence}"
        if row.harmless:
            ours += f" Accepted as {', '.join(f'`{json.dumps(value)}`' for value in row.harmless)}."
        others = [_cell(column, row) for _, column in _COLUMNS]
        yield f"| `{row.name}` | {', '.join(endpoints)} | {ours} | {' | '.join(others)} |"


def unlisted() -> set[tuple[str, str]]:
    """(path, parameter) that OpenAI or vLLM has and our table has not."""
    listed = {(endpoint.value, row.name) for row in PARAMETERS for endpoint in row.endpoints}
    theirs = {
        (path, name)
        for names in (answers()["openai"]["parameters"], answers()["vllm"]["fields"])
        for path, fields in names.items()
        for name in fields
    }
    return theirs - listed


_NONE = "no such endpoint"
_OPENAI_PATHS = frozenset(
    f"{method} {path}"
    for method, path in (
        *(("POST", endpoint.value) for endpoint in Endpoint),
        ("POST", "/v1/responses"),
        ("GET", "/v1/responses/{response_id}"),
        ("DELETE", "/v1/responses/{response_id}"),
        ("GET", "/v1/models"),
        ("GET", "/v1/models/{model}"),
    )
)
_VLLM_PATHS = frozenset({"GET /metrics", "GET /openapi.json", "GET /docs"})
"""Of FastAPI and the Prometheus client, not of a router of its own."""
_ELSEWHERE = {("smg", "GET /metrics"): "on a port of its own", ("dynamo", "POST /v1/messages"): "behind a flag"}


def _has(peer: str, operation: str) -> str:
    """By its answer: what is there says more than that the address is unknown."""
    if (peer, operation) in _ELSEWHERE:
        return _ELSEWHERE[peer, operation]
    said = answers()[peer]["paths"].get(operation)
    if said is None:
        return _NONE
    unknown = said["status"] in (404, 405) and ("not_found" not in said["told"] or "unknown_url" in said["told"])
    return _NONE if unknown else "yes"


def _endpoint_rows() -> Iterable[str]:
    for operation in OPERATIONS:
        name = f"{operation.method} {operation.path}"
        vllm = name in answers()["vllm"]["routes"] or name in _VLLM_PATHS
        others = ["yes" if name in _OPENAI_PATHS else _NONE, "yes" if vllm else _NONE]
        others += [_has("smg", name), _has("dynamo", name)]
        here = f"{operation.summary}{', streamed or whole' if operation.streams else ''}."
        yield f"| `{name}` | {here} | {' | '.join(others)} |"


def _odd_rows() -> Iterable[str]:
    """Values at the border: our answer and theirs."""
    found = answers()
    asked = zip(
        found["antiphon"]["odd"], found["vllm"]["odd"], found["smg"]["odd"], found["dynamo"]["odd"], strict=True
    )
    for ours, vllm, smg, dynamo in asked:
        value = json.dumps(ours["value"])
        value = value if len(value) <= 40 else "a schema that is none"
        words = [_status(ours), _record(vllm), _status(smg), _status(dynamo)]
        if len(set(words) - {"not seen"}) > 1:
            yield f"| `{ours['name']}` | {ours['path'].rpartition('/v1/')[2]} | `{value}` | {' | '.join(words)} |"


def _status(said: dict[str, Any]) -> str:
    return "taken" if said["status"] == 200 else "refused"


def _record(said: dict[str, Any]) -> str:
    if "refused" in said:
        return "refused"
    unseen = said["name"] in _NOT_SEEN or (said["name"] == "prompt" and not said["value"])
    return "not seen" if unseen else "taken"


def _table(head: tuple[str, ...], rows: Iterable[str]) -> list[str]:
    return ["", f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *rows]


def api_tables() -> str:
    """Endpoints, parameters, values that are taken by one and refused by another, and where the words are from."""
    servers = tuple(name for name, _ in _COLUMNS)
    odd = ("parameter", "endpoint", "value", "here", "vLLM", "smg", "Dynamo")
    lines = ["", "### Endpoints", *_table(("endpoint", "here", *servers), _endpoint_rows())]
    lines += ["", "### Parameters", *_table(("parameter", "endpoints", "here", *servers), _rows(PARAMETERS))]
    lines += ["", "### Values at the border", "", "Where not all four say the same.", *_table(odd, _odd_rows())]
    return "\n".join([*lines, "", *_sources(), ""])


def _sources() -> Iterable[str]:
    found = answers()
    yield "### Where the columns are from"
    yield ""
    yield "`python -m benchmarks.api_peers.run` asked; what was answered is in `benchmarks/api_peers/results`."
    yield ""
    yield f"- *OpenAI*: the types of its SDK, `openai` {found['openai']['version']}."
    yield (
        f"- *vLLM* {found['vllm']['version']}: its own request records (`vllm/entrypoints/openai/*/protocol.py`) and"
        " sampling parameters, made of each question and verified as its engine does it; no model was there."
        " What depends on options of the server is by its sources: "
        + ", ".join(f"`{name}` (`{file}`)" for name, (_, file) in _VLLM_SAYS.items())
        + "."
    )
    yield f"- *smg* {found['smg']['version']}: asked, before a worker over HTTP that wrote down what reached it."
    yield (
        f"- *Dynamo* {found['dynamo']['version']}: its frontend (with its own preprocessor) asked, before a worker that"
        " did the same."
    )
