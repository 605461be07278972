"""The values of the options ``--assume`` and ``--only``."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from harness.errors import ExperimentError

if TYPE_CHECKING:
    from harness.plan.inventory import Inventory


def parse_assumed(text: str) -> Inventory:
    """Return the inventory of '2x8', two nodes of eight GPUs; raises ExperimentError."""
    from harness.plan.inventory import Inventory

    match = re.fullmatch(r"([0-9]{1,5})x([0-9]{1,3})", text)
    if not match or int(match[1]) == 0:
        raise ExperimentError("--assume", [f"got {text!r}; allowed: NODESxGPUS such as 1x8 or 2x8"])
    return Inventory.assume(int(match[1]), int(match[2]))


def parse_only(text: str) -> dict[str, Any]:
    """Return {'strategy': ['ddp'], 'devices': [2]} for 'strategy=ddp,devices=2'; an axis may have several values."""
    from harness.config.axes import check_filter
    from harness.config.yaml_source import parse_value

    wanted: dict[str, Any] = {}
    for part in re.split(r",(?![^\[]*\])", text):  # at commas, but not inside [0, 1]
        name, equals, value = part.partition("=")
        if not equals or not value.strip():
            raise ExperimentError("--only", [f"got {part!r}; allowed: AXIS=VALUE, several joined by commas"])
        try:
            wanted.setdefault(name.strip(), []).append(parse_value(value, source="--only"))
        except ExperimentError:
            raise ExperimentError("--only", [f"got {part!r}; allowed: AXIS=VALUE, several joined by commas"]) from None
    try:
        return check_filter(wanted)
    except ValueError as error:
        raise ExperimentError("--only", [str(error)]) from None
