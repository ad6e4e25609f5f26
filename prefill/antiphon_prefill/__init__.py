"""The prefill role of a worker: computes prompts for decode workers, which pull the KV."""

from antiphon_prefill.service import PrefillService

__all__ = ["PrefillService"]
