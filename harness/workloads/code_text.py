"""What each byte of Python source is, by a short lexer: labels that a sequence model can learn."""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterator

TAGS = ("space", "keyword", "name", "number", "string", "comment", "operator")
_KEYWORDS = frozenset(word.encode() for word in keyword.kwlist)
_TOKEN = re.compile(
    rb"""
      (?P<comment>\#[^\n]*)
    | (?P<string>[rRbBuUfF]{0,2}(?:
        \"{3}(?:\\.|[^\\])*?\"{3} | '{3}(?:\\.|[^\\])*?'{3} | "(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])*'))
    | (?P<number>\d[\w.]*)
    | (?P<name>\w+)
    | (?P<operator>[^\w\s])
    """,
    re.VERBOSE | re.DOTALL,
)


def tags(source: bytes) -> bytes:
    """For each byte the position of its kind in TAGS."""
    found = bytearray(len(source))
    for token in _TOKEN.finditer(source):
        kind = token.lastgroup or ""
        if kind == "name" and token[0] in _KEYWORDS:
            kind = "keyword"
        start, end = token.span()
        found[start:end] = bytes([TAGS.index(kind)]) * (end - start)
    return bytes(found)


def passages(source: bytes, longest: int) -> Iterator[tuple[int, int]]:
    """Start and end of each stretch between empty lines, cut to ``longest`` bytes."""
    start = 0
    for text in source.split(b"\n\n"):
        if text.strip():
            yield start, start + min(len(text), longest)
        start += len(text) + 2
