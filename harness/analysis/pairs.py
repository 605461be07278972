"""Trials -> ratios of two cells that differ in one factor, paired by block: A/A test, launcher, any axis."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from harness.analysis.common import Rows, Rule, Values, by_cell, ends, is_no_claim, measured, order
from harness.analysis.doubts import tally
from harness.analysis.equivalence import Verdicts, verdict_columns
from harness.analysis.ratios import doubts_of, meets, pair_p_value, paired, with_hardware
from harness.analysis.stats import ENDS, Estimate, geometric_mean, paired_ratio
from harness.plan.axis_pairs import SIZES, axis_pairs
from harness.plan.labels import TAGS
from harness.record.schema import DESCRIPTION, NOISE, PARITY, VERSUS

RATIO = ("ratio", *ENDS, "excludes_one", "p_value", "precise")


def noise(trials: pd.DataFrame, rule: Rule | None = None) -> pd.DataFrame:
    """Return the A/A test: each base against its twin, the same cell in another worker group; the noise floor."""
    twins, counted = by_cell(measured(trials, "twin")), measured(trials)
    bases = by_cell(counted[counted["cell_id"].isin(twins)])
    rows = []
    for cell_id, twin in twins.items():
        if ratio := _ratio(twin, bases.get(cell_id, []), rule):
            speeds = {"throughput_per_s": ratio.pop("other"), "twin_throughput_per_s": ratio.pop("own")}
            rows.append(
                {**_axes(twin), **speeds, **ratio, "doubts": tally(twin, "twin") + tally(bases[cell_id], "base")}
            )
    return NOISE.frame(sorted(rows, key=order))


def parity(trials: pd.DataFrame, rule: Rule | None = None, checked: Verdicts | None = None) -> pd.DataFrame:
    """Return the ratio of each cell under Ray to the same cell under torchrun, the control, paired by block."""
    counted = measured(trials)
    cells = by_cell(counted) if counted["launcher"].eq("torchrun").any() else {}
    controls = {group[0]["launchers_id"]: group for group in cells.values() if group[0]["launcher"] == "torchrun"}
    rows = []
    for group in cells.values():
        control = controls.get(group[0]["launchers_id"], [])
        if group[0]["launcher"] == "ray" and (ratio := _ratio(group, control, rule, checked)):
            speeds = {"throughput_per_s": ratio.pop("own"), "control_throughput_per_s": ratio.pop("other")}
            doubts = doubts_of(group, control, "torchrun")
            rows.append({**_axes(group), "control_id": control[0]["cell_id"], **speeds, **ratio, "doubts": doubts})
    return PARITY.frame(sorted(rows, key=order))


def versus(
    trials: pd.DataFrame,
    rule: Rule | None = None,
    checked: Verdicts | None = None,
    variants: Sequence[str] = (),
    placements: Sequence[str] = (),
) -> pd.DataFrame:
    """Return the ratio of every two cells that differ in one axis, paired by block: neighbours, and last to first.

    For strategies on several devices: dp, ddp, fsdp in this order. ``variants``: their order. ``placements``: that of
    device_ids, each of which is compared with the first.
    """
    places = {name: place for place, name in enumerate(variants)}
    groups = sorted(by_cell(measured(trials)).values(), key=lambda group: order(group[0]))
    groups.sort(key=lambda group: places.get(group[0]["variant"], len(places)))
    rows = []
    for pair in axis_pairs(((group[0], group) for group in groups), placements):
        group, other = pair.one, pair.other
        if ratio := _ratio(group, other, None if pair.axis in SIZES else rule, checked):
            named = {"other_id": other[0]["cell_id"], "other_label": other[0]["label"], "axis": pair.axis}
            values = {"value": pair.value, "other_value": pair.other_value, "other_strategy": other[0]["strategy"]}
            apart = {tag: any(is_no_claim({tag: one[0].get(tag)}) for one in (group, other)) for tag in TAGS}
            speeds = {"throughput_per_s": ratio.pop("own"), "other_throughput_per_s": ratio.pop("other")}
            doubts = doubts_of(group, other, pair.other_value)
            rows.append({**_axes(group), **apart, **named, **values, **speeds, **ratio, "doubts": doubts})
    return VERSUS.frame(rows)


def excludes_one(ratio: Estimate) -> bool | None:
    """Return whether the interval excludes 1; None without an interval."""
    return None if ratio.low is None or ratio.high is None else not ratio.low <= 1 <= ratio.high


def _ratio(group: Rows, other: Rows, rule: Rule | None, checked: Verdicts | None = None) -> Values | None:
    """Return both throughputs and their ratio, with the reason if it is no claim; None if no block holds both cells."""
    speeds, others, pilot = paired(group, other, rule)
    if not speeds:  # of other hardware or environments the throughputs are shown, and no ratio
        speeds, others, pilot = paired(group, other, rule, anywhere=True)
    if not speeds:
        return None
    ratio = paired_ratio(speeds, others, pilot=pilot)
    columns: Values = {
        "own": geometric_mean(speeds).value,
        "other": geometric_mean(others).value,
        "ratio": ratio.value,
    }
    columns |= {**ends(ratio), "excludes_one": excludes_one(ratio), "precise": meets(ratio, rule)}
    columns["p_value"] = pair_p_value(speeds, others, pilot)
    verdict = verdict_columns(checked, [rows[0]["check_id"] for rows in (group, other)])
    return columns | with_hardware(verdict, group, other, RATIO)


def _axes(group: Rows) -> Values:
    return {axis: group[0][axis] for axis in ("cell_id", "unit", *DESCRIPTION)}
