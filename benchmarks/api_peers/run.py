"""Asks peers' servers each parameter of our API, and keeps what they answered and what reached their workers.

    python -m benchmarks.api_peers.run --peers FOLDER --model-dir FOLDER

The first FOLDER has the peers' environments, as `benchmarks/gateway/targets.py` wants them (`rust` with smg, `dynamo`),
and `vllm` with vLLM's package unpacked and what it imports. A peer that is not there is left out. smg stands before a
server that keeps the bodies it gets (`recorder.py`), Dynamo's frontend before a worker that does (`dynamo_worker.py`).
vLLM is not started: its own request records are asked (`vllm_records.py`). OpenAI's parameters are those that its SDK
has types for. Our gateway is asked too, before a mock worker.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import typing
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from benchmarks.api_peers import questions
from benchmarks.api_peers.questions import CHAT, COMPLETIONS, ODD, PATH_BODIES, PATHS, VALUES
from benchmarks.api_peers.recorder import MODEL, Recorder
from benchmarks.gateway.targets import (
    Mocks,
    Stage,
    Target,
    free_port,
    stage,
    start_gateway,
    start_mocks,
    start_router,
    until,
    until_answers,
)

HERE = Path(__file__).parent
RESULT = HERE / "results" / "answers.json"
ANSWER_S = 20.0
_TOLD = 300
_TOLD_OF_ANSWERS = 150
_MODEL_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")

Seen = Callable[[str], Any]
"""Path -> what the worker got last, and forgets it."""


@dataclass(frozen=True, slots=True)
class Peer:
    url: str
    model: str
    version: str
    seen: Seen


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """{"a.b": leaf}, lists as leaves."""
    if not isinstance(value, dict) or not value:
        return {name: value}
    found: dict[str, Any] = {}
    for key, inner in value.items():
        found |= flat(inner, f"{name}.{key}" if name else key)
    return found


def changes(before: Any, after: Any) -> dict[str, Any]:
    """What `after` has otherwise; null: no longer there."""
    old, new = flat(before), flat(after)
    return {key: new.get(key) for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)}


def _short(answer: str) -> str:
    """Its beginning and its end."""
    if len(answer) <= 2 * _TOLD_OF_ANSWERS:
        return answer
    return f"{answer[:_TOLD_OF_ANSWERS]} ... {answer[-_TOLD_OF_ANSWERS:]}"


async def send(client: httpx.AsyncClient, peer: Peer, path: str, body: dict[str, Any]) -> dict[str, Any]:
    peer.seen(path)
    try:
        response = await client.post(f"{peer.url}{path}", json=body)
    except httpx.TimeoutException:
        return {"status": None, "told": f"no answer in {ANSWER_S:g} s", "seen": peer.seen(path)}
    told = response.text[:_TOLD] if response.status_code != 200 else _short(response.text)
    return {"status": response.status_code, "told": told, "seen": peer.seen(path)}


async def ask(client: httpx.AsyncClient, peer: Peer) -> dict[str, Any]:
    parameters: dict[str, dict[str, Any]] = {}
    for path, values in VALUES.items():
        for name, value in values.items():
            plain = await send(client, peer, path, questions.base(path, name, peer.model))
            said = await send(client, peer, path, questions.question(path, name, value, peer.model))
            at_worker = None if said["seen"] is None else changes(plain["seen"], said["seen"])
            row = {"status": said["status"], "told": said["told"], "at_worker": at_worker}
            parameters.setdefault(path, {})[name] = row
    odd = []
    for path, name, value in ODD:
        said = await send(client, peer, path, questions.question_alone(path, name, value, peer.model))
        odd.append({"path": path, "name": name, "value": value, "status": said["status"], "told": said["told"]})
    paths = {}
    for method, path in PATHS:
        url = f"{peer.url}{path.format(response_id='resp_none', model=peer.model)}"
        body = {"model": peer.model, **PATH_BODIES[path]} if path in PATH_BODIES else None
        try:
            response = await client.request(method, url, json=body)
        except httpx.TimeoutException:
            paths[f"{method} {path}"] = {"status": None, "told": f"no answer in {ANSWER_S:g} s"}
        else:
            paths[f"{method} {path}"] = {"status": response.status_code, "told": response.text[:_TOLD_OF_ANSWERS]}
    return {"version": peer.version, "parameters": parameters, "odd": odd, "paths": paths}


@asynccontextmanager
async def smg(folder: Path, peers: Path) -> AsyncIterator[Peer | None]:
    with Recorder() as recorder:
        async with stage(folder) as on:
            target = await start_router(on, "smg", Mocks(MODEL, (recorder.address,)), peers)
            if target is None:
                yield None
                return

            def seen(path: str) -> Any:
                return recorder.seen.pop(path, None)

            yield Peer(_url(target), MODEL, _version(peers / "rust", "smg"), seen)


@asynccontextmanager
async def dynamo(folder: Path, peers: Path, model_dir: Path) -> AsyncIterator[Peer | None]:
    python = peers / "dynamo" / "bin" / "python"
    if not python.exists():
        yield None
        return
    async with stage(folder) as on:
        target, file = await _start_dynamo(on, python, model_dir)

        def seen(_: str) -> Any:
            lines = file.read_text().splitlines() if file.exists() else []
            file.unlink(missing_ok=True)
            return json.loads(lines[-1]) if lines else None

        yield Peer(_url(target), target.model, _version(peers / "dynamo", "ai-dynamo"), seen)


async def _start_dynamo(on: Stage, python: Path, model_dir: Path) -> tuple[Target, Path]:
    file = on.folder / "seen.jsonl"
    environment = {
        "DYN_FILE_KV": str(on.folder / "kv"),
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_REQUEST_PLANE": "tcp",
        "HF_HUB_OFFLINE": "1",
    }
    await on.run(
        "dynamo-recorder",
        *(str(python), str(HERE / "dynamo_worker.py"), str(model_dir), MODEL, str(file)),
        environment=environment,
    )
    port = free_port()
    found = ("--discovery-backend", "file", "--event-plane", "zmq")
    process = await on.run(
        "dynamo",
        *(str(python), "-m", "dynamo.frontend", "--http-port", str(port), *found),
        environment=environment,
    )
    url = f"http://127.0.0.1:{port}/v1/models"
    await until_answers(url, on, "dynamo")
    await until(lambda: MODEL in httpx.get(url, trust_env=False).text)
    return Target("dynamo", process.pid, port, MODEL), file


@asynccontextmanager
async def ours(folder: Path, model_dir: Path) -> AsyncIterator[Peer]:
    async with stage(folder) as on:
        mocks = await start_mocks(on, "mock_worker", "--model-dir", str(model_dir))
        target = await start_gateway(on, "gateway", mocks)
        yield Peer(_url(target), target.model, version("antiphon"), lambda _: None)


def probe_model(model_dir: Path, folder: Path) -> Path:
    """The same tokenizer with the template of the questions."""
    folder.mkdir(parents=True)
    for name in _MODEL_FILES:
        shutil.copy(model_dir / name, folder / name)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": questions.TEMPLATE}))
    return folder


def _url(target: Target) -> str:
    return f"http://127.0.0.1:{target.port}"


def _version(folder: Path, package: str) -> str:
    command = (str(folder / "bin" / "python"), "-c", f"import importlib.metadata as m; print(m.version({package!r}))")
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def vllm(peers: Path) -> dict[str, Any] | None:
    """By its own records, in a process whose path has its package."""
    folder = peers / "vllm"
    if not folder.exists():
        return None
    environment = {**os.environ, "PYTHONPATH": f"{folder}:{HERE.parents[1]}"}
    command = (sys.executable, str(HERE / "vllm_records.py"))
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=300)
    return dict(json.loads(done.stdout))


def openai_parameters() -> dict[str, Any]:
    """What its SDK has types for."""
    chat = typing.get_type_hints(chat_create_params.CompletionCreateParamsBase)
    completions = typing.get_type_hints(completion_create_params.CompletionCreateParamsBase)
    names = {CHAT: sorted({*chat, "stream"}), COMPLETIONS: sorted({*completions, "stream"})}
    return {"version": version("openai"), "parameters": names}


async def measure(peers: Path, model_dir: Path, folder: Path) -> dict[str, Any]:
    model_dir = probe_model(model_dir, folder / "model")
    found: dict[str, Any] = {"openai": openai_parameters(), "vllm": vllm(peers)}
    limits = httpx.Timeout(ANSWER_S)
    async with httpx.AsyncClient(timeout=limits, trust_env=False) as client:
        async with smg(folder / "smg", peers) as peer:
            found["smg"] = None if peer is None else await ask(client, peer)
        async with dynamo(folder / "dynamo", peers, model_dir) as peer:
            found["dynamo"] = None if peer is None else await ask(client, peer)
        async with ours(folder / "ours", model_dir) as peer:
            found["antiphon"] = await ask(client, peer)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, required=True)
    parser.add_argument("--model-dir", type=Path, required=True, help="a Hugging Face folder with a chat template")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(measure(options.peers, options.model_dir, Path(folder)))
    options.out.parent.mkdir(exist_ok=True)
    options.out.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    print(f"written: {options.out}")


if __name__ == "__main__":
    main()
