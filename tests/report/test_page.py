"""Pages: one script, which their policy allows by its hash."""

from __future__ import annotations

import base64
import hashlib
import html
import re

from harness.report.page import SCRIPT, Part, render
from harness.report.tables.text import decimal, make_table, words

LABELS = ("a <script>alert(1)</script>", "b \"'><img src=x onerror=alert(1)>", "c </script> {{ 7 * 7 }}", "d")
SPEEDS = (10.0, None, 9.5, 100.0)


def page() -> str:
    """Return a page with a table of hostile labels."""
    rows = [{"label": label, "speed": speed} for label, speed in zip(LABELS, SPEEDS, strict=True)]
    table = make_table((("cell", "label", words), ("speed", "speed", decimal("{:.1f} samples/s"))), rows)
    return render("compare.html", title=LABELS[0], sentences=LABELS, parts=[Part("Speed", "speed", table)])


def test_the_policy_allows_the_script_of_the_page_and_nothing_else() -> None:
    found = re.findall(r"<script>(.*?)</script>", page(), flags=re.DOTALL)
    assert found == [SCRIPT]
    digest = base64.b64encode(hashlib.sha256(found[0].encode()).digest()).decode()
    policy = re.search(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)">', page())
    assert policy
    rules = dict(rule.strip().split(" ", 1) for rule in html.unescape(policy[1]).split(";"))
    assert rules["script-src"] == f"'sha256-{digest}'"
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == "'none'"


def test_hostile_labels_are_text_and_numbers_stand_in_the_cells_of_a_page_that_is_whole_without_its_script() -> None:
    assert page().count("<script") == 1 and "<img" not in page() and "{{ 7 * 7 }}" in page()
    bare = re.sub(r"<script>.*?</script>", "", page(), flags=re.DOTALL)
    assert "<button" not in bare and "hidden" not in bare
    speeds = [cell for cell in re.findall(r"<td[^>]*>([^<]*)</td>", bare) if "samples" in cell]
    assert speeds == ["10.0 samples/s", "9.5 samples/s", "100.0 samples/s"]
    assert re.findall(r'data-v="([^"]*)"', page()) == ["10", "9.5", "100"]
