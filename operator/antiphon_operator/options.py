"""What the operator can be told. Each field is a flag of `antiphon operator` and an `ANTIPHON_*` variable."""

from __future__ import annotations

from dataclasses import dataclass

from antiphon_telemetry.options import option


@dataclass(frozen=True, slots=True)
class OperatorOptions:
    """Options of one operator process. What workers get is in `OperatorContext`, made from these."""

    namespaces: tuple[str, ...] = option((), "namespaces to watch; none given: all of the cluster")
    kubeconfig: str = option("", "kubeconfig file (default: KUBECONFIG, else the pod's service account)")
    worker_image: str = option("antiphon-worker:0.1.0", "image of workers whose Model names none")
    worker_redis_url: str = option("redis://antiphon-valkey.antiphon.svc:6379/0", "Redis as workers reach it")
    redis_url: str = option("", "Redis as the operator reaches it, to write model records (empty: write none)")
    redis_username: str = option("", "Redis user of the operator")
    redis_password_file: str = option("", "file with the operator's Redis password, read at each connection")
    credentials_key_file: str = option("", "file with the key that the Models' Redis passwords are derived from")
    gateway_url: str = option("", "http://host:port of the gateways; every address of the host is asked")
    endpoint: str = option("", "base URL that clients use, for status.endpoint (default: --gateway-url)")
    otlp_endpoint: str = option("", "OTLP endpoint for the workers' traces (empty: none)")
    pod_monitors: bool = option(False, "make a PodMonitor for each Model (needs the Prometheus operator)")
    network_policies: bool = option(True, "make a NetworkPolicy for each Model")
    lease_name: str = option("antiphon-operator", "name of the Lease that decides which operator acts")
    lease_namespace: str = option("", "namespace of the Lease (default: POD_NAMESPACE)")
    lease_s: float = option(
        8.0, "how long the Lease lasts unrenewed; its holder ends after 5/8 of that without renewal"
    )
    identity: str = option("", "this operator's name in the Lease (default: POD_NAME with a random part)")
    start_deadline_s: float = option(60.0, "how long to wait at start for an API server that serves Models")
    host: str = option("0.0.0.0", "address of the status pages")
    status_port: int = option(9001, "port of /health, /ready, /metrics and /status (0: any free one)")
    ready_file: str = option("", "file to write {status_address, pid} to when listening")
    log_level: str = option("info", "least important log lines to write", choices=("debug", "info", "warning", "error"))
    log_json: bool = option(False, "write log lines as JSON")


@dataclass(frozen=True, slots=True)
class OperatorContext:
    """What the planner and the renderer know of the operator: part of every plan's input, the same all its life."""

    version: str
    """Of Antiphon; part of what makes `UpdateAvailable`."""
    worker_image: str
    worker_redis_url: str
    endpoint: str
    otlp_endpoint: str = ""
    gateway_configured: bool = True
    redis_configured: bool = True
    pod_monitors: bool = False
    network_policies: bool = True
