"""Reading recorded workloads: what is kept of them, and how a file that cannot be replayed is refused."""

from __future__ import annotations

import gzip
import hashlib
import json
from pathlib import Path

import pytest
from antiphon_simulate.ideal import ideal_cached_tokens
from antiphon_simulate.traces import Trace, TraceError, TraceFormat, read_trace

DATA = Path(__file__).parents[1] / "data"
CONVERSATION = DATA / "mooncake_conversation_first90s.jsonl"
SESSIONS = DATA / "agentic_coding_three_sessions.jsonl.gz"
AZURE = DATA / "azure2023_code_first100.csv"


def written(tmp_path: Path, *rows: dict[str, object] | str) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return path


def row(timestamp: float, tokens: int, *blocks: int, **more: object) -> dict[str, object]:
    return {"timestamp": timestamp, "input_length": tokens, "output_length": 5, "hash_ids": blocks, **more}


def turn(timestamp: float, session: str = "a", agent: int = 0, **more: object) -> dict[str, object]:
    return row(timestamp, 100, session_id=session, agent=agent, **more)


def test_a_conversation_trace_is_read_as_it_was_recorded() -> None:
    trace = read_trace(CONVERSATION)
    first = trace.requests[0]
    assert trace.format is TraceFormat.MOONCAKE
    assert trace.name == CONVERSATION.name
    assert trace.sha256 == hashlib.sha256(CONVERSATION.read_bytes()).hexdigest()
    assert (first.arrival_ms, first.prompt_tokens, first.output_tokens) == (0.0, 6758, 500)
    assert first.blocks == tuple(range(14))
    assert (first.session, first.after) == ("", None)
    assert [request.index for request in trace.requests] == list(range(len(trace.requests)))


def test_gzip_is_known_by_its_content(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(gzip.compress(CONVERSATION.read_bytes()))
    assert read_trace(path).requests == read_trace(CONVERSATION).requests


def test_arrivals_without_blocks_share_nothing() -> None:
    trace = read_trace(AZURE)
    assert trace.format is TraceFormat.LENGTHS
    assert (trace.requests[1].arrival_ms, trace.requests[1].prompt_tokens) == (52.0, 3180)
    assert sum(ideal_cached_tokens(trace.requests)) == 0


def test_sessions_are_closed_loops_of_one_agent_each() -> None:
    trace = read_trace(SESSIONS)
    assert trace.format is TraceFormat.SESSIONS
    for request in trace.requests:
        if request.after is not None:
            before = trace.requests[request.after]
            assert before.session == request.session
            assert before.index < request.index
    first_of_each = {request.session: request.index for request in reversed(trace.requests)}
    assert {request.index for request in trace.requests if request.after is None} == set(first_of_each.values())


def test_the_pause_before_a_request_is_kept_and_its_stamp_forgotten(tmp_path: Path) -> None:
    trace = read_trace(
        written(
            tmp_path,
            turn(5000.0, t_ms=0, think_ms=0),
            turn(9000.0, t_ms=4000, think_ms=700),
            turn(11000.0, agent=1, t_ms=6000, think_ms=0),
            turn(12000.0, t_ms=7000, think_ms=0),
        )
    )
    arrivals = [(request.session, request.arrival_ms, request.after, request.think_ms) for request in trace.requests]
    assert arrivals == [
        ("a", 5000.0, None, 0.0),
        ("a", 5000.0, 0, 700.0),
        ("a/1", 11000.0, None, 0.0),
        ("a", 5000.0, 1, 0.0),
    ]


def test_where_no_pause_was_recorded_a_request_comes_at_its_time_but_not_before_the_answer(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, turn(5000.0, t_ms=0), turn(9000.0, t_ms=4000)))
    assert (trace.requests[1].arrival_ms, trace.requests[1].after, trace.requests[1].think_ms) == (9000.0, 0, 0.0)


def test_an_empty_answer_counts_as_one_token(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, {**row(0, 10), "output_length": 0}))
    assert trace.requests[0].output_tokens == 1


def test_rows_are_put_in_order_of_time(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, row(20, 10), row(10, 11)))
    assert [(request.index, request.prompt_tokens) for request in trace.requests] == [(0, 11), (1, 10)]


def test_a_head_is_the_first_requests() -> None:
    trace = read_trace(CONVERSATION)
    assert trace.head(3).requests == trace.requests[:3]
    assert trace.head(None) == trace


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        pytest.param([], "is empty", id="empty"),
        pytest.param(["arrival_s,input_tokens,output_tokens"], "no requests", id="header only"),
        pytest.param(["arrival_s,input_tokens,output_tokens", "0.5,12"], ":2: .*seconds from the start", id="columns"),
        pytest.param(["arrival_s,input_tokens,output_tokens", "0.5,0,1"], ":2: .*>= 1", id="no prompt"),
        pytest.param([row(0, 10), "{"], ":2: .*a line is a JSON object", id="not JSON"),
        pytest.param(["time,in,out", "1,2,3"], ":1: .*or the file is CSV and begins with arrival_s", id="other CSV"),
        pytest.param([{"timestamp": 0, "input_length": 10}], ":1: .*output_length", id="field missing"),
        pytest.param([row(-1, 10)], ":1: .*>= 0", id="before the start"),
        pytest.param([row(0, 2000, 1, 2)], ":1: 2 hash_ids for 2000 tokens.*regroup", id="ids of other blocks"),
        pytest.param([row(0, 10, block_size=16)], ":1: its blocks are of 16 tokens: regroup", id="block size"),
        pytest.param(
            [row(0, 1024, 1, 2), row(0, 1024, 3, 2)],
            ":2: block 2 comes after block 3 here and after block 1 on a line before: .*number the hashes of a chain",
            id="ids that do not stand for what is before them",
        ),
    ],
)
def test_a_file_that_cannot_be_replayed_is_refused_by_line_and_with_advice(
    tmp_path: Path, rows: list[dict[str, object] | str], told: str
) -> None:
    with pytest.raises(TraceError, match=told):
        read_trace(written(tmp_path, *rows))


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(tmp_path / "none.jsonl")


def test_half_a_gzip_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(gzip.compress(CONVERSATION.read_bytes())[:2000])
    with pytest.raises(TraceError, match="fetch it again"):
        read_trace(path)


def test_a_trace_is_a_value() -> None:
    assert read_trace(SESSIONS) == read_trace(SESSIONS)
    assert isinstance(read_trace(SESSIONS), Trace)
