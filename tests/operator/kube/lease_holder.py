"""A process that writes without pause for as long as it holds the Lease, as an operator with much to do would.

python lease_holder.py KUBECONFIG IDENTITY
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys

from antiphon_operator.kube.client import KubeClient
from antiphon_operator.kube.election import LeaseTiming
from antiphon_operator.kube.errors import KubeError
from antiphon_operator.kube.lease import Leadership

TIMING = LeaseTiming(lease_s=2.0, renew_deadline_s=1.5, retry_s=0.1)
LOST = 3
"""Exit status."""


async def main(kubeconfig: str, identity: str) -> None:
    leadership = Leadership(kubeconfig, "antiphon", "operator", identity, on_lost=lambda: os._exit(LOST), timing=TIMING)
    told = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told.set)
    await leadership.acquire()
    client = KubeClient.connect(kubeconfig, may_write=leadership.may_write)
    manifest = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"namespace": "antiphon", "name": identity}}
    try:
        while not told.is_set():
            try:
                await client.apply(manifest)
            except KubeError as error:
                sys.stderr.write(f"{type(error).__name__}\n")
                await asyncio.sleep(0)
    finally:
        await leadership.release()
        await client.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2]))
