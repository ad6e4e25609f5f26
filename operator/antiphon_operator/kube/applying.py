"""Makes one object as it is wanted, with the fewest requests: none if it is so already."""

from __future__ import annotations

import logging

from antiphon_operator.kube.client import KubeClient
from antiphon_operator.kube.drift import Wanted, changed_fields, metadata_patch, needs_apply, stamped
from antiphon_operator.kube.resources import Object, resource_of

_log = logging.getLogger("antiphon.operator.apply")


async def ensure(
    client: KubeClient, wanted: Wanted, live: Object | None, *, only_as_seen: bool = False
) -> Object | None:
    """The object as it is after this; None: nothing had to be done. Raises ApiError.

    `only_as_seen`: somebody else may write fields of ours, and what is wanted was made from what stood there. So it is
    applied to `live` as it is given, and refused (Conflict) where another write came between.

    Of a `create_only` object that is there, only metadata is patched: applying it again could not change its fields,
    and would be refused if a newer operator rendered it otherwise.
    """
    manifest = wanted.manifest
    if live is not None and wanted.create_only:
        patch = metadata_patch(manifest, live)
        if patch is None:
            return None
        metadata = manifest["metadata"]
        resource = resource_of(manifest["apiVersion"], manifest["kind"])
        return await client.merge_patch(resource, metadata.get("namespace"), metadata["name"], patch)
    if not needs_apply(wanted, live):
        return None
    body = stamped(manifest)
    if only_as_seen and live is not None:
        body["metadata"]["resourceVersion"] = live["metadata"]["resourceVersion"]
    applied = await client.apply(body)
    refused = changed_fields(wanted, applied)
    if refused:
        # An admission rule writes something else there. It will be applied at each look, so somebody should know.
        _log.warning(
            "%s %s was applied but the API server keeps other values in %s: an admission rule or another manager "
            "changes them; exempt the operator's objects from it",
            manifest["kind"],
            manifest["metadata"]["name"],
            ", ".join(refused[:5]),
        )
    return applied
