"""A worker for Dynamo's frontend that writes down what it is given: run by the Python of Dynamo's own environment.

`python dynamo_worker.py MODEL_FOLDER NAME FILE`; FILE gets a line of JSON for each request.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from typing import Any

import uvloop
from dynamo.common.utils.runtime import create_runtime
from dynamo.llm import ModelInput, ModelType, WorkerType, register_model


async def _main(folder: str, name: str, file: str) -> None:
    runtime, _ = create_runtime(discovery_backend="file", request_plane="tcp", event_plane="zmq")
    endpoint = runtime.endpoint("dynamo.recorder.generate")

    async def generate(request: Any, context: Any = None) -> AsyncIterator[dict[str, Any]]:
        with open(file, "a", encoding="utf-8") as out:  # noqa: ASYNC230  # one request at a time
            out.write(json.dumps(request, default=str) + "\n")
        limit = (request.get("stop_conditions") or {}).get("max_tokens") or 4
        for number in range(limit):
            last = number == limit - 1
            yield {"token_ids": [100 + number], "finish_reason": "length" if last else None}

    await asyncio.gather(
        endpoint.serve_endpoint(generate),
        register_model(
            ModelInput.Tokens,
            ModelType.Chat | ModelType.Completions,
            endpoint,
            folder,
            name,
            worker_type=WorkerType.Aggregated,
            kv_cache_block_size=16,
            ignore_weights=True,
        ),
    )


if __name__ == "__main__":
    uvloop.run(_main(*sys.argv[1:4]))
