"""Trials -> speedup and efficiency: ratios to the base, paired by block."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import pandas as pd

from harness.analysis.common import Row, Rows, Rule, Values, bases_of, by_cell, ends, measured, nearest, order
from harness.analysis.doubts import CountedDoubt, tally
from harness.analysis.equivalence import Verdicts, verdict_columns
from harness.analysis.stats import ENDS, Estimate, geometric_mean, paired_ratio, ratio_p_value
from harness.analysis.usual_doubts import unusual, usual_doubts
from harness.record.schema import DESCRIPTION, SCALING

OTHER_HARDWARE = "other hardware"
OTHER_ENVIRONMENT, UNKNOWN_ENVIRONMENT = "other environment", "environment not recorded"
"""How the reason begins that two cells have no ratio: no block has both on the same hardware, or in one environment."""
RATIOS = ("speedup", *ENDS, "precise", "efficiency", *(f"efficiency_{end}" for end in ENDS))


def scaling(trials: pd.DataFrame, rule: Rule | None = None, checked: Verdicts | None = None) -> pd.DataFrame:
    """Return the speedup and efficiency of each measured cell against its base, paired by block.

    The base is the planned one or, if that could not run, the same strategy on the smallest device count that
    ran. A cell without a base has no row: ratios never mix bases. ``checked``: the verdicts of equivalence checks;
    the ratio of a cell that is not equivalent is no claim: ``excluded`` is set.
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
        row |= with_hardware(verdict_columns(checked, [first["check_id"]]), group, base, RATIOS)
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


def paired(
    group: Rows, base: Rows, rule: Rule | None, *, anywhere: bool = False
) -> tuple[list[float], list[float], list[bool] | None]:
    """Return the throughputs of both cells by block and, if a rule set the number of blocks, which were its pilot.

    Each block gives one pair: the last of trials of one invocation, or in a block that was cut in two of trials in
    equal environments. Trials on different hardware form none, unless ``anywhere`` is asked for.
    """
    pairs = _pairs(group, base, anywhere=anywhere)
    speeds = [float(row["throughput_per_s"]) for row, _ in pairs]
    others = [float(other["throughput_per_s"]) for _, other in pairs]
    return speeds, others, [row["block"] < rule["at_least"] for row, _ in pairs] if rule else None


def _pairs(group: Rows, base: Rows, *, anywhere: bool = False) -> list[tuple[Row, Row]]:
    in_block: dict[int, list[Row]] = {}
    for other in base:
        in_block.setdefault(other["block"], []).append(other)
    both = ((row, nearest(row, in_block.get(row["block"], ()), anywhere=anywhere)) for row in group)
    alike = [(row, other) for row, other in both if other and (anywhere or same_hardware(row, other))]
    alike.sort(key=lambda pair: (pair[0]["block"], pair[0]["invocation"] == pair[1]["invocation"]))
    return [*{row["block"]: (row, other) for row, other in alike}.values()]


def same_hardware(row: Row, other: Row) -> bool:
    """Return whether two trials ran on devices of the same model, as far as both are known."""
    models = [each.get("device_model") for each in (row, other)]
    return any(pd.isna(model) for model in models) or models[0] == models[1]


def with_hardware(verdict: Values, group: Rows, other: Rows, ratios: Sequence[str]) -> Values:
    """Return the verdict of the equivalence check on a ratio.

    If no two of its trials form a pair, the reason instead, and the columns ``ratios`` as missing.
    """
    apart = _pairs(group, other, anywhere=True)
    if not apart or _pairs(group, other):
        return verdict
    hardware = not all(same_hardware(*pair) for pair in apart)
    column, word, ran = ("device_model", "", "on") if hardware else ("invocation", "invocation ", "in")
    own, theirs = (", ".join(sorted({f"{word}{row[column]}" for row in rows})) for rows in (group, other))
    unknown = any(pd.isna(row.get("environment")) for pair in apart for row in pair)
    name = OTHER_HARDWARE if hardware else UNKNOWN_ENVIRONMENT if unknown else OTHER_ENVIRONMENT
    reason = f"{name}: {own}; what it is compared with ran {ran} {theirs}"
    return {**dict.fromkeys(ratios), **verdict, "excluded": reason}


def pair_p_value(speeds: Sequence[float], others: Sequence[float], pilot: Sequence[bool] | None) -> float | None:
    """Return the p-value of the hypothesis that both cells of ``paired`` are equally fast; None with too few blocks."""
    ratios = [speed / other for speed, other in zip(speeds, others, strict=True)]
    first = [ratio for ratio, is_first in zip(ratios, pilot, strict=True) if is_first] if pilot else None
    return ratio_p_value(ratios, pilot=first) if ratios else None


def _against(group: Rows, base: Rows, rule: Rule | None) -> Values | None:
    """Return the ratio columns of one cell; None if no block holds both the cell and its base."""
    speeds, bases, pilot = paired(group, base, rule)
    if not speeds:  # of other hardware or environments the throughputs are shown, and no ratio
        speeds, bases, pilot = paired(group, base, rule, anywhere=True)
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
