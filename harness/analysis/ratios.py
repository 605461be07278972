"""Trials -> ratios of two cells, paired by block: speedup to the base, A/A test, launcher, any axis, leaders."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd

from harness.analysis.common import (
    AnyRow,
    Row,
    Rows,
    Values,
    bases_of,
    by_cell,
    columns_of,
    ends,
    grouped,
    is_no_claim,
    measured,
    nearest,
    no_claims,
    order,
    rows_of,
    work_of,
)
from harness.analysis.doubts import CountedDoubt, tally, unusual, usual_doubts
from harness.analysis.equivalence import Verdicts, verdict_columns
from harness.analysis.stats import (
    LOOKS_SIGNIFICANCE,
    SIGNIFICANCE,
    Estimate,
    geometric_mean,
    holm,
    p_value,
    pooled_deviation,
    ratio_p_value,
)
from harness.config.axes import SIZES
from harness.config.sections import BlockRule, Rule
from harness.plan.comparison import AxisPair, axis_pairs
from harness.plan.labels import TAGS, joined
from harness.record.schema import DESCRIPTION, LEADERS, NOISE, PARITY, SCALING, VERSUS

OTHER_HARDWARE = "other hardware"
OTHER_ENVIRONMENT, UNKNOWN_ENVIRONMENT = "other environment", "environment not recorded"
"""How the reason begins that two cells have no ratio: no block has both on the same hardware, or in one environment."""
AXES = ("cell_id", "unit", *DESCRIPTION)


@dataclass(frozen=True)
class Paired:
    """The trials of two cells in the blocks that have both, in the order of the blocks.

    ``rule``: the one that set the number of blocks, if any. ``apart``: the reason that there is no ratio, if every pair
    of trials ran on different hardware or in different environments.
    """

    pairs: Sequence[tuple[Row, Row]]
    rule: Rule | None
    apart: str | None

    def __bool__(self) -> bool:
        """Whether a block has both cells."""
        return bool(self.pairs)

    @cached_property
    def throughputs(self) -> tuple[list[float], list[float]]:
        """The throughputs of the first cell, and of the second, by block."""
        speeds, others = ([float(pair[at].throughput_per_s) for pair in self.pairs] for at in (0, 1))
        return speeds, others

    @cached_property
    def pilot(self) -> int:
        """The number of blocks from which a BlockRule decided how many there are; 0 without one."""
        return sum(one.block < self.rule.at_least for one, _ in self.pairs) if isinstance(self.rule, BlockRule) else 0

    @cached_property
    def ratios(self) -> list[float]:
        """The ratio of each block; empty if the trials ran apart."""
        return [] if self.apart else [speed / other for speed, other in zip(*self.throughputs, strict=True)]

    @cached_property
    def ratio(self) -> Estimate | None:
        """The mean ratio with its interval; None without a ratio. What both share in a block, a slow hour, cancels."""
        significance = LOOKS_SIGNIFICANCE if self.rule == "decide" else SIGNIFICANCE
        return geometric_mean(self.ratios, pilot=self.pilot, significance=significance) if self.ratios else None

    @property
    def p_value(self) -> float | None:
        """The p-value of the hypothesis that both cells are equally fast; None with too few blocks."""
        return ratio_p_value(self.ratios, pilot=self.pilot)

    @property
    def disagreement(self) -> tuple[float, float] | None:
        """The mean ratio of the first invocation and that of the later ones, if they differ at SIGNIFICANCE.

        By a two-sided t test with the deviation that both share; None with fewer than two blocks of either.
        """
        is_first = [one.invocation == self.pairs[0][0].invocation for one, _ in self.pairs]
        known = [*zip(map(math.log, self.ratios), is_first, strict=True)]
        logs = [[log for log, of_first in known if of_first == wanted] for wanted in (True, False)]
        if min(map(len, logs)) < 2:
            return None
        spread, freedom = pooled_deviation(logs)
        means = [sum(each) / len(each) for each in logs]
        differ = p_value(means[1] - means[0], spread * math.sqrt(sum(1 / len(each) for each in logs)), freedom)
        return (math.exp(means[0]), math.exp(means[1])) if differ <= SIGNIFICANCE else None

    def columns(self) -> Values:
        """Return the columns of the ratio, missing without a ratio."""
        if self.ratio is None:
            return {"blocks": len(self.pairs)}
        low, high = self.ratio.low, self.ratio.high
        return {
            "ratio": self.ratio.value,
            **ends(self.ratio),
            "excludes_one": None if low is None or high is None else not low <= 1 <= high,
            "p_value": self.p_value,
            "precise": meets(self.ratio, self.rule),
        }


def paired(group: Rows, other: Rows, rule: Rule | None = None) -> Paired:
    """Return the trials of two cells in the blocks that both have.

    The trials are those of one invocation, the last of them; or in a block that was cut in two those in equal
    environments. Trials on different hardware form none; if there are no others, their throughputs are shown, and
    no ratio.
    """
    if pairs := _pairs(group, other):
        return Paired(pairs, rule, None)
    apart = _pairs(group, other, anywhere=True)
    return Paired(apart, rule, _why_apart(apart, group, other) if apart else None)


def _pairs(group: Rows, base: Rows, *, anywhere: bool = False) -> list[tuple[Row, Row]]:
    in_block = grouped(base, lambda row: int(row.block))
    both = ((row, nearest(row, in_block.get(row.block, ()), anywhere=anywhere)) for row in group)
    alike = [(row, other) for row, other in both if other and (anywhere or same_hardware(row, other))]
    alike.sort(key=lambda pair: (pair[0].block, pair[0].invocation == pair[1].invocation))
    return [*{row.block: (row, other) for row, other in alike}.values()]


def same_hardware(row: Row, other: Row) -> bool:
    """Return whether two trials ran on devices of the same model, as far as both are known."""
    unknown = pd.isna(row.device_model) or pd.isna(other.device_model)
    return unknown or bool(row.device_model == other.device_model)


def _why_apart(pairs: Sequence[tuple[Row, Row]], group: Rows, other: Rows) -> str:
    """Return the reason that pairs of trials, all of which ran apart, give no ratio."""
    hardware = not all(same_hardware(*pair) for pair in pairs)
    column, word, ran = ("device_model", "", "on") if hardware else ("invocation", "invocation ", "in")
    own, theirs = (", ".join(sorted({f"{word}{getattr(row, column)}" for row in rows})) for rows in (group, other))
    unknown = any(pd.isna(row.environment) for pair in pairs for row in pair)
    name = OTHER_HARDWARE if hardware else UNKNOWN_ENVIRONMENT if unknown else OTHER_ENVIRONMENT
    return f"{name}: {own}; what it is compared with ran {ran} {theirs}"


def meets(estimate: Estimate, rule: Rule | None) -> bool | None:
    """Return whether an interval is as narrow as a BlockRule requires; None without one."""
    return within(estimate, rule.halfwidth) if isinstance(rule, BlockRule) else None


def within(estimate: Estimate | None, halfwidth: float) -> bool:
    """Return whether the interval of an estimate is known, and at most as wide as this."""
    return estimate is not None and estimate.halfwidth is not None and estimate.halfwidth <= halfwidth


def _claim(pair: Paired, checked: Verdicts | None, *groups: Rows) -> Values:
    """Return the columns on whether a ratio of these cells is a claim: their equivalence, the reason if it is none."""
    columns = verdict_columns(checked, [rows[0].check_id for rows in groups])
    return {**columns, "excluded": pair.apart} if pair.apart else columns


def with_twins(trials: pd.DataFrame) -> pd.DataFrame:
    """Return the successful timed trials, where a base has the geometric mean of its throughput and its twin's.

    Its twin is the same cell in the same block and invocation, in other processes on devices of the same model. A base
    without a twin keeps its own throughput.
    """
    counted, keys = measured(trials), ["cell_id", "block", "invocation", "device_model"]
    twins = measured(trials, "twin")[[*keys, "throughput_per_s"]]
    own = counted["throughput_per_s"].to_numpy(dtype=float, na_value=np.nan)
    second = counted[keys].merge(twins, on=keys, how="left")["throughput_per_s"].to_numpy(dtype=float, na_value=np.nan)
    return counted.assign(throughput_per_s=np.where(np.isnan(second), own, np.sqrt(own * second)))


def scaling(trials: pd.DataFrame, rule: Rule | None = None, checked: Verdicts | None = None) -> pd.DataFrame:
    """Return the speedup and efficiency of each measured cell against its base, paired by block.

    A base that a block has twice (A/A test) counts twice: its throughput is the geometric mean of both. The base is the
    planned one or, if that could not run, the same strategy on the smallest device count that ran. A cell without a
    base has no row: ratios never mix bases. ``checked``: the verdicts of equivalence checks; the ratio of a cell that
    is not equivalent is no claim: ``excluded`` is set.
    """
    cells, usual = by_cell(rows_of(with_twins(trials))), usual_doubts(trials)
    bases = bases_of(cells)
    rows = []
    for cell_id, group in cells.items():
        base = cells[bases[cell_id]]
        if not (pair := paired(group, base, rule)):
            continue
        speeds, others = pair.throughputs
        speed = geometric_mean(speeds, pilot=pair.pilot)
        row = {
            **columns_of(group[0], *AXES),
            "base_id": bases[cell_id],
            "base_strategy": base[0].strategy,
            "base_devices": base[0].devices,
            "throughput_per_s": speed.value,
            **speed.around("throughput"),
            "base_throughput_per_s": geometric_mean(others).value,
            "blocks": speed.n,
            **_claim(pair, checked, group),
            "doubts": _doubts_of(group, base, "base"),
            "unusual": unusual(tally(group), usual),
        }
        if ratio := pair.ratio:
            devices = float(group[0].devices) / float(base[0].devices)
            row |= {"speedup": ratio.value, **ends(ratio), "p_value": pair.p_value}
            row |= {"efficiency": ratio.value / devices, **ratio.around("efficiency", 1 / devices)}
            row["precise"] = meets(speed if base is group else ratio, rule)
        rows.append(row)
    compared = {row["base_id"] for row in rows if row["cell_id"] != row["base_id"]}
    planned = [first for first, *_ in cells.values() if first.cell_id == first.base_id]
    launchers = Counter(first.launchers_id for first in planned)
    compared |= {first.cell_id for first in planned if launchers[first.launchers_id] > 1}
    for row in rows:
        if row["cell_id"] in compared:
            row["precise"] = None  # ratios determine its number of blocks, not its own throughput
    return SCALING.frame(sorted(rows, key=order))


def _doubts_of(group: Rows, other: Rows, role: str) -> tuple[CountedDoubt, ...]:
    """Return the doubts of both cells of a ratio; the second cell's with its role."""
    return tally(group) + (() if group[0].cell_id == other[0].cell_id else tally(other, role))


