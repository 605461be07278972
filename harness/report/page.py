"""Templates of this package -> self-contained HTML pages, whose only script sorts tables."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

import jinja2
from markupsafe import Markup

SCRIPT = Path(__file__).with_name("sort.js").read_text(encoding="utf-8")
"""The script of every page. A page's policy allows it by its hash, and no other."""


def render(template: str, **variables: object) -> str:
    """Return a page; every variable is escaped, and one that the template lacks is an error."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("harness.report", "."), autoescape=True, undefined=jinja2.StrictUndefined
    )
    return environment.get_template(template).render(
        policy=Markup(content_policy()), script=Markup(SCRIPT), **variables
    )


def content_policy() -> str:
    """Return the Content-Security-Policy: images and styles of the page itself, and its script."""
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; img-src data:; style-src 'unsafe-inline'; "
        "base-uri 'none'; form-action 'none'"
    )
