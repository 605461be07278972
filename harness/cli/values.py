"""The values of options: ``--assume``, ``--only``, and those of questions about several runs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from harness.errors import ComparisonError, ExperimentError, PredictionError

if TYPE_CHECKING:
    from harness.analysis.compare import Condition
    from harness.plan.inventory import Inventory


def parse_assumed(text: str) -> Inventory:
    """Return the inventory of '2x8' or '2x8:H100-80GB', two nodes of eight GPUs; raises ExperimentError."""
    from harness.plan.inventory import Inventory, device_named

    size, colon, name = text.partition(":")
    match = re.fullmatch(r"([0-9]{1,5})x([0-9]{1,3})", size)
    if not match or int(match[1]) == 0:
        allowed = "NODESxGPUS such as 1x8 or 2x8, or with a device, 2x8:H100-80GB"
        raise ExperimentError("--assume", [f"got {text[:80]!r}; allowed: {allowed}"])
    nodes, gpus = int(match[1]), int(match[2])
    if not colon:
        return Inventory.assume(nodes, gpus)
    try:
        device = device_named(name)
    except ValueError as error:
        raise ExperimentError("--assume", [str(error)]) from None
    if not gpus:
        raise ExperimentError("--assume", [f"got {text[:80]!r}: no GPU that is one; allowed: at least 1 a node"])
    return Inventory.assume(nodes, gpus, device=device)


def parse_only(text: str, option: str = "--only") -> dict[str, Any]:
    """Return {'strategy': ['ddp'], 'devices': [2]} for 'strategy=ddp,devices=2'; an axis may have several values."""
    from harness.config.axes import check_filter
    from harness.config.yaml_source import parse_value

    wanted: dict[str, Any] = {}
    for part in re.split(r",(?![^\[]*\])", text):  # at commas, but not inside [0, 1]
        name, equals, value = part.partition("=")
        try:
            read = [parse_value(value, source=option)] if equals and value.strip() else []
        except ExperimentError:
            read = []
        if not read:
            raise ExperimentError(option, [f"got {part!r}; allowed: AXIS=VALUE, several joined by commas"])
        wanted.setdefault(name.strip(), []).extend(read)
    try:
        return check_filter(wanted)
    except ValueError as error:
        raise ExperimentError(option, [str(error)]) from None


def parse_axes(texts: Iterable[str]) -> tuple[str, ...]:
    """Return the axes of '--by devices,ddp.bucket_cap_mb', each once; raises ComparisonError."""
    from harness.config.axes import check_axis

    names = [name.strip() for text in texts for name in text.split(",")]
    try:
        return tuple(dict.fromkeys(map(check_axis, names)))
    except ValueError as error:
        raise ComparisonError(f"--by: {error}") from None


def parse_conditions(texts: Iterable[str]) -> tuple[Condition, ...]:
    """Return the conditions of --fail-if, each once; raises ComparisonError."""
    from harness.analysis.compare import parse_condition

    try:
        return tuple(dict.fromkeys(map(parse_condition, texts)))
    except ValueError as error:
        raise ComparisonError(f"--fail-if: {error}") from None


def parse_share(text: str, option: str) -> float:
    """Return 0.05 for '5%', '5 %' or '0.05'; raises ComparisonError unless it is above 0 and below 1."""
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*(%?)\s*", text)
    share = float(match[1]) / (100 if match[2] else 1) if match else 0.0
    if not 0 < share < 1:
        raise ComparisonError(f"{option}: got {text!r}; allowed: a share above 0 and below 1, such as 5% or 0.05")
    return share


def parse_numbers(text: str, option: str) -> tuple[int, ...]:
    """Return (16, 32) for '16,32'; raises PredictionError unless they are different whole numbers above 0."""
    numbers = tuple(int(part) for part in text.split(",") if re.fullmatch(r"\s*[0-9]{1,7}\s*", part))
    if len(numbers) != len(text.split(",")) or not all(numbers):
        raise PredictionError(
            f"{option}: got {text!r}; allowed: whole numbers above 0, joined by commas, such as 16,32"
        )
    return numbers


def parse_cells(text: str | None) -> str | dict[str, Any] | None:
    """Return the beginning of a cell's id, of 4 hexadecimal digits or more, or the axes of 'strategy=ddp,devices=2'."""
    if text is None or re.fullmatch(r"[0-9a-f]{4,12}", text):
        return text
    return parse_only(text, "--cell")
