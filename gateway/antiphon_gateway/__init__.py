"""The OpenAI-compatible front of Antiphon: HTTP in, one stream to each worker out.

`run_gateway` is the process; `Gateway` is the ASGI application in it. It needs no model storage and no GPU: tokenizer
and chat template come from a worker's model card.
"""

from antiphon_gateway.app import Gateway
from antiphon_gateway.auth import ApiKeys, ApiKeysError
from antiphon_gateway.options import GatewayOptions
from antiphon_gateway.server import run_gateway

__all__ = ["ApiKeys", "ApiKeysError", "Gateway", "GatewayOptions", "run_gateway"]
