"""Trials -> ratios that are paired by block: against the base, against the twin, between launchers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from harness.analyse.common import Row, Rows, by_cell, ends, family, measured, order
from harness.analyse.doubts import tally
from harness.schema import AXES, NOISE, PARITY, SCALING
from harness.stats import Estimate, geometric_mean, paired_ratio

RATIOS = ("speedup", "low", "high", "precise", "efficiency", "efficiency_low", "efficiency_high")
Rule = Mapping[str, Any] | None
"""The rule that set the number of blocks, as the file has it: at_least, at_most, halfwidth; None for a number."""


def scaling(trials: pd.DataFrame, rule: Rule = None, excluded: Mapping[str, str] | None = None) -> pd.DataFrame:
    """Speedup and efficiency of each measured cell against its base, paired by block and sitting.

    The base is the planned one; where it could not run, the smallest device count of the same strategy that
    did. A cell without either has no row: ratios never mix bases. ``excluded``: why cells have no ratio, by the
    id of the check that shows it.
    """
    cells = by_cell(measured(trials))
    smallest = _smallest_of_family(cells)
    rows = []
    for cell_id, group in cells.items():
        first = group[0]
        base_id = first["base_id"] if first["base_id"] in cells else smallest.get(family(first))
        base = cells.get(str(base_id))
        row = _against(group, base, rule) if base else None
        if base is None or row is None:
            continue
        reason = (excluded or {}).get(str(first["check_id"]))
        if reason:
            row |= {**dict.fromkeys(RATIOS), "excluded": reason}
        named = {axis: first[axis] for axis in ("unit", *AXES)}
        rows.append({"cell_id": cell_id, "base_id": base_id, **named, **row, "doubts": _doubts(group, base)})
    return SCALING.frame(sorted(rows, key=order))


def noise(trials: pd.DataFrame, rule: Rule = None) -> pd.DataFrame:
    """Each base against its twin, which is the same cell in a worker group of its own: the noise floor."""
    twins, counted = by_cell(measured(trials, "twin")), measured(trials)
    bases = by_cell(counted[counted["cell_id"].isin(twins)])
    rows = []
    for cell_id, twin in twins.items():
        speeds, others, pilot = _paired(twin, bases.get(cell_id, []), rule)
        if not speeds:
            continue
        ratio = paired_ratio(speeds, others, pilot=pilot)
        rows.append(
            {
                **{axis: twin[0][axis] for axis in ("cell_id", "unit", *AXES)},
                "throughput_per_s": geometric_mean(others).value,
                "twin_throughput_per_s": geometric_mean(speeds).value,
                "ratio": ratio.value,
                **ends(ratio),
                "excludes_one": excludes_one(ratio),
            }
        )
    return NOISE.frame(sorted(rows, key=order))


def parity(trials: pd.DataFrame, rule: Rule = None) -> pd.DataFrame:
    """Each cell under Ray against the same cell under torchrun, the control, paired by block."""
    counted = measured(trials)
    cells = by_cell(counted) if counted["launcher"].eq("torchrun").any() else {}
    controls = {_but_launcher(group[0]): group for group in cells.values() if group[0]["launcher"] == "torchrun"}
    rows = []
    for cell_id, group in cells.items():
        control = controls.get(_but_launcher(group[0]))
        if group[0]["launcher"] != "ray" or control is None:
            continue
        speeds, others, pilot = _paired(group, control, rule)
        if not speeds:
            continue
        ratio = paired_ratio(speeds, others, pilot=pilot)
        rows.append(
            {
                "cell_id": cell_id,
                "control_id": control[0]["cell_id"],
                **{axis: group[0][axis] for axis in ("unit", *AXES)},
                "throughput_per_s": geometric_mean(speeds).value,
                "control_throughput_per_s": geometric_mean(others).value,
                "ratio": ratio.value,
                **ends(ratio),
                "excludes_one": excludes_one(ratio),
            }
        )
    return PARITY.frame(sorted(rows, key=order))


def excludes_one(ratio: Estimate) -> bool | None:
    """Whether the interval leaves out 1; None without an interval."""
    return None if ratio.low is None or ratio.high is None else not ratio.low <= 1 <= ratio.high


def _but_launcher(row: Row) -> tuple[str, ...]:
    return tuple(str(row[axis]) for axis in AXES if axis not in ("launcher", "link"))


def _doubts(group: Rows, base: Rows) -> str | None:
    own, of_base = (tally([row["doubts"] for row in rows]) for rows in (group, base))
    if group[0]["cell_id"] == base[0]["cell_id"]:
        return own
    marked = of_base and "; ".join(f"base: {doubt}" for doubt in of_base.split("; "))
    return "; ".join(part for part in (own, marked) if part) or None


def _paired(group: Rows, base: Rows, rule: Rule) -> tuple[list[float], list[float], list[bool] | None]:
    """The throughputs of both in each block, from the last sitting that holds both, in the order of the blocks.

    A block that was cut in two has its base, and the base its twin, in both sittings: it is one block all the same.
    And, where a rule set the number of blocks, which of them were its pilot.
    """
    bases = {(row["block"], row["sitting"]): float(row["throughput_per_s"]) for row in base}
    both = list({row["block"]: row for row in group if (row["block"], row["sitting"]) in bases}.values())
    speeds = [float(row["throughput_per_s"]) for row in both]
    others = [bases[row["block"], row["sitting"]] for row in both]
    return speeds, others, [row["block"] < rule["at_least"] for row in both] if rule else None


def _against(group: Rows, base: Rows, rule: Rule) -> dict[str, Any] | None:
    """The ratio columns of one cell; None where no block holds both it and the base."""
    speeds, bases, pilot = _paired(group, base, rule)
    if not speeds:
        return None
    ratio = paired_ratio(speeds, bases, pilot=pilot)
    is_base = group[0]["cell_id"] == base[0]["cell_id"]
    met = None if rule is None or is_base else ratio.halfwidth is not None and ratio.halfwidth <= rule["halfwidth"]
    devices = float(group[0]["devices"]) / float(base[0]["devices"])
    return {
        "base_strategy": base[0]["strategy"],
        "base_devices": base[0]["devices"],
        "base_throughput_per_s": geometric_mean(bases).value,
        "throughput_per_s": geometric_mean(speeds).value,
        "speedup": ratio.value,
        **ends(ratio),
        "precise": met,
        "efficiency": ratio.value / devices,
        "efficiency_low": None if ratio.low is None else ratio.low / devices,
        "efficiency_high": None if ratio.high is None else ratio.high / devices,
    }


def _smallest_of_family(cells: Mapping[str, Rows]) -> dict[tuple[Any, ...], str]:
    smallest: dict[tuple[Any, ...], tuple[int, str]] = {}
    for cell_id, group in cells.items():
        candidate = (int(group[0]["devices"]), cell_id)
        key = family(group[0])
        smallest[key] = min(smallest.get(key, candidate), candidate)
    return {key: cell_id for key, (_, cell_id) in smallest.items()}
