"""`GET /v1/antiphon/explain/{request_id}`: JSON, or a page for a person where the client asks for HTML.

A tenant finds its own requests only; another's is as unknown as one that never was. The page is one file without
scripts, and everything in it that comes from outside is escaped.
"""

from __future__ import annotations

import html
from collections.abc import Sequence

import msgspec

from antiphon_gateway import explain_text
from antiphon_gateway.errors import ApiError
from antiphon_gateway.explain_document import Attempt, Explanation, explain
from antiphon_gateway.explain_store import ExplainStore
from antiphon_gateway.explain_text import Table
from antiphon_gateway.http import JSON_TYPE, Header

PATH = "/v1/antiphon/explain/"

_HTML_HEADERS: tuple[Header, ...] = (
    (b"content-type", b"text/html; charset=utf-8"),
    (b"content-security-policy", b"default-src 'none'; style-src 'unsafe-inline'"),
    (b"x-content-type-options", b"nosniff"),
)
_ALWAYS: tuple[Header, ...] = ((b"cache-control", b"no-store"), (b"vary", b"accept"))
_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:75em;margin:2em auto;padding:0 1em;color:#222}"
    "table{border-collapse:collapse;font-size:13px;margin:.5em 0}"
    "th,td{border:1px solid #ccc;padding:.2em .5em;text-align:right;white-space:nowrap}"
    "th.name,td.name{text-align:left}section{border-left:3px solid #ccc;padding-left:1em;margin:1em 0}"
    "div{overflow-x:auto}code{word-break:break-all}"
)


def answer(store: ExplainStore, request_id: str, tenant: str, accept: str) -> tuple[bytes, tuple[Header, ...]]:
    """Body and headers of the answer. Raises ApiError (404)."""
    trail = store.find(request_id, tenant)
    if trail is None:
        raise not_known(request_id, store)
    found = explain(trail)
    if prefers_html(accept):
        return page(found), (*_HTML_HEADERS, *_ALWAYS)
    return msgspec.json.encode(found), (JSON_TYPE, *_ALWAYS)


def not_known(request_id: str, store: ExplainStore) -> ApiError:
    return ApiError(
        404,
        f"Nothing is known here of a request {request_id[:200]!r}: it was never given to a worker by this gateway (the "
        f"header x-antiphon-gateway of its answer names the one that did; this is {store.gateway_id}), or it is among "
        f"the forgotten: the last {store.most_requests} are kept.",
        type="invalid_request_error",
        code="request_not_known",
    )


def prefers_html(accept: str) -> bool:
    """Whether HTML is named in an Accept header, and JSON is not as welcome."""
    qualities: dict[str, float] = {}
    for part in accept.lower().split(","):
        kind, *parameters = (word.strip() for word in part.split(";"))
        qualities[kind] = _quality(parameters)
    wanted = qualities.get("text/html", 0.0)
    json = next((qualities[kind] for kind in ("application/json", "application/*", "*/*") if kind in qualities), 0.0)
    return wanted > json


def page(found: Explanation) -> bytes:
    """The explanation for a person."""
    title = html.escape(found.client_request_id or found.request_id)
    parts = [
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>',
        f"<h1>Request <code>{title}</code></h1><p>{html.escape(explain_text.summary(found))}</p>",
        f"<p>Its answer's id: <code>{html.escape(found.request_id)}</code></p>",
    ]
    for choice in found.choices:
        if len(found.choices) > 1:
            parts.append(f"<h2>Choice {choice.index}</h2>")
        for attempt in choice.attempts:
            parts.append(_attempt(attempt))
            if attempt is choice.attempts[0] and choice.attempts_left_out:
                parts.append(f"<p>{choice.attempts_left_out} further attempts are not kept.</p>")
    return "".join(parts).encode()


def _attempt(attempt: Attempt) -> str:
    head = f"Attempt {attempt.number}, {attempt.since_arrival_ms:.1f} ms after arrival"
    inputs = attempt.inputs
    kept = f"What the gateway knew of the workers it names ({inputs.workers_in_all} in all), in tokens and blocks"
    return (
        f"<section><h3>{head}</h3><p>{html.escape(explain_text.decided(attempt))}</p>"
        f"{_table(explain_text.options(attempt))}"
        f"<p>{html.escape(explain_text.happened(attempt))}</p>"
        f"<details><summary>{kept}</summary>{_table(explain_text.workers(attempt))}</details></section>"
    )


def _table(table: Table) -> str:
    rows = [_row("th", table.head, table.left), *(_row("td", row, table.left) for row in table.rows)]
    return f"<div><table>{''.join(rows)}</table></div>"


def _row(tag: str, cells: Sequence[str], left: int) -> str:
    shown = (
        f'<{tag} class="name">{html.escape(cell)}</{tag}>' if at < left else f"<{tag}>{html.escape(cell)}</{tag}>"
        for at, cell in enumerate(cells)
    )
    return f"<tr>{''.join(shown)}</tr>"


def _quality(parameters: list[str]) -> float:
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip() == "q":
            try:
                return float(value)
            except ValueError:
                return 0.0
    return 1.0
