"""The Job that finds a Model's weights before any pod is made.

For an Ephemeral cache it only resolves the branch or tag to a commit and adds up sizes (pods download for
themselves); for a Claim it downloads once, into a folder of the claim named by the commit, beside what is there.
It says what it found in its termination message (`read_source_result`). What starting again cannot cure (no such
model, no access) ends the Job at once; trouble with the network is tried again.
"""

from __future__ import annotations

from antiphon_operator import names
from antiphon_operator.options import OperatorContext
from antiphon_operator.render.environment import fetch_environment
from antiphon_operator.render.metadata import SOURCE, Manifest, labels, metadata
from antiphon_operator.render.security import container_security
from antiphon_operator.render.templates import FETCH_RESOURCES, image_of, pod_defaults
from antiphon_operator.render.volumes import authorities, scratch
from antiphon_operator.render.weights import MODELS_FOLDER, source_content
from antiphon_operator.resource.effective import EffectiveModel

TERMINATION_LOG = "/dev/termination-log"

BAD_INPUT_EXIT = 2
"""Of `antiphon fetch`: see `antiphon_telemetry.exit`."""
TRIES = 4
RESOLVE_DEADLINE_S = 600
FETCH_DEADLINE_S = 24 * 3600
"""A terabyte at 12 MB/s. A new Job goes on where this one was."""


def source_job(model: EffectiveModel, context: OperatorContext) -> Manifest:
    """The Job of a Model whose `weights.needs_source_job`."""
    into_claim = model.spec.source.cache.type == "Claim"
    own = labels(model, SOURCE)
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata(model, names.source_job_name(model.name, source_content(model)), own),
        "spec": {
            "backoffLimit": TRIES,
            "activeDeadlineSeconds": FETCH_DEADLINE_S if into_claim else RESOLVE_DEADLINE_S,
            "podFailurePolicy": {
                "rules": [
                    {
                        "action": "FailJob",
                        "onExitCodes": {"containerName": "fetch", "operator": "In", "values": [BAD_INPUT_EXIT]},
                    },
                    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                ]
            },
            "template": {"metadata": {"labels": own}, "spec": _pod(model, context, into_claim=into_claim)},
        },
    }


def _pod(model: EffectiveModel, context: OperatorContext, *, into_claim: bool) -> Manifest:
    source = model.spec.source
    volumes = [scratch(), *authorities(model)]
    arguments = [source.uri]
    if source.revision:
        arguments += ["--revision", source.revision]
    arguments += ["--to", MODELS_FOLDER, "--termination-log", TERMINATION_LOG]
    container: Manifest = {
        "name": "fetch",
        "image": image_of(model, context),
        "command": ["antiphon", "fetch"],
        "args": arguments if into_claim else [*arguments, "--resolve-only"],
        "env": fetch_environment(model),
        "resources": FETCH_RESOURCES,
        "securityContext": container_security(),
        "volumeMounts": [volume.mount for volume in volumes],
        "terminationMessagePath": TERMINATION_LOG,
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    spec: Manifest = {
        **pod_defaults(model),
        "restartPolicy": "Never",
        "containers": [container],
        "volumes": [volume.volume for volume in volumes],
    }
    if into_claim:
        container["volumeMounts"].append({"name": "weights", "mountPath": MODELS_FOLDER})
        spec["volumes"].append({"name": "weights", "persistentVolumeClaim": {"claimName": source.cache.claim_name}})
    return spec
