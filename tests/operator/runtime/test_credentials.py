"""Derived passwords: the same after a restart, another one for whatever differs."""

from __future__ import annotations

from antiphon_operator.runtime.credentials import password

KEY = b"0123456789abcdef"


def test_the_same_for_the_same_and_another_for_whatever_differs() -> None:
    one = password(KEY, "uid-1", "")
    assert one == password(KEY, "uid-1", "")
    others = {
        password(b"another key here", "uid-1", ""),
        password(KEY, "uid-2", ""),
        password(KEY, "uid-1", "2026"),
        password(KEY, "uid-", "1"),
        password(KEY, "uid", "-1"),
        password(KEY, "uid-1 ", ""),
    }
    assert len(others) == 6
    assert one not in others


def test_it_is_hexadecimal_and_long() -> None:
    text = password(KEY, "uid", "r")
    assert len(text) == 64
    assert int(text, 16) > 0
