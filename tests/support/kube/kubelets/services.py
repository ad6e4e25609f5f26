"""Names of Services as addresses, in place of a cluster's DNS: from the test's table, else of one of its pods.

One address is given where a Service has several pods: processes of one machine need no balancing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.support.kube.controllers.podinfo import is_ready, is_terminating
from tests.support.kube.kubelets.client import KubeHttp
from tests.support.kube.kubelets.runtime import NotYet
from tests.support.kube.kubelets.substitution import ServiceName, from_table
from tests.support.kube.resources import PODS, SERVICES

Object = Mapping[str, Any]


class Services:
    def __init__(self, client: KubeHttp, table: Mapping[str, str]) -> None:
        self._client, self._table = client, table

    async def address(self, service: ServiceName) -> str:
        """`address` or `address:port`. Raises NotYet while nothing stands behind the name."""
        if (given := from_table(self._table, service)) is not None:
            return given
        *host, name, namespace = service.name.split(".")
        found = await self._client.get(SERVICES, namespace, name)
        if found is None:
            raise NotYet("ContainerCreating", f"no Service {namespace}/{name}; make it, or name it in the test's table")
        pod = await self._pod(found, namespace, host[0] if host else "")
        address = str(pod["status"]["podIP"])
        return address if service.port is None else f"{address}:{_port(found, pod, service.port)}"

    async def _pod(self, service: Object, namespace: str, host: str) -> Object:
        selector = ",".join(f"{key}={value}" for key, value in (service["spec"].get("selector") or {}).items())
        pods = (await self._client.list(PODS, namespace, labelSelector=selector)).get("items") or []
        early = service["spec"].get("publishNotReadyAddresses")
        for pod in sorted(pods, key=lambda each: (not is_ready(each), each["metadata"]["name"])):
            if host and host not in (pod["spec"].get("hostname"), pod["metadata"]["name"]):
                continue
            if (pod.get("status") or {}).get("podIP") and not is_terminating(pod) and (early or is_ready(pod)):
                return dict(pod)
        which = f"{host}." if host else ""
        raise NotYet("ContainerCreating", f"no pod behind {which}{service['metadata']['name']}.{namespace}.svc yet")


def _port(service: Object, pod: Object, port: int) -> int:
    """The pod's port behind the Service's; a headless Service changes none."""
    if service["spec"].get("clusterIP") == "None":
        return port
    for each in service["spec"].get("ports") or ():
        if each["port"] == port:
            target = each.get("targetPort", port)
            return target if isinstance(target, int) else _named(pod, target)
    raise NotYet("ContainerCreating", f"Service {service['metadata']['name']} has no port {port}")


def _named(pod: Object, name: str) -> int:
    for container in pod["spec"]["containers"]:
        for port in container.get("ports") or ():
            if port.get("name") == name:
                return int(port["containerPort"])
    raise NotYet("ContainerCreating", f"pod {pod['metadata']['name']} has no port named {name}")
