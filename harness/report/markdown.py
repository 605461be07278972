"""Markdown, for a pull request: text that shows as it is, and the verdict."""

from __future__ import annotations

import re
from collections.abc import Iterator

from harness.report.verdict import Verdict
from harness.system.sanitize import escape_control, redact_text

MARKUP = re.compile(r"([\\`*_\[\]<>|#~!])")


def plain(text: str) -> str:
    """Return text in which nothing is markup: no link, image, mention, HTML or end of a cell."""
    safe = " ".join(escape_control(redact_text(text)).split())
    return MARKUP.sub(r"\\\1", safe).replace("@", "@\u200b")


def verdict_lines(name: str, verdict: Verdict) -> Iterator[str]:
    """Yield the lines of a verdict: its headings, sentences and commands."""
    yield f"### {plain(name)}"
    for heading, sentences in verdict.by_heading.items():
        yield ""
        yield f"**{heading}**"
        for one in sentences:
            lead = f"**{plain(one.lead)}**: " if one.lead else ""
            yield f"- {lead}{plain(one.text)}"
            if one.command:
                yield f"  `{escape_control(one.command).replace('`', '')}`"
