"""Trials -> ratios that are paired by block: against the base, against the twin, between launchers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from harness.analyse.common import ends, family, measured, order
from harness.analyse.doubts import tally
from harness.schema import AXES, NOISE, SCALING
from harness.stats import geometric_mean, paired_ratio

RATIOS = ("speedup", "low", "high", "precise", "efficiency", "efficiency_low", "efficiency_high")
Rule = Mapping[str, Any] | None
"""The rule that set the number of blocks, as the file has it: at_least, at_most, halfwidth; None for a number."""


def scaling(trials: pd.DataFrame, rule: Rule = None, excluded: Mapping[str, str] | None = None) -> pd.DataFrame:
    """Speedup and efficiency of each measured cell against its base, paired by block and sitting.

    The base is the planned one; where it could not run, the smallest device count of the same strategy that
    did. A cell without either has no row: ratios never mix bases. ``excluded``: why cells have no ratio, by the
    id of the check that shows it.
    """
    by_cell = {str(cell_id): group for cell_id, group in measured(trials).groupby("cell_id", sort=False)}
    smallest = _smallest_of_family(by_cell)
    rows = []
    for cell_id, group in by_cell.items():
        first = group.iloc[0]
        base_id = first["base_id"] if first["base_id"] in by_cell else smallest.get(family(first))
        if base_id is None or pd.isna(base_id):
            continue
        base = by_cell[str(base_id)]
        row = _against(group, base, rule)
        if row is None:
            continue
        reason = (excluded or {}).get(str(first["check_id"]))
        if reason:
            row |= {**dict.fromkeys(RATIOS), "excluded": reason}
        named = {axis: first[axis] for axis in ("unit", *AXES)}
        rows.append({"cell_id": cell_id, "base_id": base_id, **named, **row, "doubts": _doubts(group, base)})
    return SCALING.frame(sorted(rows, key=order))


def _doubts(group: pd.DataFrame, base: pd.DataFrame) -> str | None:
    own, of_base = tally(group["doubts"]), tally(base["doubts"])
    if group["cell_id"].iloc[0] == base["cell_id"].iloc[0]:
        return own
    return "; ".join(part for part in (own, of_base and f"base: {of_base}") if part) or None


def noise(trials: pd.DataFrame, rule: Rule = None) -> pd.DataFrame:
    """Each base against its twin, which is the same cell in a worker group of its own: the noise floor."""
    bases = {str(cell_id): group for cell_id, group in measured(trials).groupby("cell_id", sort=False)}
    rows = []
    for cell_id, twin in measured(trials, "twin").groupby("cell_id", sort=False):
        pairs = _pairs(twin, bases[str(cell_id)]) if str(cell_id) in bases else pd.DataFrame()
        if pairs.empty:
            continue
        speeds, others = pairs["throughput_per_s"].tolist(), pairs["throughput_per_s_base"].tolist()
        ratio = paired_ratio(speeds, others, pilot=_pilot(rule))
        first = twin.iloc[0]
        rows.append(
            {
                **{axis: first[axis] for axis in ("cell_id", "unit", *AXES)},
                "throughput_per_s": geometric_mean(others).value,
                "twin_throughput_per_s": geometric_mean(speeds).value,
                "ratio": ratio.value,
                **ends(ratio),
                "excludes_one": None if ratio.low is None or ratio.high is None else not ratio.low <= 1 <= ratio.high,
            }
        )
    return NOISE.frame(sorted(rows, key=order))


def _pairs(group: pd.DataFrame, base: pd.DataFrame) -> pd.DataFrame:
    """The throughputs of both in the blocks and sittings that hold both, in the order of the blocks."""
    keys = ["block", "sitting"]
    columns = [*keys, "throughput_per_s"]
    pairs = group[columns].merge(base[columns], on=keys, suffixes=("", "_base"), validate="one_to_one")
    return pairs.sort_values(keys)


def _pilot(rule: Rule) -> int | None:
    return int(rule["at_least"]) if rule else None


def _against(group: pd.DataFrame, base: pd.DataFrame, rule: Rule) -> dict[str, Any] | None:
    """The ratio columns of one cell; None where no block holds both it and the base."""
    pairs = _pairs(group, base)
    if pairs.empty:
        return None
    speeds, bases = pairs["throughput_per_s"].tolist(), pairs["throughput_per_s_base"].tolist()
    ratio = paired_ratio(speeds, bases, pilot=_pilot(rule))
    is_base = group["cell_id"].iloc[0] == base["cell_id"].iloc[0]
    met = None if rule is None or is_base else ratio.halfwidth is not None and ratio.halfwidth <= rule["halfwidth"]
    devices = float(group["devices"].iloc[0]) / float(base["devices"].iloc[0])
    return {
        "base_strategy": base["strategy"].iloc[0],
        "base_devices": base["devices"].iloc[0],
        "base_throughput_per_s": geometric_mean(bases).value,
        "throughput_per_s": geometric_mean(speeds).value,
        "speedup": ratio.value,
        **ends(ratio),
        "precise": met,
        "efficiency": ratio.value / devices,
        "efficiency_low": None if ratio.low is None else ratio.low / devices,
        "efficiency_high": None if ratio.high is None else ratio.high / devices,
    }


def _smallest_of_family(by_cell: Mapping[str, pd.DataFrame]) -> dict[tuple[Any, ...], str]:
    smallest: dict[tuple[Any, ...], tuple[int, str]] = {}
    for cell_id, group in by_cell.items():
        first = group.iloc[0]
        candidate = (int(first["devices"]), cell_id)
        key = family(first)
        smallest[key] = min(smallest.get(key, candidate), candidate)
    return {key: cell_id for key, (_, cell_id) in smallest.items()}