def noise(trials: pd.DataFrame, rule: Rule | None = None) -> pd.DataFrame:
    """Return the A/A test: the twin of each base, the same cell in other processes, against it.

    No look ends a run by it, so that its interval is of 95 % under ``blocks: decide``, too.
    """
    rule = None if rule == "decide" else rule
    twins, counted = by_cell(rows_of(measured(trials, "twin"))), measured(trials)
    bases = by_cell(rows_of(counted[counted["cell_id"].isin(twins)]))
    rows = []
    for cell_id, twin in twins.items():
        if pair := paired(twin, bases.get(cell_id, []), rule):
            base = bases[cell_id]
            row = ratio_row(pair, ("twin_throughput_per_s", "throughput_per_s"), None, twin, base)
            rows.append({**row, "doubts": tally(twin, "twin") + tally(base, "base")})
    return NOISE.frame(sorted(rows, key=order))


def ratio_row(pair: Paired, names: tuple[str, str], checked: Verdicts | None, *cells: Rows) -> Values:
    """Return the columns of the ratio of two cells, with the mean throughput of each in a column of ``names``."""
    return {
        **columns_of(cells[0][0], *AXES),
        **{name: geometric_mean(of_cell).value for name, of_cell in zip(names, pair.throughputs, strict=True)},
        **pair.columns(),
        **_claim(pair, checked, *cells),
    }


