"""Kubeconfigs and service accounts as they are found in the field."""

from __future__ import annotations

import base64
import ssl
from pathlib import Path
from typing import Any

import pytest
import trustme
import yaml
from aiohttp import web
from antiphon_operator.kube.access import FileToken, service_account
from antiphon_operator.kube.client import KubeClient
from antiphon_operator.kube.errors import AccessError
from antiphon_operator.kube.kubeconfig import find_access, read_kubeconfig
from antiphon_operator.kube.resources import PODS

from tests.operator.kube.scripted_api import Asked, ScriptedApi, ok, refused, serving


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 with its authority behind it, and its key."""
    folder = tmp_path_factory.mktemp("pki")
    certificate, key = folder / "tls.crt", folder / "tls.key"
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1", common_name="operator")
    certificate.write_bytes(issued.cert_chain_pems[0].bytes() + authority.cert_pem.bytes())
    issued.private_key_pem.write_to_path(key)
    return certificate, key


def kubeconfig(folder: Path, *, cluster: dict[str, Any], user: dict[str, Any] | None = None, name: str = "c") -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": name,
                "contexts": [{"name": name, "context": {"cluster": name, "user": name, "namespace": "chat"}}],
                "clusters": [{"name": name, "cluster": cluster}],
                "users": [{"name": name, "user": user or {}}],
            }
        )
    )
    return path


def encoded(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()


@pytest.mark.parametrize("inline", [True, False])
async def test_certificates_of_both_sides_work_as_data_and_as_files(
    tmp_path: Path, pair: tuple[Path, Path], inline: bool
) -> None:
    certificate, key = pair
    server_side = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(certificate))
    server_side.load_cert_chain(certificate, key)
    server_side.verify_mode = ssl.CERT_REQUIRED
    application = web.Application()

    async def who(request: web.Request) -> web.Response:
        assert request.transport is not None
        subject = dict(part for parts in request.transport.get_extra_info("peercert")["subject"] for part in parts)
        return web.json_response({"peer": subject["commonName"]})

    application.router.add_get("/{path:.*}", who)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=server_side).start()
    server = f"https://127.0.0.1:{runner.addresses[0][1]}"
    if inline:
        cluster = {"server": server, "certificate-authority-data": encoded(certificate)}
        user = {"client-certificate-data": encoded(certificate), "client-key-data": encoded(key)}
    else:
        for path in pair:
            (tmp_path / path.name).write_bytes(path.read_bytes())
        cluster = {"server": server, "certificate-authority": certificate.name}
        user = {"client-certificate": certificate.name, "client-key": key.name}
    client = KubeClient.connect(str(kubeconfig(tmp_path, cluster=cluster, user=user)))
    assert (await client.get(PODS, "chat", "p"))["peer"] == "operator"
    await client.close()
    await runner.cleanup()


async def test_a_token_that_was_renewed_on_disk_is_read_when_the_old_one_is_not_accepted(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("old\n")

    async def check(asked: Asked) -> web.Response:
        if asked.headers["Authorization"] != "Bearer new":
            return refused(401, "Unauthorized", "Unauthorized")
        return ok({"metadata": {}})

    async with serving(ScriptedApi().then(check)) as api:
        client = KubeClient.connect(
            str(kubeconfig(tmp_path, cluster={"server": api.url}, user={"tokenFile": token.name}))
        )
        token.write_text("new\n")
        await client.get(PODS, "chat", "p")
        assert len(api.asked) == 2
        await client.close()


def test_a_token_file_is_read_again_every_minute(tmp_path: Path) -> None:
    path, now = tmp_path / "token", 0.0
    path.write_text("first")
    token = FileToken(path, clock=lambda: now)
    assert token.value() == "first"
    path.write_text("second")
    now = 59.0
    assert token.value() == "first"
    now = 60.0
    assert token.value() == "second"
    path.unlink()
    now = 500.0
    assert token.value() == "second", "the kubelet is just replacing it"


@pytest.mark.parametrize(
    ("user", "says"),
    [
        ({"exec": {"command": "aws"}}, "runs a program"),
        ({"auth-provider": {"name": "gcp"}}, "auth provider"),
        ({"username": "admin", "password": "x"}, "password"),
        ({"as": "root", "token": "t"}, "somebody else"),
    ],
)
def test_credentials_that_the_operator_does_not_do_are_refused_with_a_sentence(
    tmp_path: Path, user: dict[str, Any], says: str
) -> None:
    path = kubeconfig(tmp_path, cluster={"server": "https://127.0.0.1:1"}, user=user)
    with pytest.raises(AccessError, match=f"{says}.*client certificate, `token` or `tokenFile`"):
        find_access(str(path))


def test_the_first_of_several_files_that_names_a_thing_counts(tmp_path: Path) -> None:
    first = kubeconfig(tmp_path, cluster={"server": "http://first:1/"}, name="one")
    second = kubeconfig(tmp_path, cluster={"server": "http://second:1"}, name="two")
    assert read_kubeconfig([first, second]).server == "http://first:1"
    found = find_access("", {"KUBECONFIG": f"{second}:{first}"})
    assert (found.server, found.namespace) == ("http://second:1", "chat")


def test_a_context_that_is_not_there_is_named(tmp_path: Path) -> None:
    path = tmp_path / "config"
    path.write_text("apiVersion: v1\nkind: Config\ncurrent-context: nowhere\n")
    with pytest.raises(AccessError, match="no context 'nowhere'"):
        find_access(str(path))


def test_verification_is_off_only_where_the_file_says_so(tmp_path: Path) -> None:
    cluster = {"server": "https://127.0.0.1:1"}
    verified = find_access(str(kubeconfig(tmp_path, cluster=cluster))).tls
    assert verified is not None
    assert verified.verify_mode == ssl.CERT_REQUIRED
    skipped = find_access(str(kubeconfig(tmp_path, cluster=cluster | {"insecure-skip-tls-verify": True}))).tls
    assert skipped is not None
    assert skipped.verify_mode == ssl.CERT_NONE


def test_a_pod_uses_its_service_account(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    (tmp_path / "ca.crt").write_bytes(pair[0].read_bytes())
    (tmp_path / "token").write_text("t0")
    (tmp_path / "namespace").write_text("antiphon")
    access = service_account({"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "6443"}, tmp_path)
    assert (access.server, access.namespace) == ("https://[fd00::1]:6443", "antiphon")
    assert access.token is not None
    assert access.token.value() == "t0"


def test_without_any_way_to_a_server_the_error_says_what_to_give() -> None:
    with pytest.raises(AccessError, match="--kubeconfig or KUBECONFIG"):
        find_access("", {})
