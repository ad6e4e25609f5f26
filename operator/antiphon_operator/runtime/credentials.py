"""Redis passwords of Models: derived, so that none is stored, and an operator that starts anew derives the same."""

from __future__ import annotations

import hashlib
import hmac


def password(key: bytes, uid: str, rotation: str) -> str:
    """HMAC-SHA256 over (the Model's uid, rotation) under the operator's key, as 64 hex digits.

    Another Model, the same name made anew, and another rotation each give another password; none tells of another.
    """
    framed = f"antiphon redis {len(uid)} {uid} {rotation}".encode()
    return hmac.new(key, framed, hashlib.sha256).hexdigest()
