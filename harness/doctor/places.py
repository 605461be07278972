"""Places in the user's code that findings are about: file and line of the workload's methods and of its model."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import unwrap
from pathlib import Path

from harness.doctor.builds import FewBuilds
from harness.doctor.check import is_the_users
from harness.train.workloads import Workload

ABOUT: Mapping[str, tuple[str, ...]] = {
    "batch transfer": ("datasets",),
    "device placement": ("forward",),
    "randomness": ("build_model",),
    "parameter updates": ("forward", "loss"),
    "state in forward": ("forward",),
    "output shapes": ("forward",),
    "data sharding": ("datasets",),
    "validation set": ("datasets",),
    "memory": ("forward",),
    "loss weight": ("loss",),
    "padding": ("loss",),
    "slow rank": ("loss", "forward"),
    "wrapper use": ("loss",),
    "train mode": ("loss", "forward"),
    "memory growth": ("loss", "forward"),
    "threads": ("build_model",),
    "divergence": ("loss", "forward"),
    "gradient scaling": ("loss", "forward"),
    "loader throughput": ("datasets",),
}
"""The name of a check's findings -> the methods of the workload, or of its model, to look at first."""


def place_of(check: str, places: Mapping[str, str]) -> str:
    """Return the places that a check's findings are about: 'Net.forward (mine.py:8), Mine.loss (mine.py:20)'."""
    return ", ".join(dict.fromkeys(places[method] for method in ABOUT.get(check, ()) if method in places))


def places_of(workload: Workload) -> Mapping[str, str]:
    """Return 'Mine.loss (mine.py:12)' by method; methods of the harness and of libraries are left out.

    If the model's class is a library's, as nn.Sequential is, ``build_model`` stands for it.
    """
    own, model = (workload.inner, workload.kept.kind) if isinstance(workload, FewBuilds) else (workload, None)
    found = {method: _place(type(own), method) for method in ("build_model", "datasets", "loss")}
    found["forward"] = (model and _place(model, "forward")) or found["build_model"]
    return {method: place for method, place in found.items() if place}


def _place(owner: type, method: str) -> str:
    function = unwrap(getattr(owner, method, len))
    code = getattr(function, "__code__", None)
    if code is None or not is_the_users(code.co_filename):
        return ""
    return f"{function.__qualname__} ({Path(code.co_filename).name}:{code.co_firstlineno})"
