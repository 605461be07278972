"""The table of claims: lines of 80 columns, a Markdown table, and a JSON file with the figures."""

from __future__ import annotations

import json
import textwrap
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from tests.gpu.runner import Done

WIDTH, NAME, STATUS, SECONDS = 80, 29, 9, 5
TEXT = WIDTH - NAME - STATUS - SECONDS
STATUSES = ("pass", "FAIL", "measured", "not run")
HEADING = f"{'claim':{NAME}}{'status':{STATUS}}{'s':>{SECONDS - 1}} figures\n" + "-" * WIDTH


def lines_of(done: Done) -> str:
    """Return a claim's lines, at most 80 columns wide."""
    names = textwrap.wrap(done.claim.name, NAME - 1)
    text = done.verdict.text + (f" (expected: {done.claim.expected})" if done.claim.expected else "")
    texts = textwrap.wrap(text, TEXT) or [""]
    rows = max(len(names), len(texts))
    names, texts = names + [""] * (rows - len(names)), texts + [""] * (rows - len(texts))
    marks = [(done.verdict.status, f"{done.seconds:.0f}"), *[("", "")] * (rows - 1)]
    return "\n".join(
        f"{name:{NAME}}{status:{STATUS}}{seconds:>{SECONDS - 1}} {text}".rstrip()
        for name, (status, seconds), text in zip(names, marks, texts, strict=True)
    )


def summary(done: Sequence[Done]) -> str:
    """Return the number of claims by status."""
    counted = Counter(one.verdict.status for one in done)
    return ", ".join(f"{counted[status]} {status}" for status in STATUSES if counted[status])


def write(folder: Path, machine: Mapping[str, str], done: Sequence[Done]) -> None:
    """Write acceptance.json and acceptance.md, whole each time, so that a run that is cut short leaves both."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        {
            "claim": one.claim.name,
            "expected": one.claim.expected,
            "seconds": round(one.seconds, 1),
            **asdict(one.verdict),
        }
        | ({"output": one.output} if one.verdict.status == "FAIL" else {})
        for one in done
    ]
    content = {"date": time.strftime("%Y-%m-%d"), "machine": dict(machine), "claims": rows}
    (folder / "acceptance.json").write_text(json.dumps(content, indent=1) + "\n")
    (folder / "acceptance.md").write_text(_markdown(machine, done))


def _markdown(machine: Mapping[str, str], done: Sequence[Done]) -> str:
    lines = [f"# Acceptance, {time.strftime('%Y-%m-%d')}", ""]
    lines += [f"- {name}: {value}" for name, value in machine.items()]
    lines += ["", "| claim | status | s | figures | expected |", "|---|---|---|---|---|"]
    for one in done:
        cells = (
            one.claim.name,
            one.verdict.status,
            f"{one.seconds:.0f}",
            _cell(one.verdict.text),
            _cell(one.claim.expected),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", summary(done), ""])


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
