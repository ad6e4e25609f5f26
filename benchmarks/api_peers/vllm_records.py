"""What vLLM's own request records make of the questions: run where vLLM's package can be imported, engine or not.

A field is known if the record has it. The sampling parameters that the record makes are verified as the engine does
it; whether they differ from those of the same request without the field is kept too (some fields act elsewhere).
Prints one JSON document.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import vllm
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.version import __version__

from benchmarks.api_peers import questions
from benchmarks.api_peers.questions import CHAT, COMPLETIONS, ODD, VALUES

MODEL = SimpleNamespace(max_logprobs=20, get_vocab_size=lambda: 49152, is_diffusion=False)
"""What the engine's checks ask of a model's configuration; the default of --max-logprobs."""
_NOT_THE_SERVER = {"cli", "launchers", "mcp"}
_ROUTE = re.compile(r'@(?:router|app)\.(get|post|delete)\(\s*"([^"]+)"')
RECORDS: dict[str, Any] = {CHAT: ChatCompletionRequest, COMPLETIONS: CompletionRequest}


def _sampling(record: Any) -> str:
    """The sampling parameters, as text; those of beam search where it is asked for."""
    limit = 4 if record.max_tokens is None else record.max_tokens
    if record.use_beam_search:
        return repr(record.to_beam_search_params(limit, {}))
    sampling = record.to_sampling_params(limit, {})
    sampling.verify(MODEL, None, None, None)
    return repr(sampling)


def _ask(path: str, body: dict[str, Any], plain: dict[str, Any] | None, name: str) -> dict[str, Any]:
    kind = RECORDS[path]
    known = name in kind.model_fields
    try:
        record = kind.model_validate(body)
        found = _sampling(record)
    except Exception as error:  # noqa: BLE001  # whatever it is, the server answers an error
        return {"known": known, "refused": str(error).splitlines()[-1][:200] if str(error) else repr(error)[:200]}
    if plain is None:
        return {"known": known}
    return {"known": known, "changes_sampling": found != _sampling(kind.model_validate(plain))}


def _routes() -> list[str]:
    """METHOD path of every route that a router module declares, by the modules' text: most need an engine to import."""
    found = set()
    folder = Path(vllm.__path__[0], "entrypoints")
    for file in sorted(folder.rglob("*.py")):
        if file.relative_to(folder).parts[0] in _NOT_THE_SERVER:
            continue
        for method, path in _ROUTE.findall(file.read_text()):
            found.add(f"{method.upper()} {path}")
    return sorted(found)


def main() -> None:
    answers: dict[str, Any] = {"version": __version__, "routes": _routes(), "parameters": {}, "odd": []}
    answers["fields"] = {path: sorted(kind.model_fields) for path, kind in RECORDS.items()}
    for path, values in VALUES.items():
        answers["parameters"][path] = {
            name: _ask(path, questions.question(path, name, value, "m"), questions.base(path, name, "m"), name)
            for name, value in values.items()
        }
    for path, name, value in ODD:
        said = _ask(path, questions.question_alone(path, name, value, "m"), None, name)
        answers["odd"].append({"path": path, "name": name, "value": value, **said})
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
