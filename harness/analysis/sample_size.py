"""The number of blocks of each cell: by the spread of its pilot blocks (Stein), or by looks at its comparisons."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from harness.analysis.common import Lines, by_cell, measured, rows_of
from harness.analysis.ratios import paired, with_twins
from harness.analysis.stats import is_decided, stein_blocks
from harness.analysis.trials import trial_row
from harness.config.axes import SIZES
from harness.config.sections import LOOKS, Rule
from harness.plan.cell import Cell
from harness.plan.comparison import (
    axes_of,
    axis_pairs,
    base_cell,
    comparable,
    other_launcher_cells,
    single_device_cell,
    wrapped_single_device_cell,
)
from harness.plan.trial import Trial
from harness.record.schema import TRIALS


def needed_blocks(
    trials: Iterable[Trial], lines: Lines, rule: Rule, pilot: int, placements: Sequence[str] = ()
) -> dict[str, int]:
    """Return the number of blocks by cell id, from the recorded trials of the first ``pilot`` blocks.

    It is as many as intervals of the rule's half-width need (Stein) or, by the rule 'decide', no more than the pilot's
    if every comparison is decided. It follows from every ratio in which the cell appears: to its base, to a cell that
    differs in one axis, to the same cell under another launcher, to its twin. For a cell that is compared with no other
    cell it follows from its throughput as well. A base, and the cells that explain a cell, have as many blocks as the
    cell that needs most. ``placements``: the order of device_ids, as the experiment file has it.
    """
    most = LOOKS[-1] if rule == "decide" else rule.at_most

    def needed_for(values: Sequence[float], *, is_open: bool = False) -> int:
        """Return the blocks that some values need; ``is_open``: as ratios of a comparison that is yet to be decided."""
        if len(values) < 2:
            return most
        if rule != "decide":
            return min(most, stein_blocks(values, rule.halfwidth))
        return most if is_open and not is_decided(values) else pilot

    of_pilot = (line for line in lines if line["block"] is not None and line["block"] < pilot)
    frame = TRIALS.frame(row for line in of_pilot if (row := trial_row(line))["throughput_per_s"])
    own, twins, means = (by_cell(rows_of(of)) for of in (measured(frame), measured(frame, "twin"), with_twins(frame)))
    cells = {trial.cell for trial in trials if trial.kind == "throughput"}
    needed: dict[str, int] = {}
    compared: set[str] = set()
    based = [(cell, base) for cell in cells if comparable(cell) and (base := base_cell(cell)) != cell]
    # and the pairs of the tables versus and parity, as far as they have blocks of the pilot in common
    known = [cell for cell in cells if cell.id in own]
    along = axis_pairs(((axes_of(cell), cell) for cell in known), placements)
    others = [(pair.one, pair.other) for pair in along if pair.axis not in SIZES]
    others += [(cell, other) for cell in known for other in other_launcher_cells(cell) if other in cells]
    for cell, other in [*based, *others]:
        if ratios := paired(means.get(cell.id, []), means.get(other.id, [])).ratios:
            compared |= {cell.id, other.id}
            _raise(needed, _users(cell) | _users(other), needed_for(ratios, is_open=True))
        elif (cell, other) in based:
            needed[cell.id] = most  # no more blocks of its base for it
            compared.add(cell.id)
    for cell in cells:
        if ratios := paired(twins.get(cell.id, []), own.get(cell.id, [])).ratios:
            _raise(needed, _users(cell), needed_for(ratios))
        if cell.id not in compared:
            speeds = {row.block: float(row.throughput_per_s) for row in own.get(cell.id, [])}
            _raise(needed, {cell.id}, needed_for([*speeds.values()]))
    return needed


def _raise(needed: dict[str, int], cell_ids: Iterable[str], blocks: int) -> None:
    for cell_id in cell_ids:
        needed[cell_id] = max(needed.get(cell_id, 0), blocks)


def _users(cell: Cell) -> set[str]:
    """Return the ids of the cells that are measured as long as this one is: itself, its base, those that explain it."""
    if not comparable(cell):
        return {cell.id}
    return {one.id for one in (cell, base_cell(cell), single_device_cell(cell), wrapped_single_device_cell(cell))}
