"""What a worker can be told. Each field is a flag of `antiphon worker` and an `ANTIPHON_*` variable."""

from __future__ import annotations

from dataclasses import dataclass

from antiphon_telemetry.options import option


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """Options of one worker process."""

    model: str = option(
        "demo",
        "model to serve: 'demo', a folder in Hugging Face layout, a GGUF file, or hf://org/name[/file.gguf][@revision]",
    )
    name: str = option("", "name that clients use for the model (default: the model's own)")
    role: str = option("both", "what this worker does", choices=("prefill", "decode", "both"))
    engine: str = option("torch", "what computes: torch, or timed (waits instead)", choices=("torch", "timed"))
    dtype: str = option("bfloat16", "number format of weights and KV", choices=("bfloat16", "float32"))
    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(0, "gRPC port (0: any free one)")
    status_port: int = option(0, "HTTP port of /metrics, /health, /ready and /status (0: any free one)")
    advertise_host: str = option("", "host that peers and gateways reach this worker by (default: --host)")
    worker_id: str = option("", "unique name of this worker (default: <role>-<8 hex digits>)")
    revision: str = option("", "revision of the Model; workers of two revisions never work together")
    redis_url: str = option("", "Redis for membership and the block index (empty: none)", secret=True)
    redis_username: str = option("", "Redis user (empty: the URL's, or the default user)")
    redis_password_file: str = option("", "file with the Redis password, read again for each connection")
    list_model: bool = option(True, "keep the model in Redis's list of models (off: the operator does)")
    kv_blocks: int = option(0, "KV blocks in the pool (0: as many as --kv-memory-gb holds)")
    kv_memory_gb: float = option(0.0, "memory for the KV pool in GB (0: a share of what is free)")
    block_tokens: int = option(64, "tokens of one KV block")
    max_batch_tokens: int = option(512, "tokens computed in one step; also the length of a prompt chunk")
    max_sequences: int = option(64, "requests computed in one step")
    max_waiting_tokens: int = option(65536, "prompt tokens that may wait; more are refused")
    max_context_tokens: int = option(0, "longest prompt with its output (0: what the model allows)")
    tensor_parallel: int = option(1, "ranks that share each layer; above 1 in all, ranks are processes placed by Ray")
    pipeline_parallel: int = option(1, "stages that follow one another, each with a part of the layers")
    expert_parallel: int = option(1, "ranks of a stage that share its experts: 1, or as many as --tensor-parallel")
    spread_stages: bool = option(False, "place every stage on a machine of its own (off: as close as there is room)")
    ray_address: str = option("", "host:port of a Ray cluster to place ranks in (empty: one that ends with the worker)")
    ray_head: bool = option(False, "start a Ray cluster that other machines join, and place the ranks in it")
    ray_join: str = option("", "host:port of a --ray-head worker: give this machine to its ranks, and serve nothing")
    ray_token_file: str = option("", "file with the token by which the machines of the Ray cluster know each other")
    ray_node_ranks: int = option(0, "ranks that this machine takes with --ray-head or --ray-join (0: one a core)")
    ray_wait_s: float = option(300.0, "how long ranks wait for room, and --ray-join for the head")
    transport: str = option("auto", "how KV blocks are read from peers", choices=("auto", "ucx", "tcp"))
    self_measure: bool = option(True, "time some steps at the start, so that the first requests are routed by them")
    threads: int = option(0, "threads for computing (0: all cores)")
    cache_dir: str = option("", "folder for converted models (default: the user's cache folder)")
    heartbeat_ms: int = option(500, "how often peers and gateways hear of this worker")
    lost_after_ms: int = option(1500, "silence after which a peer or gateway is given up")
    drain_timeout_s: float = option(60.0, "how long running requests may take to end after SIGTERM")
    ready_file: str = option("", "file to write one JSON object to when ready")
    timed_base_ms: float = option(2.0, "timed engine: milliseconds of an empty step")
    timed_per_new_token_ms: float = option(0.02, "timed engine: milliseconds for each token computed")
    timed_per_token_context_ms: float = option(0.0, "timed engine: milliseconds for each (new token x context token)")
    timed_per_sequence_ms: float = option(0.05, "timed engine: milliseconds for each sequence in a step")
    timed_per_kv_token_ms: float = option(0.0, "timed engine: milliseconds for each KV token attended to")
    timed_block_bytes: int = option(4096, "timed engine: bytes of one KV block")
    log_level: str = option("info", "least important log lines to write", choices=("debug", "info", "warning", "error"))
    log_json: bool = option(False, "write log lines as JSON")
