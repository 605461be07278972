"""Trials -> speedup and efficiency: ratios to the base, paired by block."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import pandas as pd

from harness.analysis.common import Rows, Rule, Values, bases_of, by_cell, ends, measured, order
from harness.analysis.doubts import CountedDoubt, tally
from harness.analysis.equivalence import Verdicts, verdict_columns
from harness.analysis.stats import ENDS, Estimate, geometric_mean, paired_ratio, ratio_p_value
from harness.analysis.usual_doubts import unusual, usual_doubts
from harness.record.schema import DESCRIPTION, SCALING

RATIOS = ("speedup", *ENDS, "precise", "efficiency", *(f"efficiency_{end}" for end in ENDS))


def scaling(trials: pd.DataFrame, rule: Rule | None = None, checked: Verdicts | None = None) -> pd.DataFrame:
    """Return the speedup and efficiency of each measured cell against its base, paired by block and invocation.

    The base is the planned one or, if that could not run, the same strategy on the smallest device count that
    ran. A cell without a base has no row: ratios never mix bases. ``checked``: the verdicts of equivalence checks;
    a cell that is not equivalent has no ratio.
    """
    cells, usual = by_cell(measured(trials)), usual_doubts(trials)
    bases = bases_of(cells)
    rows = []
    for cell_id, group in cells.items():
        first = group[0]
        base_id = bases[cell_id]
        base = cells[base_id]
        row = _against(group, base, rule)
        if row is None:
            continue
        verdict = verdict_columns(checked, [first["check_id"]])
        row |= {**(dict.fromkeys(RATIOS) if verdict["excluded"] else {}), **verdict}
        axes = {axis: first[axis] for axis in ("unit", *DESCRIPTION)}
        doubts = {"doubts": doubts_of(group, base, "base"), "unusual": unusual(tally(group), usual)}
        rows.append({"cell_id": cell_id, "base_id": base_id, **axes, **row, **doubts})
    compared = {row["base_id"] for row in rows if row["cell_id"] != row["base_id"]} | _with_control(cells.values())
    for row in rows:
        if row["cell_id"] in compared:
            row["precise"] = None  # ratios determine its number of blocks, not its own throughput
    return SCALING.frame(sorted(rows, key=order))


def _with_control(cells: Iterable[Rows]) -> set[str]:
    """Return the ids of bases that are measured under several launchers."""
    alike: dict[str, set[str]] = {}
    for first, *_ in cells:
        if first["cell_id"] == first["base_id"]:
            alike.setdefault(first["launchers_id"], set()).add(first["cell_id"])
    return {cell_id for ids in alike.values() if len(ids) > 1 for cell_id in ids}


def doubts_of(group: Rows, other: Rows, role: str) -> tuple[CountedDoubt, ...]:
    """Return the doubts of both cells of a ratio, those of the second with its role."""
    return tally(group) + (() if group[0]["cell_id"] == other[0]["cell_id"] else tally(other, role))


def paired(group: Rows, base: Rows, rule: Rule | None) -> tuple[list[float], list[float], list[bool] | None]:
    """Return the throughputs of both cells by block and, if a rule set the number of blocks, which were its pilot.

    A block that spans two invocations has its base, and the base its twin, in both: the last invocation that
    holds both cells counts, so that each block gives one pair.
    """
    bases = {(row["block"], row["invocation"]): float(row["throughput_per_s"]) for row in base}
    both = list({row["block"]: row for row in group if (row["block"], row["invocation"]) in bases}.values())
    speeds = [float(row["throughput_per_s"]) for row in both]
    others = [bases[row["block"], row["invocation"]] for row in both]
    return speeds, others, [row["block"] < rule["at_least"] for row in both] if rule else None


def pair_p_value(speeds: Sequence[float], others: Sequence[float], pilot: Sequence[bool] | None) -> float | None:
    """Return the p-value of the hypothesis that both cells of ``paired`` are equally fast; None with too few blocks."""
    ratios = [speed / other for speed, other in zip(speeds, others, strict=True)]
    first = [ratio for ratio, is_first in zip(ratios, pilot, strict=True) if is_first] if pilot else None
    return ratio_p_value(ratios, pilot=first) if ratios else None


def _against(group: Rows, base: Rows, rule: Rule | None) -> Values | None:
    """Return the ratio columns of one cell; None if no block holds both the cell and its base."""
    speeds, bases, pilot = paired(group, base, rule)
    if not speeds:
        return None
    ratio = paired_ratio(speeds, bases, pilot=pilot)
    in_pilot = [speed for speed, is_first in zip(speeds, pilot, strict=True) if is_first] if pilot else None
    speed = geometric_mean(speeds, pilot=in_pilot)
    is_base = group[0]["cell_id"] == base[0]["cell_id"]
    devices = float(group[0]["devices"]) / float(base[0]["devices"])
    return {
        "base_strategy": base[0]["strategy"],
        "base_devices": base[0]["devices"],
        "base_throughput_per_s": geometric_mean(bases).value,
        "throughput_per_s": speed.value,
        **_prefixed("throughput", speed.around()),
        "speedup": ratio.value,
        **ends(ratio),
        "precise": meets(speed if is_base else ratio, rule),
        "efficiency": ratio.value / devices,
        **_prefixed("efficiency", ratio.around(1 / devices)),
    }


def _prefixed(name: str, ends: Mapping[str, float | None]) -> Values:
    return {f"{name}_{end}": value for end, value in ends.items()}


def meets(estimate: Estimate, rule: Rule | None) -> bool | None:
    """Return whether an interval is as narrow as the rule requires; None without a rule."""
    return None if rule is None else estimate.halfwidth is not None and estimate.halfwidth <= rule["halfwidth"]
