"""Options of `antiphon serve` itself. It also takes those of workers and of the gateway, and hands them on."""

from __future__ import annotations

from dataclasses import dataclass

from antiphon_telemetry.logs import LEVELS
from antiphon_telemetry.options import option


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """How many processes of which kind, and where the endpoint is."""

    model: str = option("demo", "`demo`, or a folder with a Hugging Face model (safetensors)")
    prefill: int = option(1, "prefill workers; 0: every worker does both")
    decode: int = option(1, "decode workers; with --prefill 0, workers that do both")
    host: str = option("127.0.0.1", "address that the endpoint listens on")
    port: int = option(8000, "port of the endpoint; 0: any free one")
    redis_url: str = option("", "Redis or Valkey to use; empty: one of its own, which ends with it", secret=True)
    threads: int = option(0, "compute threads of each worker; 0: the cores are shared out among the workers")
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
        if self.threads < 0:
            raise ValueError(f"--threads {self.threads}: the number of threads cannot be negative")


@dataclass(frozen=True, slots=True)
class ExplainOptions:
    gateway: tuple[str, ...] = option(
        ("http://127.0.0.1:8000",), "URL of a gateway; may be repeated, or several with commas: the first that knows"
    )
    api_key_file: str = option("", "file with the API key of the request's tenant; empty: none is given")
