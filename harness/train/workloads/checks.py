"""Checks of the parameters of built-in workloads; each raises a WorkloadError: where, got, allowed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from harness.errors import WorkloadError, nearest

T = TypeVar("T")
SYNTHETIC = ("synthetic", "synthetic_device")
"""Names of synthetic data; with the second, the harness keeps one batch on the device."""


def whole_number(name: str, value: object, most: int) -> int:
    """Return the workload option of this name; raise WorkloadError if it is no whole number from 1 to ``most``."""
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise WorkloadError(f"workload_options.{name}: got {value!r}; allowed: a whole number from 1 to {most}")
    return value


def size_named(model: object, sizes: Mapping[str, T]) -> T:
    """Return the size of this name; raise WorkloadError with the nearest name if there is none."""
    if model not in sizes:
        raise WorkloadError(f"grid.model: got {model!r}; {nearest(str(model), sizes)}")
    return sizes[str(model)]


def data_named(data: object, names: Sequence[str], *, folder: bool = False) -> str:
    """Return the name of data or, with ``folder``, a path with a slash; raise WorkloadError with the nearest name."""
    if data not in names and not (folder and "/" in str(data)):
        path = ", or a folder's path, with a slash" if folder else ""
        raise WorkloadError(f"grid.data: got {data!r}; {nearest(str(data), names)}{path}")
    return str(data)
