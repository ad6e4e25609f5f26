"""Routing by cost and round robin on the real engine: 2 prefill and 2 decode workers with the demo model.

A few chats with long system prompts, the same for either routing but for a nonce, on the same workers in the same run.
Counts of tokens only: on two cores times say little. `benchmarks/routing_real` is the same at length.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.chat_load import ChatLoad, Totals
from tests.support.chats import read_mtbench, read_taskmaster, with_system_prompts
from tests.support.index_house import GatewayProcess
from tests.support.routing_house import RoutingHouse

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive, pytest.mark.timeout(300)]

DATA = Path(__file__).parents[1] / "tests" / "data"
AVOIDABLE = 0.5
"""Of what round robin computes beside what an unlimited shared cache would have to, so much is allowed to remain.
Seen: 0.03."""


async def run(house: RoutingHouse, nonce: str, gateway: GatewayProcess) -> Totals:
    texts = read_mtbench(DATA / "chat_mtbench_first24.jsonl")[:6]
    texts += read_taskmaster(DATA / "chat_taskmaster4_first36.jsonl")[:6]
    chats = with_system_prompts(texts, groups=3, words=400, nonce=nonce)
    load = ChatLoad(house.client, house.model, [gateway], at_once=2, max_tokens=8, reading_s=0.1)
    turns = await load.run(chats)
    totals = Totals.of(turns)
    print(f"{gateway.name}: {totals}, by worker {totals.computed_by}")
    assert load.broken_off == []
    assert len(turns) == sum(len(chat.users) for chat in chats)
    assert all(turn.completion_tokens > 0 for turn in turns)
    return totals


async def test_a_chat_goes_where_its_prefix_is(tmp_path: Path) -> None:
    async with RoutingHouse(tmp_path, "--threads", "1", "--kv-blocks", "300") as house:
        await house.start(prefill=2, decode=2, by_cost=1, in_turn=1)
        (in_turn,), (by_cost,) = house.in_turn(1), house.by_cost(1)
        turned = await run(house, "run A", in_turn)
        placed = await run(house, "run B", by_cost)
        # In turn, each of two prefill workers computes each system prompt, and every second history.
        assert placed.hit_rate > turned.hit_rate
        avoidable = placed.computed_tokens - placed.ideal_computed_tokens
        assert avoidable <= AVOIDABLE * (turned.computed_tokens - turned.ideal_computed_tokens)
        for worker in house.workers:
            await worker.until_idle()
