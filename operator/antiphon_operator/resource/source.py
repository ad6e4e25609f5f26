"""What is served: where the weights come from, which engine computes, and on which devices."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from antiphon_operator.resource.base import ObjectName, OptionalName, Quantity, Resource, Rule, about, form

URI = (
    r"^(demo|hf://[A-Za-z0-9._-]+/[A-Za-z0-9._-]+(/([A-Za-z0-9._-]+/)*[A-Za-z0-9._-]+[.]gguf)?"
    r"|pvc://[a-z0-9]([-a-z0-9.]*[a-z0-9])?(/[A-Za-z0-9._-]+)*)$"
)
REVISION = r"^([A-Za-z0-9]([A-Za-z0-9._/-]*[A-Za-z0-9])?)?$"
EXTENDED_RESOURCE = r"^(none|[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$"


class SecretReference(Resource, frozen=True, kw_only=True):
    """A key of a Secret."""

    name: Annotated[ObjectName, about("Name of a Secret in the Model's namespace.")]
    key: Annotated[str, about("Key in the Secret that holds the token.", min_length=1, max_length=253)] = "token"


class Cache(Resource, frozen=True, kw_only=True):
    """Where the weights lie on the nodes."""

    RULES: ClassVar = (
        Rule(
            "self.type != 'Claim' || (has(self.claimName) && self.claimName != '')",
            "type Claim needs claimName: name a PersistentVolumeClaim that many pods may read",
            lambda it: it.type != "Claim" or it.claim_name != "",
        ),
        Rule(
            "self.type != 'Ephemeral' || !has(self.claimName) || self.claimName == ''",
            "claimName goes with type Claim: set type: Claim, or remove claimName",
            lambda it: it.type != "Ephemeral" or it.claim_name == "",
        ),
        Rule(
            "self.type != 'Claim' || !has(self.size)",
            "size is that of an Ephemeral cache: remove size, the claim has a size of its own",
            lambda it: it.type != "Claim" or it.size is None,
        ),
    )

    type: Annotated[
        Literal["Ephemeral", "Claim"],
        about(
            "Ephemeral: each pod downloads the weights into a volume of its own. Claim: a Job downloads them once into "
            "a PersistentVolumeClaim that all pods read."
        ),
    ] = "Ephemeral"
    size: Annotated[
        Quantity | None,
        about("Size limit of the Ephemeral volume, such as 80Gi; a pod that exceeds it is evicted."),
    ] = None
    claim_name: Annotated[
        OptionalName,
        about(
            "PersistentVolumeClaim in the Model's namespace, with access mode ReadWriteMany or ReadOnlyMany. Several "
            "Models may share it."
        ),
    ] = ""


class Source(Resource, frozen=True, kw_only=True):
    """Where the weights come from."""

    RULES: ClassVar = (
        Rule(
            "!self.uri.startsWith('pvc://') || !self.uri.contains('..')",
            "the path of a pvc:// source goes down from the claim's root: write it without '..'",
            lambda it: not it.uri.startswith("pvc://") or ".." not in it.uri,
        ),
        Rule(
            "self.uri.startsWith('hf://') || !has(self.revision) || self.revision == ''",
            "revision goes with an hf:// source only: remove revision",
            lambda it: it.uri.startswith("hf://") or it.revision == "",
        ),
        Rule(
            "self.uri.startsWith('hf://') || !has(self.secretRef)",
            "secretRef goes with an hf:// source only: remove secretRef",
            lambda it: it.uri.startswith("hf://") or it.secret_ref is None,
        ),
        Rule(
            "self.uri.startsWith('hf://') || self.cache.type != 'Claim'",
            "cache type Claim goes with an hf:// source only: remove cache (a pvc:// source is read where it lies)",
            lambda it: it.uri.startswith("hf://") or it.cache.type != "Claim",
        ),
    )

    uri: Annotated[
        str,
        form(
            URI,
            "write hf://organisation/name, hf://organisation/name/file.gguf, pvc://claim or pvc://claim/path/in/it, or "
            "demo",
            max_length=512,
            min_length=1,
        ),
        about(
            "Where the weights are: `hf://organisation/name` (Hugging Face hub), `hf://organisation/name/file.gguf` "
            "(one GGUF file of a repository there), `pvc://claim/path` (a folder in a PersistentVolumeClaim of this "
            "namespace, or a GGUF file if it ends in .gguf), or `demo` (a small model inside the worker image)."
        ),
    ]
    revision: Annotated[
        str,
        form(REVISION, "write a branch, a tag or a commit, such as main", max_length=128),
        about(
            "Branch, tag or commit of an hf:// source; empty: the default branch. It is resolved to a commit once for "
            "each revision of the Model, so all pods serve the same weights."
        ),
    ] = ""
    secret_ref: Annotated[SecretReference | None, about("Token for a private or gated hf:// repository.")] = None
    cache: Annotated[Cache, about("Where the weights of an hf:// source are kept.")] = Cache()


class Engine(Resource, frozen=True, kw_only=True):
    """What computes."""

    name: Annotated[
        Literal["torch", "timed", "vllm"],
        about(
            "Which engine computes. torch: Antiphon's own. timed: waits instead of computing, for tests of many "
            "workers. vllm: refused by this version."
        ),
    ] = "torch"
    dtype: Annotated[Literal["bfloat16", "float32"], about("Number format of the weights and of the KV cache.")] = (
        "bfloat16"
    )
    image: Annotated[
        str,
        about("Worker image. Empty: the operator's own, kept for the life of a revision.", max_length=512),
    ] = ""
    args: Annotated[
        tuple[Annotated[str, Meta(min_length=1, max_length=512)], ...],
        about(
            "Further options of `antiphon worker`, such as `--max-batch-tokens=1024`. What a typed field says may not "
            "be said here again.",
            max_length=64,
        ),
    ] = ()


class Accelerator(Resource, frozen=True, kw_only=True):
    """On which devices."""

    resource: Annotated[
        str,
        form(
            EXTENDED_RESOURCE,
            "write an extended resource such as nvidia.com/gpu, or none",
            max_length=253,
        ),
        about(
            "Extended resource of one device, such as `nvidia.com/gpu`, or `none`. Empty: `none` for source `demo` and "
            "for the timed engine, else `nvidia.com/gpu`."
        ),
    ] = ""
