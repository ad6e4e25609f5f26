"""GET /docs: the OpenAPI document as one page to read, without scripts."""

from __future__ import annotations

import functools
import html
from typing import Any

from antiphon_gateway import openapi
from antiphon_gateway.http import Header

HEADERS: tuple[Header, ...] = (
    (b"content-type", b"text/html; charset=utf-8"),
    (b"content-security-policy", b"default-src 'none'; style-src 'unsafe-inline'"),
    (b"x-content-type-options", b"nosniff"),
)
_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:70em;margin:2em auto;padding:0 1em;color:#222}"
    "table{border-collapse:collapse;font-size:13px;margin:.5em 0}th,td{border:1px solid #ccc;padding:.2em .5em;"
    "text-align:left;vertical-align:top}code{word-break:break-word}h2{margin-top:2em}"
)


@functools.cache
def page() -> bytes:
    document = openapi.document()
    info = document["info"]
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{_text(info['title'])}</title>",
        f"<style>{_STYLE}</style><h1>{_text(info['title'])}</h1><p>{_text(info['description'])}",
        f' For programs: <a href="{openapi.PATH}">{openapi.PATH}</a>.</p>',
    ]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            parts.append(f"<h2><code>{method.upper()} {_text(path)}</code></h2><p>{_text(operation['summary'])}.</p>")
            if "requestBody" in operation:
                parts.append(_body(operation, document["components"]["schemas"]))
            parts.append(_answers(operation["responses"]))
    return "".join(parts).encode()


def _body(operation: dict[str, Any], schemas: dict[str, Any]) -> str:
    reference = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    record = schemas[_name(reference)]
    rows = []
    for name, field in record["properties"].items():
        needed = " (needed)" if name in record["required"] else ""
        rows.append(
            f"<tr><td><code>{_text(name)}</code>{needed}<td>{_text(_type(field))}<td>"
            f"{_text(field.get('description', ''))}"
        )
    return f"<table><tr><th>field<th>type<th>what becomes of it{''.join(rows)}</table>"


def _answers(responses: dict[str, Any]) -> str:
    said = [f"{status}: {_text(answer['description'])}" for status, answer in responses.items()]
    return f"<p>Answers: {' '.join(said)}</p>"


def _type(field: dict[str, Any]) -> str:
    if "$ref" in field:
        return _name(field["$ref"])
    if "anyOf" in field:
        return " or ".join(_type(option) for option in field["anyOf"])
    if "enum" in field:
        return ", ".join("null" if value is None else repr(value) for value in field["enum"])
    kind = str(field.get("type", "any"))
    return f"{kind} of {_type(field['items'])}" if "items" in field else kind


def _name(reference: str) -> str:
    return reference.rpartition("/")[2]


def _text(text: str) -> str:
    return html.escape(text)
