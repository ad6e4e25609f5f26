"""A container's variables are made as the kubelet makes them."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tests.support.kube.kubelets.environment import environment, expanded, field, held
from tests.support.kube.kubelets.runtime import NotYet, TestFault

POD = {
    "metadata": {"name": "p-0", "namespace": "chat", "uid": "u", "labels": {"role": "decode", "a/b": "c"}},
    "spec": {"nodeName": "n-0"},
}


def fields(path: str) -> str:
    return field(POD, path, address="127.3.4.5", host_address="127.0.0.1")


async def keys(kind: str, name: str) -> Mapping[str, bytes] | None:
    return {("Secret", "redis"): {"password": b"s3"}, ("ConfigMap", "settings"): {"LEVEL": b"debug"}}.get((kind, name))


def from_secret(name: str, key: str, *, optional: bool = False) -> dict[str, object]:
    return {"name": "X", "valueFrom": {"secretKeyRef": {"name": name, "key": key, "optional": optional}}}


async def test_values_fields_keys_and_whole_maps() -> None:
    container = {
        "envFrom": [{"prefix": "S_", "configMapRef": {"name": "settings"}}],
        "env": [
            {"name": "POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
            {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "ROLE", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['role']"}}},
            {"name": "PASSWORD", "valueFrom": {"secretKeyRef": {"name": "redis", "key": "password"}}},
            {"name": "URL", "value": "$(POD)@$(IP):$(LATER) $$(POD) $(S_LEVEL)"},
            {"name": "LATER", "value": "x"},
            {"name": "EMPTY"},
            {**from_secret("none", "k", optional=True), "name": "ABSENT"},
        ],
    }
    assert await environment(container, fields, keys) == {
        "S_LEVEL": "debug",
        "POD": "p-0",
        "IP": "127.3.4.5",
        "ROLE": "decode",
        "PASSWORD": "s3",
        "URL": "p-0@127.3.4.5:$(LATER) $(POD) debug",
        "LATER": "x",
        "EMPTY": "",
    }


@pytest.mark.parametrize(
    ("name", "key", "said"), [("none", "k", 'secret "none" not found'), ("redis", "k", "find key k")]
)
async def test_a_missing_key_is_waited_for(name: str, key: str, said: str) -> None:
    with pytest.raises(NotYet, match=said) as caught:
        await environment({"env": [from_secret(name, key)]}, fields, keys)
    assert caught.value.reason == "CreateContainerConfigError"


async def test_what_is_not_played_is_an_error() -> None:
    with pytest.raises(TestFault, match=r"resourceFieldRef"):
        await environment({"env": [{"name": "X", "valueFrom": {"resourceFieldRef": {}}}]}, fields, keys)
    with pytest.raises(TestFault, match=r"status\.phase"):
        fields("status.phase")


def test_labels_as_a_file_and_held_keys() -> None:
    assert fields("metadata.labels") == 'a/b="c"\nrole="decode"\n'
    assert held({"kind": "Secret", "data": {"k": "dmFsdWU="}}) == {"k": b"value"}
    assert held({"kind": "ConfigMap", "data": {"k": "v"}, "binaryData": {"b": "AA=="}}) == {"k": b"v", "b": b"\0"}
    assert expanded("$(A)$(B)", {"A": "1"}) == "1$(B)"
