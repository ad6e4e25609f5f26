"""What happens to a pod on its way in: its service account, its tolerations, and the quotas of its namespace.

A quota counts by looking at the pods that are there; nothing is kept that could go stale.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from tests.support.kube.errors import ApiError, forbidden
from tests.support.kube.objects import Object, clone
from tests.support.kube.resources import PODS, RESOURCE_QUOTAS, SERVICE_ACCOUNTS
from tests.support.kube.store import Store

_SUFFIXES = {
    "m": Decimal("0.001"), "": Decimal(1), "k": Decimal(10**3), "M": Decimal(10**6), "G": Decimal(10**9),
    "T": Decimal(10**12), "P": Decimal(10**15), "Ki": Decimal(2**10), "Mi": Decimal(2**20), "Gi": Decimal(2**30),
    "Ti": Decimal(2**40), "Pi": Decimal(2**50),
}  # fmt: skip
_TAINTS = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")


def quantity(text: Any) -> Decimal:
    """`500m` is 0.5, `2Gi` is 2147483648."""
    number = str(text)
    suffix = ""
    while number and not (number[-1].isdigit() or number[-1] == "."):
        suffix, number = number[-1] + suffix, number[:-1]
    return Decimal(number) * _SUFFIXES[suffix]


def written(amount: Decimal) -> str:
    if amount != amount.to_integral_value():
        return f"{int(amount * 1000)}m"
    for suffix in ("Pi", "Ti", "Gi", "Mi", "Ki"):
        if amount and amount % _SUFFIXES[suffix] == 0:
            return f"{int(amount / _SUFFIXES[suffix])}{suffix}"
    return str(int(amount))


def admit_pod(store: Store, pod: Object) -> None:
    """Fills in what admission fills in; raises 403 where it refuses."""
    _service_account(store, pod)
    tolerations = pod["spec"].setdefault("tolerations", [])
    for taint in _TAINTS:
        if not any(
            each.get("key") in (taint, None, "") and each.get("effect") in ("NoExecute", None, "")
            for each in tolerations
        ):
            tolerations.append({"key": taint, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300})
    _quotas(store, pod)


def _service_account(store: Store, pod: Object) -> None:
    spec, metadata = pod["spec"], pod["metadata"]
    name = spec.setdefault("serviceAccountName", "default")
    spec["serviceAccount"] = name
    account = store.get(SERVICE_ACCOUNTS, (metadata["namespace"], name))
    if account is None:
        why = f'error looking up service account {metadata["namespace"]}/{name}: serviceaccount "{name}" not found'
        raise forbidden(PODS, metadata["name"], why)
    if not spec.get("imagePullSecrets") and account.get("imagePullSecrets"):
        spec["imagePullSecrets"] = clone(account["imagePullSecrets"])
    if spec.get("automountServiceAccountToken", account.get("automountServiceAccountToken", True)):
        _mount_token(spec)


def _mount_token(spec: Object) -> None:
    path, volume = "/var/run/secrets/kubernetes.io/serviceaccount", "kube-api-access-token"
    sources: list[Object] = [
        {"serviceAccountToken": {"expirationSeconds": 3607, "path": "token"}},
        {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
    ]
    for container in [*spec["containers"], *(spec.get("initContainers") or ())]:
        mounts = container.setdefault("volumeMounts", [])
        if not any(mount["mountPath"] == path for mount in mounts):
            mounts.append({"name": volume, "mountPath": path, "readOnly": True})
    spec.setdefault("volumes", []).append({"name": volume, "projected": {"sources": sources, "defaultMode": 420}})


def _requests(pod: Object) -> dict[str, Decimal]:
    """What a pod takes from quotas, by the names that quotas use."""
    total: dict[str, Decimal] = {"pods": Decimal(1), "count/pods": Decimal(1)}
    spec = pod["spec"]
    for kind in ("requests", "limits"):
        names = {
            name
            for container in [*spec["containers"], *(spec.get("initContainers") or ())]
            for name in ((container.get("resources") or {}).get(kind) or {})
        }
        for name in names:
            of = [
                [quantity(((c.get("resources") or {}).get(kind) or {}).get(name, 0)) for c in spec.get(group) or ()]
                for group in ("containers", "initContainers")
            ]
            amount = max([sum(of[0], Decimal(0)), *of[1]])
            total[f"{kind}.{name}"] = amount
            if kind == "requests" and "/" not in name:
                total[name] = amount
    return total


def _counts(pod: Object) -> bool:
    return (pod.get("status") or {}).get("phase") not in ("Succeeded", "Failed")


def used(store: Store, namespace: str, hard: dict[str, Any]) -> dict[str, Decimal]:
    total = dict.fromkeys(hard, Decimal(0))
    for pod in store.all(PODS, namespace):
        wanted = _requests(pod)
        for name in total:
            if name in wanted and (_counts(pod) or name == "count/pods"):
                total[name] += wanted[name]
    return total


def quota_status(store: Store, quota: Object) -> Object:
    hard = quota["spec"].get("hard") or {}
    taken = used(store, quota["metadata"]["namespace"], hard)
    return {"hard": dict(hard), "used": {name: written(amount) for name, amount in taken.items()}}


def _quotas(store: Store, pod: Object) -> None:
    namespace, name = pod["metadata"]["namespace"], pod["metadata"]["name"]
    wanted = _requests(pod)
    for quota in store.all(RESOURCE_QUOTAS, namespace):
        hard = quota["spec"].get("hard") or {}
        quota_name = quota["metadata"]["name"]
        compute = [key for key in hard if key.split(".")[-1] in ("cpu", "memory")]
        unsaid = sorted(key for key in compute if key not in wanted)
        if unsaid:
            containers = ",".join(container["name"] for container in pod["spec"]["containers"])
            needs = "; ".join(f"{key} for: {containers}" for key in unsaid)
            raise _refused(name, f"failed quota: {quota_name}: must specify {needs}")
        taken = used(store, namespace, hard)
        over = sorted(key for key in hard if wanted.get(key) and taken[key] + wanted[key] > quantity(hard[key]))
        if over:
            requested = ",".join(f"{key}={written(wanted[key])}" for key in over)
            in_use = ",".join(f"{key}={written(taken[key])}" for key in over)
            limited = ",".join(f"{key}={hard[key]}" for key in over)
            why = f"exceeded quota: {quota_name}, requested: {requested}, used: {in_use}, limited: {limited}"
            raise _refused(name, why)


def _refused(pod: str, why: str) -> ApiError:
    return forbidden(PODS, pod, why)
