"""Trials -> ratios of two cells, paired by block: speedup to the base, A/A test, launcher, any axis, leaders."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

import pandas as pd

from harness.analysis.common import (
    Row,
    Rows,
    Rule,
    Values,
    bases_of,
    by_cell,
    ends,
    is_no_claim,
    measured,
    nearest,
    no_claims,
    order,
)
from harness.analysis.doubts import CountedDoubt, tally, unusual, usual_doubts
from harness.analysis.equivalence import Verdicts, verdict_columns
from harness.analysis.stats import ENDS, Estimate, geometric_mean, holm, paired_ratio, ratio_p_value
from harness.plan.comparison import SIZES, axis_pairs
from harness.plan.labels import TAGS
from harness.record.schema import DESCRIPTION, LEADERS, NOISE, PARITY, SCALING, VERSUS

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


Pair = tuple[Sequence[float], Sequence[float], Sequence[bool] | None]
"""The throughputs of two cells by block, and which blocks were the pilot of a rule."""
SIGNIFICANCE = 0.05
GROUP_AXES = ("workload", "data", "model", "precision", "device", "devices", "global_batch_size")
"""The question that settings answer alike: they train the same, on the same number of devices, at the same batch."""


def leaders(trials: pd.DataFrame, rule: Rule | None = None, checked: Verdicts | None = None) -> pd.DataFrame:
    """Return each setting against the fastest of its group, paired by block.

    The fastest by geometric mean or, where a setting that is not in all of its blocks is clearly faster in those that
    it is in, that one.
    ``tied``: the two-sided t test of their log ratio, adjusted by Holm 1979 over the group, is not significant at 5 %;
    <NA> below three blocks in common. Left out: what makes no claim about speed (see ``no_claims``), cells that
    are not equivalent to one device (``checked``: the verdicts of equivalence checks), and the control under torchrun.
    """
    groups: dict[tuple[object, ...], list[Rows]] = {}
    for cell in by_cell(_claims(measured(trials), checked or {})).values():
        key = (*(cell[0][axis] for axis in GROUP_AXES), own_work(cell[0]))
        groups.setdefault(key, []).append(cell)
    rows = [row for cells in groups.values() for row in _group(cells, rule)]
    return LEADERS.frame(sorted(rows, key=order))


def own_work(row: Row) -> str:
    """Return the options of the workload as text: settings that differ in them do other work."""
    options = row["options"] or {}
    own = {name: value for name, value in options.items() if name.startswith("workload.")}
    return json.dumps(own, sort_keys=True, default=str)


def _claims(trials: pd.DataFrame, checked: Verdicts) -> pd.DataFrame:
    rehearsal = no_claims(trials)
    control = (trials["launcher"] == "torchrun") & bool((trials["launcher"] == "ray").any())
    different = [check for check, verdict in checked.items() if verdict.equivalence == "not equivalent"]
    return trials[~rehearsal & ~control & ~trials["check_id"].isin(different)]


def _group(cells: Sequence[Rows], rule: Rule | None) -> list[Row]:
    """Return the rows of one group."""
    speeds = [geometric_mean([float(row["throughput_per_s"]) for row in cell]) for cell in cells]
    leader = max(range(len(cells)), key=lambda at: speeds[at].value)
    before: set[int] = set()
    while True:
        pairs = [paired(cell, cells[leader], rule) for cell in cells]
        p_values = _adjusted([None if at == leader else pair_p_value(*pair) for at, pair in enumerate(pairs)])
        before.add(leader)
        faster = [at for at, pair in enumerate(pairs) if at not in before and _is_faster(pair, p_values[at])]
        if not faster:
            break
        leader = max(faster, key=lambda at: speeds[at].value)
    return [
        {
            **{axis: cell[0][axis] for axis in ("cell_id", "unit", *DESCRIPTION)},
            "leader_id": cells[leader][0]["cell_id"],
            "settings": len(cells),
            "throughput_per_s": speed.value,
            **{f"throughput_{end}": value for end, value in speed.around().items()},
            **_ratio_columns(*pair, is_leader=at == leader),
            "p_value": p_value,
            "tied": None if p_value is None else p_value >= SIGNIFICANCE,
        }
        for at, (cell, speed, pair, p_value) in enumerate(zip(cells, speeds, pairs, p_values, strict=True))
    ]


def _is_faster(pair: Pair, p_value: float | None) -> bool:
    """Return whether the first of a pair is clearly faster than the second, in the blocks that have both."""
    return p_value is not None and p_value < SIGNIFICANCE and paired_ratio(pair[0], pair[1]).value > 1


def _ratio_columns(
    speeds: Sequence[float], others: Sequence[float], pilot: Sequence[bool] | None, *, is_leader: bool
) -> Row:
    if is_leader or not speeds:
        return {"ratio": 1.0 if is_leader else None, "blocks": len(speeds)}
    estimate = paired_ratio(speeds, others, pilot=pilot)
    return {"ratio": estimate.value, **ends(estimate)}


def _adjusted(p_values: Sequence[float | None]) -> list[float | None]:
    """Return the p-values adjusted by Holm over those that are known."""
    known = iter(holm([value for value in p_values if value is not None]))
    return [None if value is None else next(known) for value in p_values]
