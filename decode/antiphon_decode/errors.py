"""Why a prompt could not be computed elsewhere. Neither reaches a client: it can always be computed here."""

from __future__ import annotations


class PrefillPeerFailed(Exception):
    """The prefill worker refused, failed, or is gone: another may be asked."""


class PullFailed(Exception):
    """The prefill worker's blocks did not come over: compute here what is missing."""
