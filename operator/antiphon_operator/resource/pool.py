"""The `Pool` resource: one pool of a Model as an object of its own, so that something else may scale it.

It has a stable name (`<model>-prefill`, `<model>-decode`), a `/scale` and a label selector: whatever can scale a
Deployment can scale it. The operator makes it; people write only its `replicas`, and only where the Model says
`autoscaling.mode: External`.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from antiphon_operator.resource.base import Resource, Rule, about


class PoolSpec(Resource, frozen=True, kw_only=True):
    """What a Pool should be."""

    RULES: ClassVar = (
        Rule(
            "self.role == oldSelf.role",
            "role never changes: the operator makes a Pool for each role of its Model",
            None,
        ),
    )

    role: Annotated[Literal["prefill", "decode"], about("Which pool of the Model this is.")]
    replicas: Annotated[
        Annotated[int, Meta(ge=0, le=1000)] | None,
        about(
            "Replicas that there should be. Written by the operator, or by what scales the pool where the Model has "
            "autoscaling mode External."
        ),
    ] = None
