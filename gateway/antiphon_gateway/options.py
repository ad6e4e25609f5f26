"""What the gateway can be told: flags and environment variables of `antiphon gateway`."""

from __future__ import annotations

from dataclasses import dataclass

from antiphon_telemetry.options import option


@dataclass(frozen=True, slots=True)
class GatewayOptions:
    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(8000, "port to listen on; 0 takes a free one")
    grpc_port: int = option(0, "port for the same API over gRPC, on the same address; 0: none")
    reuse_port: bool = option(
        False, "share the port with other gateway processes that say the same; connections are spread"
    )
    redis_url: str = option(
        "", "where workers announce themselves; empty: only the workers named by --worker", secret=True
    )
    redis_username: str = option("", "Redis user (empty: the URL's, or the default user)")
    redis_password_file: str = option("", "file with the Redis password, read again for each connection")
    ready_without_workers: bool = option(
        False, "be ready once Redis has told which workers there are, also if there are none (in a cluster)"
    )
    worker: tuple[str, ...] = option((), "host:port of a worker to use beside those found in Redis; may be repeated")
    routing: str = option(
        "cost",
        "who gets a request: by cache and load, or in turn (to compare with, or to look for a fault)",
        choices=("cost", "round-robin"),
    )
    queue_size: int = option(1024, "choices that may wait for a worker; one more is answered 429")
    queue_tokens: int = option(4_194_304, "uncached prompt tokens that may wait; more are answered 429")
    queue_timeout_s: float = option(30.0, "how long a choice may wait for a worker; then it is answered 503")
    wake_timeout_s: float = option(
        300.0, "how long a request may wait for a model that is scaled to zero or starting; then it is answered 503"
    )
    max_body_bytes: int = option(64 * 1024 * 1024, "largest request body; a larger one is answered 413")
    body_timeout_s: float = option(60.0, "how long a client may take to send its request body")
    api_keys_file: str = option("", "JSON file {api key: tenant}; empty: no key is asked for")
    cors_origin: tuple[str, ...] = option(
        (), "a web origin (https://host) whose pages may ask from a browser, or *; may be repeated; none: no other's"
    )
    heartbeat_ms: int = option(500, "how often each worker hears from this gateway")
    lost_after_ms: int = option(1500, "a worker that is silent for so long is lost")
    stall_timeout_s: float = option(300.0, "a request that no token came for in so long is cancelled")
    client_timeout_s: float = option(60.0, "a client that takes no data for so long is disconnected")
    keep_alive_s: float = option(
        15.0, "a stream in which nothing was said for so long gets a comment, which clients ignore; 0: none"
    )
    keep_alive_first_s: float = option(
        45.0,
        "the same before the first token; from then on a failure has no status, it is an event; 0: none before it",
    )
    stream_buffer_steps: int = option(2048, "steps kept for a client that reads slowly; more cancel its request")
    explain_requests: int = option(2000, "of so many last requests it is kept why they went where they went")
    explain_max_bytes: int = option(64 * 1024 * 1024, "memory for that, about; what is oldest is forgotten first")
    responses_stored: int = option(
        4096, "so many last answers of /v1/responses are kept in memory, to read and to go on with; 0: none"
    )
    responses_max_bytes: int = option(128 * 1024 * 1024, "memory for that, about; what is oldest is forgotten first")
    responses_keep_s: float = option(86_400.0, "how long an answer of /v1/responses is kept at most")
    encoding_cache_bytes: int = option(
        32 * 1024 * 1024, "memory for encodings of system prompts and earlier turns, which come again; 0: none"
    )
    trust_request_chat_template: bool = option(
        False, "let requests bring a chat template of their own (chat_template); it runs in the same sandbox"
    )
    tool_parser: str = option(
        "auto",
        "how calls of tools are marked in answers; auto: as the model's chat template marks them; none: they stay text",
        choices=("auto", "none", "hermes", "llama3_json", "mistral", "deepseek", "qwen3_coder"),
    )
    reasoning_parser: str = option(
        "auto",
        "how reasoning is marked in answers; auto: as the model's chat template marks it; none: it stays text",
        choices=("auto", "none", "think", "mistral"),
    )
    drain_timeout_s: float = option(30.0, "after SIGTERM, how long running requests may take to end")
    ready_file: str = option("", "write {address, pid} here, as JSON, when listening")
    log_level: str = option("info", "what to log", choices=("debug", "info", "warning", "error"))
    log_json: bool = option(False, "log one JSON object a line")
