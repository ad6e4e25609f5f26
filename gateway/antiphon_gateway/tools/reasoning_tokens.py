"""How many of an answer's tokens were reasoning.

By their bytes, as marks are told by text: those that begin behind the opening mark and before the closing one. Neither
marks nor what ends the answer counts. One pass over the ids when an answer has ended, and only where that is told.
"""

from __future__ import annotations

from collections.abc import Sequence

from antiphon_gateway.models import Model

_SPACE = b" \t\r\n"
_LINE_ENDS = b"\r\n"


def count_reasoning(model: Model, ids: Sequence[int], marks: tuple[str, str], *, inside: bool) -> int:
    """Of one choice's ids. `marks`: the one that opens and the one that closes. `inside`: the prompt has opened it."""
    token = model.codec.token
    pieces = [token(token_id).data for token_id in ids]
    answer = b"".join(pieces)
    opening, closing = (mark.encode() for mark in marks)
    start = len(answer) - len(answer.lstrip(_LINE_ENDS if inside else _SPACE))
    if answer.startswith(opening, start):
        start += len(opening)
    elif inside:
        start = 0
    else:
        return 0
    end = answer.find(closing, start)
    if end < 0:
        end = len(answer)
    count = position = 0
    ends = model.eos_token_ids
    for token_id, piece in zip(ids, pieces, strict=True):
        if position >= end:
            break
        if position >= start and token_id not in ends:
            count += 1
        position += len(piece)
    return count
