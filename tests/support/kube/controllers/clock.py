"""Kubernetes' way of writing a time."""

from __future__ import annotations

from datetime import UTC, datetime


def now() -> str:
    """RFC 3339 with whole seconds."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def parse(text: str) -> datetime:
    return datetime.fromisoformat(text.replace("Z", "+00:00"))
