"""The OpenAI-compatible front of Antiphon: HTTP in, one stream to each worker out.

`run_gateway` is the process; `Gateway` is the ASGI application in it. It needs no model storage and no GPU: tokenizer
and chat template come from a worker's model card.

Importing it is cheap, and needs none of what a gateway needs: every command asks it for its options.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from antiphon_gateway.app import Gateway
    from antiphon_gateway.auth import ApiKeys, ApiKeysError
    from antiphon_gateway.options import GatewayOptions
    from antiphon_gateway.server import run_gateway

__all__ = ["ApiKeys", "ApiKeysError", "Gateway", "GatewayOptions", "run_gateway"]

_MODULES = {
    "ApiKeys": "auth",
    "ApiKeysError": "auth",
    "Gateway": "app",
    "GatewayOptions": "options",
    "run_gateway": "server",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"antiphon_gateway.{_MODULES[name]}"), name)
