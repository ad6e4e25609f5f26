"""Pulls overlap with prefill on the real model: counted, not timed.

A prompt of eight chunks of 256 tokens. When the prefill worker announces its end, the decode worker has all blocks but
at most those of one chunk.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.installed import has_nixl
from tests.support.models import demo_model
from tests.support.workers import AttachClient, Workers, prompt_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

_CHUNK_TOKENS = 256
_BLOCK_TOKENS = 32
_PROMPT_TOKENS = 8 * _CHUNK_TOKENS


@pytest.mark.exhaustive  # tests/worker/test_disaggregated.py has it with the timed engine
@pytest.mark.parametrize("transport", ["tcp", "ucx"])
async def test_at_most_one_chunk_is_left_to_pull_when_prefill_ends(transport: str, tmp_path: Path) -> None:
    if transport == "ucx" and not has_nixl():
        pytest.skip("NIXL is not installed")
    demo_model()
    options = ("--transport", transport, "--threads", "1", "--block-tokens", str(_BLOCK_TOKENS), "--kv-blocks", "300")
    async with Workers(tmp_path, *options, "--max-batch-tokens", str(_CHUNK_TOKENS)) as workers:
        prefill, decode = await workers.start_all(("--role", "prefill"), ("--role", "decode"))
        async with AttachClient(decode) as client:
            await client.wire_up(prefill)
            for seed in range(2):
                prompt = prompt_of(_PROMPT_TOKENS, seed=seed)
                answer = await client.run(client.submission(prompt, prefill=[prefill], max_tokens=4))
                assert answer.usage is not None
                assert answer.usage.prefill_worker_id == prefill.worker_id
                assert answer.usage.pulled_blocks == _PROMPT_TOKENS // _BLOCK_TOKENS
                left = (await decode.status())["unpulled_at_done"]
                print(f"{transport}: {left} of {_PROMPT_TOKENS // _BLOCK_TOKENS} blocks were left to pull")
                assert left <= _CHUNK_TOKENS // _BLOCK_TOKENS
        await prefill.until_idle()
        await decode.until_idle()