def parity(trials: pd.DataFrame, rule: Rule | None = None, checked: Verdicts | None = None) -> pd.DataFrame:
    """Return the ratio of each cell under Ray to the same cell under torchrun, the control, paired by block."""
    counted = measured(trials)
    cells = by_cell(rows_of(counted)) if counted["launcher"].eq("torchrun").any() else {}
    controls = {group[0].launchers_id: group for group in cells.values() if group[0].launcher == "torchrun"}
    rows = []
    for group in cells.values():
        control = controls.get(group[0].launchers_id, [])
        if group[0].launcher == "ray" and (pair := paired(group, control, rule)):
            row = ratio_row(pair, ("throughput_per_s", "control_throughput_per_s"), checked, group, control)
            doubts = _doubts_of(group, control, "torchrun")
            rows.append({**row, "control_id": control[0].cell_id, "doubts": doubts})
    return PARITY.frame(sorted(rows, key=order))


ALL_THREADS, ALL, ONE = "threads", "all CPU threads", "a device's"
"""The axis, and the values, of a base with the threads of all CPU slots beside cells on several of them."""


def versus(
    trials: pd.DataFrame,
    rule: Rule | None = None,
    checked: Verdicts | None = None,
    variants: Sequence[str] = (),
    placements: Sequence[str] = (),
) -> pd.DataFrame:
    """Return the ratio of every two cells that differ in one axis, paired by block: neighbours, and last to first.

    For strategies on several devices: dp, ddp, fsdp in this order. ``variants``: their order. ``placements``: that of
    device_ids, each of which is compared with the first. Last are cells on several CPU slots, each against its base
    with all threads.
    """
    places = {name: place for place, name in enumerate(variants)}
    groups = sorted(by_cell(rows_of(with_twins(trials))).values(), key=lambda group: order(group[0]))
    groups.sort(key=lambda group: places.get(group[0].variant, len(places)))
    rows = []
    own = {group[0].cell_id: group for group in groups}
    with_all = {
        name: group
        for name, group in by_cell(rows_of(measured(trials, "threads"))).items()
        if name in own and (group[0].threads or 0) > (own[name][0].threads or 0)  # else it is pinned
    }
    pairs = axis_pairs(((group[0], group) for group in groups), placements)
    several = (group for group in groups if group[0].devices > 1 and group[0].base_id in with_all)
    pairs += [AxisPair(ALL_THREADS, group, with_all[group[0].base_id], ONE, ALL) for group in several]
    for along in pairs:
        group, other = along.one, along.other
        # blocks are added for no comparison of sizes; yet that of devices with the base's is one of the decisions
        is_speedup = along.axis == "devices" and other[0].cell_id == group[0].base_id and rule == "decide"
        own_rule = None if along.axis in {*SIZES, ALL_THREADS} and not is_speedup else rule
        if pair := paired(group, other, own_rule):
            rows.append(
                {
                    **ratio_row(pair, ("throughput_per_s", "other_throughput_per_s"), checked, group, other),
                    **{tag: any(is_no_claim({tag: getattr(one[0], tag)}) for one in (group, other)) for tag in TAGS},
                    "other_id": other[0].cell_id,
                    "other_label": joined(other[0].label, ALL if along.axis == ALL_THREADS else ""),
                    "other_strategy": other[0].strategy,
                    "axis": along.axis,
                    "value": along.value,
                    "other_value": along.other_value,
                    "doubts": _doubts_of(group, other, along.other_value),
                }
            )
    return VERSUS.frame(rows)


