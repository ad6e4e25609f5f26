"""What the typed resources are written with: the struct they all are, rules with sentences, and the scalars.

A rule stands beside the type it is about and is written twice: in CEL, for the API server, which refuses a wrong
object when it is applied; and in Python, for `antiphon render`, which has no API server. A test holds the two to the
same cases. The message is a sentence that says what to change: it is all that a person gets to see.

A text that has to have a form carries the form and its sentence (`form`). In the CRD this becomes a rule and not a
`pattern`, because the API server answers a broken pattern with the pattern.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta, Struct

SAYS = "x-antiphon-says"
"""In a text's extra schema: the sentence that goes with its form."""
NO_DEFAULT = "x-antiphon-no-default"
"""In a field's extra schema: the CRD gives it no default, so that rules can see whether a person wrote it."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule of a type. `self` is the object in CEL and the argument of `holds` in Python."""

    cel: str
    message: str
    holds: Callable[[Any], bool] | None
    """None: a transition rule (`oldSelf`), which only an API server can judge."""


class Resource(Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=False):
    """Python's snake_case is the YAML's camelCase."""

    RULES: ClassVar[tuple[Rule, ...]] = ()


@cache
def fields_of(resource: type[Resource]) -> tuple[msgspec.structs.FieldInfo, ...]:
    """The fields of a type, worked out once: it takes a fifth of a millisecond, and every plan asks for all of them."""
    return msgspec.structs.fields(resource)


def plain(resource: Resource) -> dict[str, Any]:
    """As JSON has it: camelCase keys, lists rather than tuples. Every field is there, also those at their default."""
    written: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(resource))
    return written


def about(description: str, **bounds: Any) -> Meta:
    """A field's description, as `kubectl explain` shows it, with bounds such as `ge` and `max_length`."""
    return Meta(description=description, **bounds)


def about_undefaulted(description: str) -> Meta:
    """Like `about`, for a field whose default is made by the operator and not by the CRD. See NO_DEFAULT."""
    return Meta(description=description, extra_json_schema={NO_DEFAULT: True})


def form(pattern: str, sentence: str, *, max_length: int, min_length: int | None = None) -> Meta:
    """A text of this form (an expression that Python's `re` and RE2 read alike); the sentence says how to write it."""
    return Meta(pattern=pattern, max_length=max_length, min_length=min_length, extra_json_schema={SAYS: sentence})


DURATION = r"^([0-9]{1,6}h)?([0-9]{1,6}m)?([0-9]{1,6}s)?([0-9]{1,9}ms)?$"
"""Largest unit first, each at most once: what CEL's `duration()` reads too, with no way to overflow it."""
QUANTITY = r"^[0-9]{1,12}(\.[0-9]{1,6})?(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?$"
LABEL_KEY = r"^([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$"
OBJECT_NAME = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"

Duration = Annotated[
    str,
    form(
        DURATION, "write a time such as 500ms, 90s, 15m or 1h30m, the largest unit first", max_length=32, min_length=2
    ),
]
Quantity = Annotated[
    str, form(QUANTITY, "write a Kubernetes quantity such as 64Gi, 500m or 2", max_length=32, min_length=1)
]
Amount = Annotated[int, Meta(ge=0, le=9_000_000_000_000_000)] | Annotated[str, Meta(pattern=QUANTITY, max_length=32)]
"""A quantity where people write bare numbers too: `cpu: 4`."""
ObjectName = Annotated[
    str,
    form(
        OBJECT_NAME,
        "write the name of an object in the Model's namespace: lower-case letters, digits, '-' and '.'",
        max_length=253,
        min_length=1,
    ),
]
OptionalName = Annotated[
    str,
    form(
        f"^$|{OBJECT_NAME}",
        "write the name of an object in the Model's namespace: lower-case letters, digits, '-' and '.'",
        max_length=253,
    ),
]
