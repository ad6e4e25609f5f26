"""A runtime that runs containers as local processes, so that a pod does what its image does, without a cluster.

Each pod has a loopback address of its own as its IP. There are no namespaces: paths of mounts and names of Services
are replaced in arguments and variables (`substitution.py`), images are commands that the test gives, and resources,
users and security contexts are ignored. Everything that runs is killed when the sandbox closes or this process dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from tests.support.kube.controllers.timing import Timing
from tests.support.kube.kubelets import environment as variables
from tests.support.kube.kubelets.addresses import Addresses
from tests.support.kube.kubelets.client import KubeHttp, Refused
from tests.support.kube.kubelets.probes import Prober, Target
from tests.support.kube.kubelets.run import Command, ProcessRun
from tests.support.kube.kubelets.runtime import ImageMissing, NotYet, TestFault
from tests.support.kube.kubelets.services import Services
from tests.support.kube.kubelets.substitution import Mount, Mounts, services_named, services_substituted
from tests.support.kube.kubelets.volumes import Volumes
from tests.support.kube.resources import CONFIG_MAPS, SECRETS

Object = dict[str, Any]
SERVICE_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
TERMINATION_LOG = "/dev/termination-log"
PATH = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
FOLLOW_S = 60.0
"""How soon a mounted Secret follows a change, scaled."""


@dataclass(frozen=True, slots=True)
class Image:
    """What an image is on this machine."""

    entrypoint: tuple[str, ...] = ()
    """Used where the container gives no command."""
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ProcessWorld:
    """What the test tells of the world around its pods."""

    images: Mapping[str, Image]
    """By name; any other image cannot be pulled."""
    services: Mapping[str, str] = field(default_factory=dict)
    """`name.namespace.svc[:port]` -> `host[:port]`, for what is no pod here. Other Services are looked up."""
    unnamed_mounts: frozenset[str] = frozenset({"/tmp", "/dev/shm", SERVICE_ACCOUNT})
    """Mount paths that no argument or variable need name. `/tmp` is given to the process as TMPDIR."""


class ProcessRuntime:
    """`folder`: where pods' volumes and logs lie, and claims."""

    def __init__(self, kubeconfig: Path, folder: Path, world: ProcessWorld, timing: Timing) -> None:
        self.world, self.timing, self.folder = world, timing, folder
        self.client = KubeHttp(kubeconfig)
        self.addresses = Addresses()
        self._session: aiohttp.ClientSession | None = None
        self._sandboxes: dict[str, ProcessSandbox] = {}

    @property
    def prober(self) -> Prober:
        assert self._session is not None
        return Prober(self._session, self.timing)

    async def open(self) -> None:
        await self.client.__aenter__()
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(force_close=True), cookie_jar=aiohttp.DummyCookieJar(), trust_env=False
        )

    async def close(self) -> None:
        await self.client.__aexit__()
        assert self._session is not None
        await self._session.close()

    async def sandbox(self, pod: Object) -> ProcessSandbox:
        sandbox = ProcessSandbox(self, pod)
        try:
            await sandbox.prepare()
        except BaseException:
            await sandbox.close()
            raise
        self._sandboxes[pod["metadata"]["uid"]] = sandbox
        return sandbox

    def closed(self, pod_uid: str) -> None:
        self._sandboxes.pop(pod_uid, None)

    def processes(self, namespace: str, pod: str) -> dict[str, int]:
        """Pids of the pod's running containers, by name."""
        for sandbox in self._sandboxes.values():
            if (sandbox.namespace, sandbox.name) == (namespace, pod):
                return sandbox.pids()
        return {}

    def freeze(self, pod_uid: str) -> None:
        if (sandbox := self._sandboxes.get(pod_uid)) is not None:
            sandbox.signal(signal.SIGSTOP)

    def thaw(self, pod_uid: str) -> None:
        if (sandbox := self._sandboxes.get(pod_uid)) is not None:
            sandbox.signal(signal.SIGCONT)


