"""The double as a process of its own: `python -m tests.support.kube --kubeconfig FILE [--port N] [MANIFEST ...]`.

Writes the kubeconfig once it serves, creates the objects of the manifests (YAML files), runs until SIGINT or SIGTERM.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
from pathlib import Path

import yaml

from tests.support.kube.server import KubeServer


async def serve(kubeconfig: Path, port: int, manifests: list[Path]) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with KubeServer(port=port) as server:
        for manifest in manifests:
            for body in yaml.safe_load_all(await asyncio.to_thread(manifest.read_text)):
                resource = server.api.registry.of_kind(body["apiVersion"], body["kind"])
                if resource is None:
                    raise SystemExit(f"{manifest}: no such kind here: {body['apiVersion']} {body['kind']}")
                namespace = body["metadata"].get("namespace", "default") if resource.namespaced else None
                server.api.create(resource, namespace, body, manager="kubectl")
        server.write_kubeconfig(kubeconfig)
        print(f"serving at {server.url}; export KUBECONFIG={kubeconfig}", flush=True)
        await stop.wait()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.support.kube", description="A test double of Kubernetes")
    parser.add_argument("--kubeconfig", type=Path, required=True, help="where to write the kubeconfig")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("manifests", type=Path, nargs="*", help="YAML files of objects to create first")
    options = parser.parse_args()
    asyncio.run(serve(options.kubeconfig, options.port, options.manifests))


if __name__ == "__main__":
    main()
