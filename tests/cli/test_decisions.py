"""`antiphon decisions`: what a live system keeps of its scaling, as a table and as lines that can be replayed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from antiphon.__main__ import run
from antiphon.decisions import table
from antiphon_kvtransfer import RedisAccess
from antiphon_kvtransfer.scaling_decisions import write_decision
from antiphon_policy.route_records import WorkerRole
from antiphon_policy.scaling import PoolView, Promise, RequestSample, ScalingInputs, TpotTarget, TtftTarget, decide
from antiphon_policy.scaling.remembered import encode_decision
from antiphon_telemetry.exit import ExitCode

from tests.support.valkey import Valkey

MODEL = "demo"


def looked_at(requests: int) -> ScalingInputs:
    """So many in the last minute."""
    now_ms = 1_800_000_000_000.0
    return ScalingInputs(
        now_ms=now_ms,
        promise=Promise(TtftTarget(500.0), TpotTarget(40.0)),
        pools=(PoolView(WorkerRole.PREFILL, 1, 1), PoolView(WorkerRole.DECODE, 1, 1)),
        samples=tuple(
            RequestSample(now_ms - 60_000.0 + 60_000.0 * number / requests, 900, 1000, 50) for number in range(requests)
        ),
    )


@pytest.fixture(scope="module")
def valkey() -> Iterator[Valkey]:
    with Valkey(unix=True) as running:
        yield running


def test_what_is_kept_is_told_and_replays(valkey: Valkey, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = [looked_at(3), looked_at(40)]
    for one in asked:
        raw = encode_decision(decide(one))
        asyncio.run(write_decision(RedisAccess(valkey.url), MODEL, b"{}", raw))
    environment = {"ANTIPHON_REDIS_URL": valkey.url}

    assert run(["decisions", MODEL], environment) == ExitCode.OK
    told = capsys.readouterr().out
    assert told.splitlines()[0].split() == ["time", "sizes", "action", "why"]
    assert " ".join(decide(asked[0]).sentence.split()[:6]) in told

    assert run(["decisions", MODEL, "--json"], environment) == ExitCode.OK
    file = tmp_path / "decisions.jsonl"
    file.write_text(capsys.readouterr().out)
    assert run(["simulate", "replay", str(file)], {}) == ExitCode.OK
    assert "2 decisions, 2 replay to the same result" in capsys.readouterr().out


def test_what_is_not_there_is_told_in_a_sentence(valkey: Valkey, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["decisions", "nobody", "--redis-url", valkey.url], {}) == ExitCode.FAILURE
    assert "no decisions of 'nobody' are kept there" in capsys.readouterr().err
    assert run(["decisions", MODEL], {}) == ExitCode.BAD_INPUT
    assert "--redis-url" in capsys.readouterr().err
    assert run(["decisions", MODEL, "--redis-url", "redis://x:secret@127.0.0.1:1"], {}) == ExitCode.UNAVAILABLE
    assert "secret" not in capsys.readouterr().err


def test_a_decision_of_another_version_is_told_as_such() -> None:
    assert "this is no decision of this version" in " ".join(table([b'{"of": "another"}'], 100).split())
