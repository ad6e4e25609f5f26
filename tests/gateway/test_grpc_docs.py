"""The example in docs/grpc.md works as it stands, but for the address and the model's name."""

from __future__ import annotations

import asyncio
import contextlib
import io
import re
from pathlib import Path

from tests.support.fake_worker import FakeWorker, byte_card
from tests.support.gateway import eventually
from tests.support.grpc_calls import running_front

PAGE = Path(__file__).parents[2] / "docs" / "grpc.md"


def example(address: str) -> str:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert code.count('"127.0.0.1:9000"') == 1
    return str(code.replace("127.0.0.1:9000", address))


def said_by(code: str) -> str:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(compile(code, str(PAGE), "exec"), {})
    return said.getvalue()


async def test_the_example_streams_an_answer() -> None:
    async with running_front(FakeWorker(byte_card("demo")), keys={"none": "t1"}) as front:
        said = await asyncio.to_thread(said_by, example(front.address))
        assert len(said) == 60
        await eventually(lambda: front.running.at_rest)


async def test_the_example_tells_what_went_wrong() -> None:
    async with running_front(FakeWorker(byte_card("another"))) as front:
        said = await asyncio.to_thread(said_by, example(front.address))
        assert "StatusCode.NOT_FOUND" in said
        assert "model_not_found" in said
