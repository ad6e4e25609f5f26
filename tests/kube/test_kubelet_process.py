"""Pods as local processes: what a container's process sees: variables, mounts, Services, what came before it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.kube.cluster import FakeCluster
from tests.support.kube.controllers.podinfo import has_ended
from tests.support.kube.kubelets.process_samples import (
    SLEEP,
    WORLD,
    log_says,
    python,
    server,
    until_ended,
    until_running,
)
from tests.support.kube.kubelets.samples import NAMESPACE, container, job, pod, pod_spec, template
from tests.support.kube.resources import (
    CONFIG_MAPS,
    JOBS,
    PERSISTENT_VOLUME_CLAIMS,
    PODS,
    SECRETS,
    SERVICES,
)


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[FakeCluster]:
    async with FakeCluster(tmp_path, world=WORLD) as cluster:
        await cluster.add_node("n-0")
        await cluster.namespace(NAMESPACE)
        yield cluster


async def test_a_process_has_what_its_container_is_given_and_nothing_of_the_test(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_THE_TEST", "must not be seen")
    metadata = {"namespace": NAMESPACE}
    secret = {"metadata": {"name": "redis", **metadata}, "stringData": {"password": "s3cret"}}
    await cluster.create(SECRETS, {"apiVersion": "v1", "kind": "Secret", **secret})
    config = {"metadata": {"name": "settings", **metadata}, "data": {"level": "debug"}}
    await cluster.create(CONFIG_MAPS, {"apiVersion": "v1", "kind": "ConfigMap", **config})
    code = (
        "import json, os, pathlib, sys\n"
        "files = {str(p): pathlib.Path(p).read_text() for p in sys.argv[1:4]}\n"
        "pathlib.Path(sys.argv[4], 'written').write_text('x')\n"
        "print(json.dumps([dict(os.environ), list(files.values()), sys.argv[5]]))\n"
    )
    own = python(
        code,
        "/etc/redis/password",
        "/etc/settings/level.txt",
        "/etc/info/labels",
        "/scratch",
        "--redis=redis://valkey.infra.svc.cluster.local:6379/0",
        env=[
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "PASSWORD", "valueFrom": {"secretKeyRef": {"name": "redis", "key": "password"}}},
            {"name": "ADDRESS", "value": "$(POD_IP):9000"},
        ],
        volumeMounts=[
            {"name": "redis", "mountPath": "/etc/redis"},
            {"name": "settings", "mountPath": "/etc/settings"},
            {"name": "info", "mountPath": "/etc/info"},
            {"name": "scratch", "mountPath": "/scratch"},
            {"name": "tmp", "mountPath": "/tmp"},
        ],
    )
    volumes = [
        {"name": "redis", "secret": {"secretName": "redis"}},
        {"name": "settings", "configMap": {"name": "settings", "items": [{"key": "level", "path": "level.txt"}]}},
        {
            "name": "info",
            "projected": {
                "sources": [
                    {"downwardAPI": {"items": [{"path": "labels", "fieldRef": {"fieldPath": "metadata.labels"}}]}}
                ]
            },
        },
        {"name": "scratch", "emptyDir": {}},
        {"name": "tmp", "emptyDir": {}},
    ]
    await cluster.create(PODS, pod("one", pod_spec(own, volumes=volumes, restartPolicy="Never")))
    ended = await until_ended(cluster, "one")
    assert ended["exitCode"] == 0, ended
    live = await cluster.get(PODS, NAMESPACE, "one")
    assert live is not None
    said = cluster.kubelet.log(NAMESPACE, "one")
    assert said is not None
    environment, files, redis = json.loads(said)
    address = live["status"]["podIP"]
    assert address.startswith("127.")
    assert address != "127.0.0.1"
    assert environment["ADDRESS"] == f"{address}:9000"
    assert environment["PASSWORD"] == "s3cret"
    assert environment["FROM_IMAGE"] == "yes"
    assert "OF_THE_TEST" not in environment
    assert environment["TMPDIR"].startswith(environment["HOME"].removesuffix("home"))
    assert files == ["s3cret", "debug", 'app="one"\n']
    assert redis == "--redis=redis://127.0.0.1:7777/0"


async def test_init_containers_run_in_order_and_before(cluster: FakeCluster) -> None:
    volume = {"volumes": [{"name": "shared", "emptyDir": {}}]}
    mount = [{"name": "shared", "mountPath": "/shared"}]
    append = "import sys; open(sys.argv[1], 'a').write(sys.argv[2])"
    first = python(append, "/shared/file", "a", volumeMounts=mount) | {"name": "first"}
    second = python(append, "/shared/file", "b", volumeMounts=mount) | {"name": "second"}
    show = python("import sys; print(open(sys.argv[1]).read())", "/shared/file", volumeMounts=mount)
    spec = pod_spec(show, initContainers=[first, second], restartPolicy="Never", **volume)
    await cluster.create(PODS, pod("one", spec))
    await until_ended(cluster, "one")
    assert cluster.kubelet.log(NAMESPACE, "one") == "ab\n"


async def test_a_job_tells_what_it_found_and_a_claim_outlives_it(cluster: FakeCluster) -> None:
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "weights", "namespace": NAMESPACE},
        "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}},
    }
    await cluster.create(PERSISTENT_VOLUME_CLAIMS, claim)
    volumes = [{"name": "w", "persistentVolumeClaim": {"claimName": "weights"}}]
    mount = [{"name": "w", "mountPath": "/models"}]
    write = python(
        "import sys; open(sys.argv[1], 'w').write('w'); open(sys.argv[2], 'w').write('abc')",
        "/models/file",
        "/dev/termination-log",
        volumeMounts=mount,
    )
    await cluster.create(JOBS, job("fetch", template(pod_spec(write, volumes=volumes))))

    async def done() -> list[dict[str, Any]]:
        return [each for each in await cluster.pods(NAMESPACE) if has_ended(each)]

    [ended] = await cluster.eventually(done)
    assert ended["status"]["containerStatuses"][0]["state"]["terminated"]["message"] == "abc"
    read = python("import sys; print(open(sys.argv[1]).read())", "/models/file", volumeMounts=mount)
    await cluster.create(PODS, pod("reader", pod_spec(read, volumes=volumes, restartPolicy="Never")))
    await until_ended(cluster, "reader")
    assert cluster.kubelet.log(NAMESPACE, "reader") == "w\n"


async def test_a_service_is_the_address_of_a_ready_pod(cluster: FakeCluster, tmp_path: Path) -> None:
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "web", "namespace": NAMESPACE},
        "spec": {"selector": {"app": "one"}, "ports": [{"port": 80, "targetPort": "http"}]},
    }
    await cluster.create(SERVICES, service)
    own = python("import sys; print(sys.argv[1])", f"http://web.{NAMESPACE}.svc:80/page")
    await cluster.create(PODS, pod("client", pod_spec(own, restartPolicy="Never")))  # waits: nobody is there yet
    await cluster.create(PODS, server("one", str(tmp_path)))
    await until_ended(cluster, "client")
    live = await cluster.get(PODS, NAMESPACE, "one")
    assert live is not None
    assert cluster.kubelet.log(NAMESPACE, "client") == f"http://{live['status']['podIP']}:8000/page\n"


async def test_a_mounted_secret_follows_a_change(cluster: FakeCluster) -> None:
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "redis", "namespace": NAMESPACE}}
    await cluster.create(SECRETS, secret | {"stringData": {"password": "old"}})
    code = (
        "import sys, time\n"
        "while (word := open(sys.argv[1]).read()) == 'old': time.sleep(0.02)\n"
        "print(word); time.sleep(100)\n"
    )
    mount = [{"name": "redis", "mountPath": "/etc/redis"}]
    volumes = [{"name": "redis", "secret": {"secretName": "redis"}}]
    own = python(code, "/etc/redis/password", volumeMounts=mount)
    await cluster.create(PODS, pod("one", pod_spec(own, volumes=volumes, terminationGracePeriodSeconds=1)))
    await until_running(cluster, "one")
    await cluster.client.merge_patch(SECRETS, NAMESPACE, "redis", {"stringData": {"password": "new"}})
    await log_says(cluster, "one", "new\n")


async def test_a_mount_that_the_process_cannot_see_is_raised_when_the_cluster_closes(tmp_path: Path) -> None:
    cluster = FakeCluster(tmp_path, world=WORLD)
    with pytest.RaisesGroup(pytest.RaisesExc(Exception, match=r"no argument or variable names its mounts \['/data'\]")):
        async with cluster:
            await cluster.add_node("n-0")
            await cluster.namespace(NAMESPACE)
            own = python(SLEEP, volumeMounts=[{"name": "data", "mountPath": "/data"}])
            await cluster.create(PODS, pod("one", pod_spec(own, volumes=[{"name": "data", "emptyDir": {}}])))

            async def told() -> bool:
                live = await cluster.get(PODS, NAMESPACE, "one")
                return "CreateContainerError" in json.dumps(live)

            await cluster.eventually(told)


async def test_an_unknown_image_cannot_be_pulled(cluster: FakeCluster) -> None:
    await cluster.create(PODS, pod("one", pod_spec(container("registry/none:1"))))

    async def told() -> bool:
        return "ImagePullBackOff" in json.dumps(await cluster.get(PODS, NAMESPACE, "one"))

    await cluster.eventually(told)
