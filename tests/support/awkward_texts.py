"""Texts whose characters are many bytes, or whose signs are many characters: what must never be torn in a stream."""

from __future__ import annotations

AWKWARD: dict[str, str] = {
    "ascii": "The quick brown fox, 3.14 (and more).",
    "latin": "na\u00efve fa\u00e7ade, Stra\u00dfe, \u0141\u00f3d\u017a",
    "combining": "e\u0301a\u0308o\u0302 Z\u0351\u036b\u0343\u036a\u0302 n\u0303",
    "greek and cyrillic": "\u03b1\u03b2\u03b3 \u0436\u0438\u0437\u043d\u044c",
    "arabic": "\u0627\u0644\u0633\u0644\u0627\u0645 \u0639\u0644\u064a\u0643\u0645\u0650",
    "hebrew": "\u05e9\u05b8\u05c1\u05dc\u05d5\u05b9\u05dd",
    "thai": "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35\u0e04\u0e23\u0e31\u0e1a \u0e01\u0e33\u0e25\u0e31\u0e07",
    "devanagari": "\u0928\u092e\u0938\u094d\u0924\u0947 \u0915\u094d\u0937\u0924\u094d\u0930\u093f\u092f",
    "tamil": "\u0bb5\u0ba3\u0b95\u0bcd\u0b95\u0bae\u0bcd",
    "chinese": "\u4f60\u597d\uff0c\u4e16\u754c\u3002\U00020000",
    "japanese": "\u3053\u3093\u306b\u3061\u306f \u30ab\u309a",
    "korean": "\uc548\ub155 \u1112\u1161\u11ab",
    "emoji": "\U0001f600\U0001f680 \u2764\ufe0f",
    "emoji with skin": "\U0001f44d\U0001f3fd\U0001f44d\U0001f3ff",
    "emoji joined": "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 \U0001f3f3\ufe0f\u200d\U0001f308",
    "flags": "\U0001f1e9\U0001f1ea\U0001f1ef\U0001f1f5 \U0001f3f4\U000e0067\U000e0062\U000e0073\U000e007f",
    "keycaps": "1\ufe0f\u20e3 #\ufe0f\u20e3",
    "white space": "a\u00a0b\u2003c\u3000d\u2028e\ufefff",
    "mathematics": "\U0001d4d0\U0001d4d1 \u2211\u221e\u2248",
    "replacement": "a\ufffdb\ufffd",
}