def leaders(
    trials: pd.DataFrame, rule: Rule | None = None, checked: Verdicts | None = None, significance: float = SIGNIFICANCE
) -> pd.DataFrame:
    """Return each setting against the fastest that trains the same, on as many devices at the same batch, by block.

    The fastest has the largest geometric mean. A setting that lacks some of its blocks takes its place if it is
    clearly faster in the blocks that both have.
    ``tied``: the two-sided t test of their log ratio, adjusted by Holm 1979 over the group, is above ``significance``;
    <NA> below three blocks in common. Left out: what makes no claim about speed (see ``no_claims``), cells that
    are not equivalent to one device (``checked``: the verdicts of equivalence checks), and the control under torchrun.
    """
    counted = with_twins(trials)
    control = (counted["launcher"] == "torchrun") & bool((counted["launcher"] == "ray").any())
    different = [check for check, verdict in (checked or {}).items() if verdict.excluded]
    claims = counted[~no_claims(counted) & ~control & ~counted["check_id"].isin(different)]
    cells = by_cell(rows_of(claims)).values()
    groups = grouped(cells, lambda cell: work_of(cell[0], "devices", "global_batch_size"))
    rows = [row for group in groups.values() for row in _group(group, rule, significance)]
    return LEADERS.frame(sorted(rows, key=order))


def _group(cells: Sequence[Rows], rule: Rule | None, significance: float) -> list[AnyRow]:
    """Return the rows of one group."""
    speeds = [geometric_mean([float(row.throughput_per_s) for row in cell]) for cell in cells]
    leader = max(range(len(cells)), key=lambda at: speeds[at].value)
    before: set[int] = set()
    while True:
        pairs = [paired(cell, cells[leader], rule) for cell in cells]
        p_values = holm([None if at == leader else pair.p_value for at, pair in enumerate(pairs)])
        tied = [None if value is None else value > significance for value in p_values]
        before.add(leader)
        faster = [
            at
            for at, pair in enumerate(pairs)
            if at not in before and tied[at] is False and pair.ratio and pair.ratio.value > 1
        ]
        if not faster:
            break
        leader = max(faster, key=lambda at: speeds[at].value)
    rows: list[AnyRow] = []
    for at, (cell, speed, pair) in enumerate(zip(cells, speeds, pairs, strict=True)):
        ratio = {"ratio": pair.ratio.value, **ends(pair.ratio)} if pair.ratio else {}
        tested = {**({"ratio": 1.0} if at == leader else ratio), "p_value": p_values[at], "tied": tied[at]}
        named = {**columns_of(cell[0], *AXES), "leader_id": cells[leader][0].cell_id, "settings": len(cells)}
        of_speed = {"throughput_per_s": speed.value, **speed.around("throughput")}
        rows.append({**named, **of_speed, "blocks": len(pair.ratios), **tested})
    return rows
