"""Trials -> the fastest setting of each model, data set, precision, device count and global batch, and its equals."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pandas as pd

from harness.analysis.common import Row, Rows, Rule, by_cell, ends, measured, no_claims, order
from harness.analysis.equivalence import Verdicts
from harness.analysis.ratios import pair_p_value, paired
from harness.analysis.stats import geometric_mean, holm, paired_ratio
from harness.record.schema import DESCRIPTION, LEADERS

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
