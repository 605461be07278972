"""Text that others wrote, as a terminal may show it."""

from __future__ import annotations

import re

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""All but tab and newline: controls, marks that turn the direction of writing, halves of surrogate pairs."""


def printable(text: str) -> str:
    """The text with its control characters spelt out: on a terminal they could hide, colour or rewrite other text."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
