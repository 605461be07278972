"""Templates of this package -> self-contained HTML pages."""

from __future__ import annotations

import jinja2


def render(template: str, **variables: object) -> str:
    """Return a page; every variable is escaped, and one that the template lacks is an error."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("harness.report", "."), autoescape=True, undefined=jinja2.StrictUndefined
    )
    return environment.get_template(template).render(**variables)
