"""The versions that ``harness --version`` shows."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version


def versions() -> str:
    """Return the versions of the harness, Python, torch and ray; imports none of them."""
    parts = [f"Python {platform.python_version()}", *(f"{name} {_version(name)}" for name in ("torch", "ray"))]
    return f"harness {_version('harness')} ({', '.join(parts)})"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
