"""`antiphon render model.yaml`: the objects that a Model would be made of, without a cluster.

The operator's own planner decides. It is shown an empty cluster, then the objects that it asked for as if they had
been made, until it asks for nothing new. What only a cluster knows is stood in for, and said so on stderr: the commit
that a revision of an `hf://` source stands for (so the revision's name differs too), and what is secret: the password
of the Model's Redis user and the token of its gangs, whose Secrets are not printed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import re
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml
from antiphon_operator.names import WEIGHTS_ANNOTATION, ray_secret_name, redis_secret_name
from antiphon_operator.options import OperatorContext, OperatorOptions
from antiphon_operator.plan.observed import Observed
from antiphon_operator.plan.planner import plan
from antiphon_operator.render.weights import MODELS_FOLDER, needs_source_job
from antiphon_operator.resource.effective import EffectiveModel
from antiphon_telemetry.exit import ExitCode

from antiphon.fetch import folder_name
from antiphon.model_file import ModelDocument, ModelFileError, read_models

_COMMIT = re.compile(r"^[0-9a-f]{40}$")
_NO_COMMIT = "0" * 40
_UID = "00000000-0000-0000-0000-000000000000"
_LOOKS = 10
"""A Model settles after three."""

Manifest = Mapping[str, Any]


def run_render(arguments: Sequence[str]) -> int:
    """The command; its exit code."""
    parser = argparse.ArgumentParser(
        prog="antiphon render",
        description="Prints the Kubernetes objects that the Models in a file would be made of, without a cluster.",
        allow_abbrev=False,
    )
    parser.add_argument("file", help="YAML file with Models; `-`: standard input")
    parser.add_argument("--namespace", default="default", help="of Models that name none (default: default)")
    parser.add_argument("--output", choices=("yaml", "json"), default="yaml", help="how to print (default: yaml)")
    given = parser.parse_args(arguments)
    try:
        text = sys.stdin.read() if given.file == "-" else Path(given.file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        _say(f"antiphon: {given.file} cannot be read: {error}")
        return ExitCode.BAD_INPUT
    try:
        found = read_models(text, "stdin" if given.file == "-" else given.file, given.namespace)
    except ModelFileError as error:
        for problem in error.problems:
            _say(problem)
        return ExitCode.BAD_INPUT
    context = default_context()
    manifests = [manifest for document in found.models for manifest in children_of(document, context)]
    for line in found.others:
        _say(f"# {line}")
    for document in found.models:
        _say_what_is_stood_in_for(document.model)
    if given.output == "json":
        print(json.dumps({"apiVersion": "v1", "kind": "List", "items": manifests}, indent=2))
    else:
        print(yaml.dump_all(manifests, Dumper=_Plain, sort_keys=False, width=110, allow_unicode=True), end="")
    return ExitCode.OK


def default_context() -> OperatorContext:
    """Of an operator with the chart's defaults."""
    options = OperatorOptions()
    return OperatorContext(
        version=importlib.metadata.version("antiphon"),
        worker_image=options.worker_image,
        worker_redis_url=options.worker_redis_url,
        endpoint=options.endpoint,
    )


def children_of(document: ModelDocument, context: OperatorContext) -> list[Manifest]:
    """All objects, in the order in which they would be applied first."""
    model = document.model
    metadata = {**document.written["metadata"], "uid": _UID, "generation": 1, "creationTimestamp": _NOW.isoformat()}
    asked: dict[tuple[str, str], Manifest] = {}
    for _ in range(_LOOKS):
        observed = Observed(
            model={**document.written, "metadata": metadata},
            children=tuple(_made(manifest, model) for manifest in asked.values()),
            pods=(),
            name_owners={name: model.key for name in model.names},
            claims={name: _CLAIM for name in _claims_of(model)},
        )
        before = len(asked)
        for apply in plan(observed, context, _NOW).applies:
            asked.setdefault((apply.manifest["kind"], apply.manifest["metadata"]["name"]), apply.manifest)
        if len(asked) == before:
            break
    return list(asked.values())


_NOW = datetime.fromisoformat("2000-01-01T00:00:00+00:00")
"""Any time: nothing of it is printed but in notes."""
_CLAIM: Manifest = {"spec": {"accessModes": ["ReadWriteMany"]}, "status": {"phase": "Bound"}}


def _claims_of(model: EffectiveModel) -> set[str]:
    uri = model.spec.source.uri
    return {uri.removeprefix("pvc://").partition("/")[0], model.spec.source.cache.claim_name}


def _made(manifest: Manifest, model: EffectiveModel) -> Manifest:
    """The object as a cluster would show it later; the Job has done its work."""
    own = {**manifest["metadata"], "uid": f"{manifest['kind']}/{manifest['metadata']['name']}"}
    own["creationTimestamp"] = _NOW.isoformat()
    if manifest["kind"] == "Job":
        own["annotations"] = {**(own.get("annotations") or {}), WEIGHTS_ANNOTATION: _found(model)}
    return {**manifest, "metadata": own}


def _commit(model: EffectiveModel) -> str:
    revision = model.spec.source.revision
    return revision if _COMMIT.match(revision) else _NO_COMMIT


def _found(model: EffectiveModel) -> str:
    """What the Job would say."""
    repository, commit = model.spec.source.uri.removeprefix("hf://"), _commit(model)
    path = f"{MODELS_FOLDER}/{folder_name(repository, commit)}"
    return json.dumps({"revision": commit, "size_bytes": 0, "path": path})


def _say_what_is_stood_in_for(model: EffectiveModel) -> None:
    _say(f"# {model.key}: not printed: Secret {redis_secret_name(model.name)}, whose password the operator makes")
    if any(pool.pods > 1 for pool in model.pools):
        _say(f"# {model.key}: not printed: Secret {ray_secret_name(model.name)}, whose token the operator makes")
    if needs_source_job(model):
        commit = "" if _commit(model) != _NO_COMMIT else f"commit {_NO_COMMIT} stands for the one that"
        commit = commit or "the size of the weights is what"
        _say(f"# {model.key}: {commit} the Job finds; names with the revision and sizes of volumes follow from it")


class _Plain(yaml.SafeDumper):
    """No anchors: what is there twice is written twice."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _say(line: str) -> None:
    print(line, file=sys.stderr)
