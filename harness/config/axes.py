"""The names of a grid's axes, and filters over them."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator

from harness.config.strategy_traits import BUILTIN_TRAITS
from harness.config.values import OptionValue, PlainValue
from harness.errors import nearest

OPTION_SECTIONS = ("optimizer", "schedule", "training", "workload", "loader", *BUILTIN_TRAITS)
"""The sections of the file whose options are axes too."""


AXES = (
    "data",
    "model",
    "strategy",
    "devices",
    "nodes",
    "per_device_batch_size",
    "global_batch_size",
    "precision",
    "compile",
    "launcher",
    "device_ids",
)


def is_option_axis(key: object) -> bool:
    """Return whether a key such as ``optimizer.lr`` names an option of a known section."""
    section, dot, option = str(key).partition(".")
    return bool(dot) and section in OPTION_SECTIONS and option.isidentifier()


def check_filter(value: dict[str, PlainValue]) -> dict[str, PlainValue]:
    """Return the filter, a mapping of axes to the accepted values; raise ValueError at an unknown axis."""
    for key in value:
        if key not in AXES and not is_option_axis(key):
            raise ValueError(f"unknown axis {key!r}; {nearest(key, AXES)}, or an option such as optimizer.lr")
    return value


Filter = Annotated[dict[str, OptionValue], AfterValidator(check_filter)]
