"""The names of a grid's axes, and filters over them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import AfterValidator

from harness.config.strategy_traits import BUILTIN_TRAITS
from harness.config.values import OptionValue, PlainValue
from harness.errors import closest, nearest

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
    "variant",
)


def is_option_axis(key: object) -> bool:
    """Return whether a key such as ``optimizer.lr`` names an option of a known section."""
    section, dot, option = str(key).partition(".")
    return bool(dot) and section in OPTION_SECTIONS and option.isidentifier()


def check_filter(value: dict[str, PlainValue]) -> dict[str, PlainValue]:
    """Return the filter, a mapping of axes to the accepted values; raise ValueError at an unknown axis."""
    for key in value:
        if key not in AXES and not is_option_axis(key):
            note = batch_note(closest(str(key), AXES))
            raise ValueError(
                f"unknown axis {key!r}; {nearest(str(key), AXES)}, or an option such as optimizer.lr{note}"
            )
    return value


BATCHES = ("global_batch_size", "per_device_batch_size")


def batch_note(offered: Sequence[str]) -> str:
    """Return what each kind of batch size means, if the offered names are both; else ''."""
    both = set(offered) >= set(BATCHES)
    return "; global: fixed over device counts (strong scaling), per device: fixed on each (weak scaling)" * both


Filter = Annotated[dict[str, OptionValue], AfterValidator(check_filter)]
