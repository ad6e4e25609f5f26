"""The decode role of a worker: takes requests from gateways, has prompts computed by prefill workers, pulls their KV,
and decodes."""

from antiphon_decode.service import DecodeService

__all__ = ["DecodeService"]
