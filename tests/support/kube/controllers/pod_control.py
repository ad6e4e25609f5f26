"""Making and deleting pods as the workload controllers do: a refusal becomes a FailedCreate warning and a back-off.

A quota's refusal is seen nowhere but in these events, so the words are the real controllers'.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.support.kube.api import Api, ApiError
from tests.support.kube.controllers.events import post_event
from tests.support.kube.resources import PODS


def create_pod(api: Api, owner: Mapping[str, Any], pod: Mapping[str, Any], component: str) -> None:
    """Raises ApiError after it has told of it, so that the loop backs off."""
    namespace, name, kind = owner["metadata"]["namespace"], pod["metadata"]["name"], owner["kind"]
    in_set = f"create Pod {name} in {kind} {owner['metadata']['name']}"
    try:
        api.create(PODS, namespace, dict(pod))
    except ApiError as error:
        message = (
            f"{in_set} failed error: {error.message}" if kind == "StatefulSet" else f"Error creating: {error.message}"
        )
        post_event(api, owner, kind="Warning", reason="FailedCreate", message=message, component=component)
        raise
    message = f"{in_set} successful" if kind == "StatefulSet" else f"Created pod: {name}"
    post_event(api, owner, kind="Normal", reason="SuccessfulCreate", message=message, component=component)


def delete_pod(api: Api, pod: Mapping[str, Any], *, grace_s: int | None = None) -> None:
    metadata = pod["metadata"]
    try:
        api.delete(PODS, metadata["namespace"], metadata["name"], uid=metadata["uid"], grace_s=grace_s)
    except ApiError as error:
        if error.status not in (404, 409):
            raise
