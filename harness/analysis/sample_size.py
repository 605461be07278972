"""Stein's two-stage sample size: the number of blocks of each cell, determined once by its pilot blocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from harness.analysis.common import Lines, Record, throughput
from harness.analysis.ratios import paired
from harness.analysis.stats import stein_blocks
from harness.config.axes import SIZES
from harness.config.sections import BlockRule
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

TWIN = "twin"


def needed_blocks(
    trials: Iterable[Trial], lines: Lines, rule: BlockRule, placements: Sequence[str] = ()
) -> dict[str, int]:
    """Return the number of blocks by cell id, from the recorded trials of the first ``at_least`` blocks.

    It follows from the spread of every ratio in which the cell appears: to its base, to a cell that differs in one
    axis, to the same cell under another launcher, to its twin. For a cell that is compared with no other cell it
    follows from the spread of its throughput as well. A base, and the cells that explain a cell, have as many blocks
    as the cell that needs most. ``placements``: the order of device_ids, as the experiment file has it.
    """
    pilot: dict[tuple[str, str], list[Record]] = {}  # by cell id and purpose ('' or 'twin')
    for line in lines:
        timed = line["kind"] == "throughput" or line["purpose"] == TWIN
        in_pilot = timed and line["outcome"] == "ok" and line["block"] < rule.at_least
        if in_pilot and (speed := throughput(line["windows"])):
            known = {"environment": None, "device_model": None, **line, "throughput_per_s": speed}
            pilot.setdefault((line["cell_id"], line["purpose"]), []).append(Record(known))
    cells = {trial.cell for trial in trials if trial.kind == "throughput"}
    needed: dict[str, int] = {}
    compared: set[str] = set()
    based = [(cell, base) for cell in cells if comparable(cell) and (base := base_cell(cell)) != cell]
    for cell, other in [*based, *_other_pairs(cells, pilot, placements)]:
        ratios = paired(pilot.get((cell.id, ""), []), pilot.get((other.id, ""), [])).ratios
        if ratios:
            compared |= {cell.id, other.id}
            _raise(needed, _users(cell) | _users(other), _needed(ratios, rule))
        else:
            needed[cell.id] = rule.at_most  # no more blocks of its base for it
            compared.add(cell.id)
    for cell in cells:
        own = pilot.get((cell.id, ""), [])
        if ratios := paired(pilot.get((cell.id, TWIN), []), own).ratios:
            _raise(needed, _users(cell), _needed(ratios, rule))
        if cell.id not in compared:
            speeds = {row.block: float(row.throughput_per_s) for row in own}
            _raise(needed, {cell.id}, _needed([*speeds.values()], rule))
    return needed


def _raise(needed: dict[str, int], cell_ids: Iterable[str], blocks: int) -> None:
    for cell_id in cell_ids:
        needed[cell_id] = max(needed.get(cell_id, 0), blocks)


def _other_pairs(
    cells: set[Cell], pilot: Mapping[tuple[str, str], Sequence[Record]], placements: Sequence[str]
) -> Iterator[tuple[Cell, Cell]]:
    """Yield the pairs of the tables versus and parity that have blocks of the pilot in common."""
    measured = [cell for cell in cells if pilot.get((cell.id, ""))]
    along = axis_pairs(((axes_of(cell), cell) for cell in measured), placements)
    pairs = [(pair.one, pair.other) for pair in along if pair.axis not in SIZES]
    pairs += [(cell, other) for cell in measured for other in other_launcher_cells(cell) if other in cells]
    for cell, other in pairs:
        if paired(pilot[cell.id, ""], pilot.get((other.id, ""), [])).ratios:
            yield cell, other


def _users(cell: Cell) -> set[str]:
    """Return the ids of the cells that are measured as long as this one is: itself, its base, those that explain it."""
    if not comparable(cell):
        return {cell.id}
    return {one.id for one in (cell, base_cell(cell), single_device_cell(cell), wrapped_single_device_cell(cell))}


def _needed(pilot: Sequence[float], rule: BlockRule) -> int:
    """Return the number of blocks for a pilot; the maximum if the pilot has fewer than two values."""
    return min(rule.at_most, stein_blocks(pilot, rule.halfwidth)) if len(pilot) >= 2 else rule.at_most
