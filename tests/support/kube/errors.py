"""What an API server answers when it refuses: a status code, a reason and a sentence, as a `Status` object."""

from __future__ import annotations

from typing import Any, NamedTuple

from tests.support.kube.resources import Resource


class Cause(NamedTuple):
    reason: str
    message: str
    field: str = ""


class ApiError(Exception):
    """A refusal. `status` is the HTTP status, `reason` the machine's word, `message` the sentence for people."""

    def __init__(
        self,
        status: int,
        reason: str,
        message: str,
        *,
        details: dict[str, Any] | None = None,
        causes: tuple[Cause, ...] = (),
    ) -> None:
        super().__init__(message)
        self.status, self.reason, self.message = status, reason, message
        self.details = dict(details or {})
        self.causes = causes

    def body(self) -> dict[str, Any]:
        details = dict(self.details)
        if self.causes:
            details["causes"] = [{k: v for k, v in cause._asdict().items() if v} for cause in self.causes]
        answer: dict[str, Any] = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
            "reason": self.reason,
        }
        return answer | ({"details": details} if details else {}) | {"code": self.status}


def _details(resource: Resource, name: str, **more: Any) -> dict[str, Any]:
    details = {"name": name, "group": resource.group, "kind": resource.plural} | more
    return {key: value for key, value in details.items() if value}


def not_found(resource: Resource, name: str) -> ApiError:
    return ApiError(404, "NotFound", f'{resource.qualified} "{name}" not found', details=_details(resource, name))


def no_such_path() -> ApiError:
    return ApiError(404, "NotFound", "the server could not find the requested resource")


def already_exists(resource: Resource, name: str) -> ApiError:
    return ApiError(
        409, "AlreadyExists", f'{resource.qualified} "{name}" already exists', details=_details(resource, name)
    )


def conflict(resource: Resource, name: str, why: str = "") -> ApiError:
    why = why or ("the object has been modified; please apply your changes to the latest version and try again")
    message = f'Operation cannot be fulfilled on {resource.qualified} "{name}": {why}'
    return ApiError(409, "Conflict", message, details=_details(resource, name))


def invalid(resource: Resource, name: str, causes: list[Cause]) -> ApiError:
    """422, with every fault found: `Model.antiphon.dev "x" is invalid: spec.source: Required value`."""
    kind = f"{resource.kind}.{resource.group}" if resource.group else resource.kind
    faults = [f"{cause.field}: {cause.message}" if cause.field else cause.message for cause in causes]
    text = faults[0] if len(faults) == 1 else f"[{', '.join(faults)}]"
    details = {"name": name, "group": resource.group, "kind": resource.kind}
    return ApiError(
        422,
        "Invalid",
        f'{kind} "{name}" is invalid: {text}',
        details={key: value for key, value in details.items() if value},
        causes=tuple(causes),
    )


def bad_request(message: str) -> ApiError:
    return ApiError(400, "BadRequest", message)


def forbidden(resource: Resource, name: str, why: str, *causes: Cause) -> ApiError:
    return ApiError(
        403,
        "Forbidden",
        f'{resource.qualified} "{name}" is forbidden: {why}',
        details=_details(resource, name),
        causes=causes,
    )


def expired(asked: int, oldest: int) -> ApiError:
    return ApiError(410, "Expired", f"too old resource version: {asked} ({oldest})")


def method_not_allowed() -> ApiError:
    return ApiError(405, "MethodNotAllowed", "the server does not allow this method on the requested resource")