class ProcessSandbox:
    def __init__(self, runtime: ProcessRuntime, pod: Object) -> None:
        metadata = pod["metadata"]
        self.name, self.namespace = str(metadata["name"]), str(metadata["namespace"])
        self.address = runtime.addresses.take()
        self._runtime, self._pod = runtime, pod
        self._folder = runtime.folder / "pods" / f"{self.namespace}_{self.name}_{metadata['uid'][:8]}"
        self._volumes = Volumes(pod, self._folder, runtime.folder / "claims", self._field, self._keys)
        self._services = Services(runtime.client, runtime.world.services)
        self._runs: dict[str, list[ProcessRun]] = {}
        self._follower: asyncio.Task[None] | None = None

    async def prepare(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        await self._volumes.make()
        self._follower = asyncio.create_task(self._follow())

    async def start(self, container: Object) -> ProcessRun:
        image = self._runtime.world.images.get(container.get("image", ""))
        if image is None:
            raise ImageMissing(f"{container.get('image')}: not found")
        _check_played(container)
        name = container["name"]
        runs = self._runs.setdefault(name, [])
        termination = self._folder / f"termination-{name}"
        mounts = self._mounts(container, termination)
        given = await variables.environment(container, self._field, self._keys)
        told = [*(container.get("command") or ()), *(container.get("args") or ())]
        # The entrypoint is this machine's already: its paths are no container's.
        entrypoint = () if container.get("command") else image.entrypoint
        if not told and not entrypoint:
            raise TestFault(f"container {name} has no command and its image {container['image']} no entrypoint")
        actions = {
            tuple(command): await self._ours([variables.expanded(each, given) for each in command], mounts)
            for command in _exec_commands(container)
        }
        command = Command(
            argv=[*entrypoint, *await self._ours([variables.expanded(each, given) for each in told], mounts)],
            environment=self._own_environment(image, mounts)
            | dict(zip(given, await self._ours(list(given.values()), mounts), strict=True)),
            folder=self._working_folder(container, mounts),
            log=self._folder / "logs" / name / f"{len(runs)}.log",
            termination_message=termination,
        )
        mounts.check_all_used()
        target = Target(self.address, _ports(container), command.environment, command.folder, actions)
        uid = self._pod["metadata"]["uid"]
        run = ProcessRun(container, command, target, self._runtime.prober, f"process://{uid}/{name}/{len(runs)}")
        runs.append(run)
        return run

    def log(self, container: str, *, previous: bool) -> str | None:
        number = len(self._runs.get(container) or ()) - (2 if previous else 1)
        return None if number < 0 else (self._folder / "logs" / container / f"{number}.log").read_text(errors="replace")

    def pids(self) -> dict[str, int]:
        latest = {name: runs[-1].pid for name, runs in self._runs.items()}
        return {name: pid for name, pid in latest.items() if pid is not None}

    def signal(self, number: signal.Signals) -> None:
        for runs in self._runs.values():
            runs[-1].signal_group(number)

    async def close(self) -> None:
        if self._follower is not None:
            self._follower.cancel()
            await asyncio.wait({self._follower})
        for runs in self._runs.values():
            for run in runs:
                run.end_now()
        self._runtime.addresses.give_back(self.address)
        self._runtime.closed(self._pod["metadata"]["uid"])

    def _mounts(self, container: Object, termination: Path) -> Mounts:
        path = container.get("terminationMessagePath") or TERMINATION_LOG
        mounts = [*self._volumes.mounts(container), Mount(path, termination, fixed=False)]
        return Mounts(container["name"], mounts, self._runtime.world.unnamed_mounts | {path})

    def _own_environment(self, image: Image, mounts: Mounts) -> dict[str, str]:
        """What a container has beside its own variables."""
        home = self._folder / "home"
        home.mkdir(exist_ok=True)
        temporary = mounts.at("/tmp") or self._folder / "tmp"
        temporary.mkdir(exist_ok=True)
        own = {"PATH": PATH, "HOME": str(home), "HOSTNAME": self.name, "TMPDIR": str(temporary)}
        return own | dict(image.environment)

    def _working_folder(self, container: Object, mounts: Mounts) -> Path:
        asked = container.get("workingDir")
        return (asked and mounts.at(asked)) or self._folder

    async def _ours(self, texts: list[str], mounts: Mounts) -> list[str]:
        """In this machine's terms."""
        named = {service for text in texts for service in services_named(text)}
        addresses = {service: await self._services.address(service) for service in named}
        return [mounts.substitute(services_substituted(text, addresses)) for text in texts]

    def _field(self, path: str) -> str:
        return variables.field(self._pod, path, address=self.address, host_address="127.0.0.1")

    async def _keys(self, kind: variables.KeyedKind, name: str) -> Mapping[str, bytes] | None:
        resource = SECRETS if kind == "Secret" else CONFIG_MAPS
        found = await self._runtime.client.get(resource, self.namespace, name)
        return None if found is None else variables.held({**found, "kind": kind})

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(max(self._runtime.timing.seconds(FOLLOW_S), 0.1))
            with contextlib.suppress(NotYet, Refused, aiohttp.ClientError, TimeoutError):
                await self._volumes.refresh()


def _ports(container: Object) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in container.get("ports") or () if port.get("name")}


def _check_played(container: Object) -> None:
    """Raises TestFault for what a process would silently do without."""
    hooks = container.get("lifecycle") or {}
    actions = {kind: container.get(f"{kind}Probe") for kind in ("startup", "readiness", "liveness")}
    actions["preStop"] = hooks.get("preStop")
    for kind, action in actions.items():
        if action and not {"httpGet", "tcpSocket", "exec", "sleep"} & action.keys():
            raise TestFault(f"container {container['name']}: its {kind} action {sorted(action)} is not played")
    if "postStart" in hooks or container.get("restartPolicy"):
        raise TestFault(f"container {container['name']}: postStart hooks and sidecar init containers are not played")


def _exec_commands(container: Object) -> list[list[str]]:
    """Of the container's probes and hooks."""
    actions = [container.get(f"{kind}Probe") or {} for kind in ("startup", "readiness", "liveness")]
    actions.append((container.get("lifecycle") or {}).get("preStop") or {})
    return [action["exec"]["command"] for action in actions if "exec" in action]
