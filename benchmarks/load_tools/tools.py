"""Command lines of public load tools, and what their own output files say.

`guidellm` and `aiperf` are asked as their users ask them: nothing of ours is in their processes. What they need of a
tokenizer they find in a cache laid out as Hugging Face's, so that they never ask a network.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import msgspec

TOKENIZER = "antiphon/tokenizer"
"""Its name in the cache that `hub_cache` makes."""
_COMMIT = "0" * 40
_TOKENIZER_FILES = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
_GUIDELLM_KEEPS = 4
"""Single requests in its report; its statistics are of all of them."""


class Case(msgspec.Struct, frozen=True):
    tool: str
    endpoint: str
    """As the gateway's metrics call it: chat, completions, messages, responses."""
    concurrency: int
    requests: int
    prompt_tokens: int
    output_tokens: int
    turns: int = 1
    """Of a conversation; `requests` are all of them together."""
    own_count: bool = False
    """The tool counts tokens itself, beside the server's usage (aiperf only)."""

    @property
    def name(self) -> str:
        more = ("-turns" if self.turns > 1 else "") + ("-own-count" if self.own_count else "")
        return f"{self.tool}-{self.endpoint}{more}"

    @property
    def seed(self) -> int:
        """Each case has prompts of its own: none finds another one's in the prefix cache."""
        return zlib.crc32(self.name.encode()) % 10000


class Told(msgspec.Struct, frozen=True):
    """By the tool, of one case."""

    completed: int
    errors: int
    prompt_tokens: int | None
    """As the server's usage said, as far as the tool read it."""
    output_tokens: int | None
    ttft_mean_ms: float
    ttft_p95_ms: float
    itl_mean_ms: float
    own_prompt_tokens: int | None = None
    """The tool's encoding of the text that it sent."""
    own_output_tokens: int | None = None
    """And of the text that came."""


_GUIDELLM_PATHS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
}


def guidellm(case: Case, url: str, model: str) -> list[str]:
    data = f"prompt_tokens={case.prompt_tokens},output_tokens={case.output_tokens},turns={case.turns}"
    return [
        *("guidellm", "run", "--disable-console-interactive"),
        *("--backend", f"kind=openai_http,target={url},request_format={_GUIDELLM_PATHS[case.endpoint]}"),
        *("--profile", f"kind=concurrent,streams={case.concurrency}"),
        *("--constraint", f"kind=max_requests,count={case.requests}"),
        *("--tokenizer", f"kind=huggingface_auto,model={TOKENIZER}"),
        *("--data", f"kind=synthetic_text,{data}"),
        *("--metrics", f"kind=generative,sample_size={_GUIDELLM_KEEPS}"),
        *("--seed", f"kind=static,value={case.seed}"),
        *("--output", "kind=json,path=guidellm.json"),
        *("--output", "kind=console"),
    ]


def guidellm_told(folder: Path) -> Told:
    (benchmark,) = json.loads((folder / "guidellm.json").read_text())["benchmarks"]
    metrics = benchmark["metrics"]
    totals = metrics["request_totals"]

    def of(name: str) -> dict[str, Any]:
        found: dict[str, Any] = metrics[name]["successful"]
        return found

    return Told(
        completed=totals["successful"],
        errors=totals["errored"] + totals["incomplete"],
        prompt_tokens=round(of("prompt_token_count")["total_sum"]),
        output_tokens=round(of("output_token_count")["total_sum"]),
        ttft_mean_ms=of("time_to_first_token_ms")["mean"],
        ttft_p95_ms=of("time_to_first_token_ms")["percentiles"]["p95"],
        itl_mean_ms=of("inter_token_latency_ms")["mean"],
    )


def aiperf(case: Case, url: str, model: str) -> list[str]:
    extra: dict[str, Any] = {} if case.endpoint in ("messages", "responses") else {"ignore_eos": True}
    if case.own_count and case.endpoint != "responses":
        extra["stream_options"] = {"include_usage": True}
    conversations = case.requests // case.turns
    asked = ("--request-count", str(case.requests)) if case.turns == 1 else ("--num-conversations", str(conversations))
    return [
        *("aiperf", "profile", "--model", model, "--url", url, "--endpoint-type", case.endpoint, "--streaming"),
        *("--tokenizer", TOKENIZER, "--random-seed", str(case.seed)),
        *("--synthetic-input-tokens-mean", str(case.prompt_tokens), "--output-tokens-mean", str(case.output_tokens)),
        *("--conversation-turn-mean", str(case.turns)),
        *("--concurrency", str(case.concurrency), *asked),
        *(("--extra-inputs", json.dumps(extra)) if extra else ()),
        *(() if case.own_count else ("--use-server-token-count",)),
        *("--export-level", "summary", "--ui-type", "none", "--output-artifact-dir", "."),
    ]


def aiperf_told(folder: Path) -> Told:
    told = json.loads((folder / "profile_export_aiperf.json").read_text())

    def total(name: str) -> int | None:
        return round(told[name]["sum"]) if name in told else None

    own = not told["input_config"]["endpoint"].get("use_server_token_count", False)
    return Told(
        completed=round(told["request_count"]["avg"]),
        errors=round(told.get("error_request_count", {"avg": 0})["avg"]),
        prompt_tokens=total("usage_prompt_tokens"),
        output_tokens=total("usage_completion_tokens"),
        ttft_mean_ms=told["time_to_first_token"]["avg"],
        ttft_p95_ms=told["time_to_first_token"]["p95"],
        itl_mean_ms=told["inter_token_latency"]["avg"],
        own_prompt_tokens=total("input_sequence_length") if own else None,
        own_output_tokens=total("output_sequence_length") if own else None,
    )


COMMANDS = {"guidellm": guidellm, "aiperf": aiperf}
TOLD = {"guidellm": guidellm_told, "aiperf": aiperf_told}


def hub_cache(folder: Path, model_folder: Path) -> None:
    """A cache in which the tools find the tokenizer by its name."""
    repository = folder / f"models--{TOKENIZER.replace('/', '--')}"
    snapshot = repository / "snapshots" / _COMMIT
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(_COMMIT)
    for name in _TOKENIZER_FILES:
        if (model_folder / name).exists():
            (snapshot / name).symlink_to((model_folder / name).resolve())
