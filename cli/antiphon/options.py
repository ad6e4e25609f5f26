"""Options of `antiphon serve` itself. It also takes those of workers and of the gateway, and hands them on."""

from __future__ import annotations

from dataclasses import dataclass

from antiphon_telemetry.logs import LEVELS
from antiphon_telemetry.options import option


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """How many processes of which kind, and where the endpoint is."""

    model: str = option(
        "demo",
        "`demo`, a folder with a Hugging Face model (safetensors), a GGUF file, or hf://org/name[/file.gguf][@revision]",
    )
    prefill: int = option(1, "prefill workers; 0: every worker does both")
    decode: int = option(1, "decode workers; with --prefill 0, workers that do both")
    host: str = option("127.0.0.1", "address that the endpoint listens on")
    port: int = option(8000, "port of the endpoint; 0: any free one")
    redis_url: str = option("", "Redis or Valkey to use; empty: one of its own, which ends with it", secret=True)
    prefill_tensor_parallel: int = option(0, "--tensor-parallel of prefill workers; 0: as --tensor-parallel says")
    prefill_pipeline_parallel: int = option(0, "--pipeline-parallel of prefill workers; 0: as --pipeline-parallel says")
    prefill_expert_parallel: int = option(0, "--expert-parallel of prefill workers; 0: as --expert-parallel says")
    decode_tensor_parallel: int = option(0, "--tensor-parallel of decode workers; 0: as --tensor-parallel says")
    decode_pipeline_parallel: int = option(0, "--pipeline-parallel of decode workers; 0: as --pipeline-parallel says")
    decode_expert_parallel: int = option(0, "--expert-parallel of decode workers; 0: as --expert-parallel says")
    threads: int = option(0, "compute threads of each worker; 0: the cores are shared out among the workers")
    autoscale: bool = option(False, "keep the promise below: change roles of workers, start and end them")
    sla_ttft_ms: float = option(0.0, "promise: time to first token of 95 % of requests, in ms; 0: none")
    sla_ttft_per_thousand_tokens_ms: float = option(0.0, "promise: so much more for each thousand uncached tokens")
    sla_tpot_ms: float = option(0.0, "promise: time of each further token, for 95 % of answers, in ms; 0: none")
    sla_window_s: float = option(300.0, "over how long a time the shares of 95 % are counted")
    max_workers: int = option(0, "with --autoscale, workers in all; 0: no more than at the start, so roles change only")
    min_prefill: int = option(1, "with --autoscale, the fewest prefill workers")
    max_prefill: int = option(0, "with --autoscale, the most prefill workers; 0: as --max-workers leaves")
    min_decode: int = option(1, "with --autoscale, the fewest decode workers")
    max_decode: int = option(0, "with --autoscale, the most decode workers; 0: as --max-workers leaves")
    record_decisions: str = option("", "with --autoscale, file to add its decisions to, one a line as JSON")
    start_timeout_s: float = option(900.0, "how long the start may take, with download and conversion")
    drain_timeout_s: float = option(5.0, "at the end, how long running requests may take to finish")
    log_level: str = option("info", "least level of the lines that are logged", choices=LEVELS)
    log_json: bool = option(False, "log JSON lines")

    def __post_init__(self) -> None:
        if self.prefill < 0:
            raise ValueError(f"--prefill {self.prefill}: the number of prefill workers cannot be negative")
        if self.decode < 1:
            raise ValueError(f"--decode {self.decode}: at least one worker has to decode")
        if not 0 <= self.port <= 65535:
            raise ValueError(f"--port {self.port}: ports go from 0 to 65535")
        if self.start_timeout_s <= 0 or self.drain_timeout_s < 0:
            raise ValueError("--start-timeout-s has to be positive, and --drain-timeout-s not negative")
        for role in ("prefill", "decode"):
            for kind in ("tensor", "pipeline", "expert"):
                if (size := getattr(self, f"{role}_{kind}_parallel")) < 0:
                    raise ValueError(f"--{role}-{kind}-parallel {size}: sizes are 1 or more; 0 says none of its own")
        if self.threads < 0:
            raise ValueError(f"--threads {self.threads}: the number of threads cannot be negative")
        self._check_scaling()

    @property
    def decode_role(self) -> str:
        """Of those workers that are not prefill workers."""
        return "decode" if self.prefill else "both"

    @property
    def most_workers(self) -> int:
        """That may run at one time."""
        return self.max_workers or self.prefill + self.decode

    def _check_scaling(self) -> None:
        if min(self.sla_ttft_ms, self.sla_ttft_per_thousand_tokens_ms, self.sla_tpot_ms) < 0 or self.sla_window_s <= 0:
            raise ValueError("--sla-... figures cannot be negative, and --sla-window-s has to be positive")
        if not self.autoscale:
            return
        if not (self.sla_ttft_ms or self.sla_tpot_ms):
            raise ValueError(
                "--autoscale keeps a promise, and none was given: say --sla-ttft-ms, --sla-tpot-ms, or both"
            )
        if self.sla_ttft_per_thousand_tokens_ms and not self.sla_ttft_ms:
            raise ValueError("--sla-ttft-per-thousand-tokens-ms adds to --sla-ttft-ms, which was not given")
        started = self.prefill + self.decode
        if self.max_workers and self.max_workers < started:
            raise ValueError(
                f"--max-workers {self.max_workers}: --prefill and --decode ask for {started} at the start already"
            )
        for role, least, most in (
            ("prefill", self.min_prefill, self.max_prefill),
            ("decode", self.min_decode, self.max_decode),
        ):
            if least < 1 or (most and most < least):
                raise ValueError(f"--min-{role} {least} --max-{role} {most}: from 1 up, and the most no less than that")
        floors = self.min_decode + (self.min_prefill if self.prefill else 0)
        if floors > self.most_workers:
            raise ValueError(
                f"--min-prefill and --min-decode ask for {floors} workers, and there may be {self.most_workers}: raise "
                "--max-workers"
            )


@dataclass(frozen=True, slots=True)
class ExplainOptions:
    gateway: tuple[str, ...] = option(
        ("http://127.0.0.1:8000",), "URL of a gateway; may be repeated, or several with commas: the first that knows"
    )
    api_key_file: str = option("", "file with the API key of the request's tenant; empty: none is given")


@dataclass(frozen=True, slots=True)
class ChatOptions:
    url: str = option("http://127.0.0.1:8000", "URL of an OpenAI-compatible endpoint, with or without /v1")
    api_key_file: str = option("", "file with the API key; empty: none is given")


@dataclass(frozen=True, slots=True)
class DecisionsOptions:
    redis_url: str = option("", "Redis or Valkey that the decisions are kept in", secret=True)
    redis_username: str = option("", "Redis user (empty: the URL's, or the default user)")
    redis_password_file: str = option("", "file with the Redis password")
