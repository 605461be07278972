"""The number of blocks of each cell: by the spread of its pilot blocks (Stein), or by looks at its comparisons."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from harness.analysis.common import Lines, Record, throughput
from harness.analysis.ratios import paired
from harness.analysis.stats import is_decided, stein_blocks
from harness.config.axes import SIZES
from harness.config.sections import LOOKS, BlockRule
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


class Criterion(NamedTuple):
    """How the first ``pilot`` blocks determine the number of blocks, at most ``most``.

    ``of_ratios``: of a comparison's ratios. ``of_others``: of the ratios of base and twin, and of the speeds of a cell
    that is compared with no other. Both get at least two values.
    """

    pilot: int
    most: int
    of_ratios: Callable[[Sequence[float]], int]
    of_others: Callable[[Sequence[float]], int]


def by_spread(rule: BlockRule) -> Criterion:
    """Return the criterion of a rule: as many blocks as intervals of its half-width need (Stein)."""

    def blocks(values: Sequence[float]) -> int:
        return min(rule.at_most, stein_blocks(values, rule.halfwidth))

    return Criterion(rule.at_least, rule.at_most, blocks, blocks)


def look_at(look: int) -> Criterion:
    """Return the criterion of a look of ``blocks: decide``: no further blocks for comparisons that are decided."""
    return Criterion(look, LOOKS[-1], lambda ratios: look if is_decided(ratios) else LOOKS[-1], lambda _: look)


def needed_blocks(
    trials: Iterable[Trial], lines: Lines, criterion: Criterion, placements: Sequence[str] = ()
) -> dict[str, int]:
    """Return the number of blocks by cell id, from the recorded trials of the criterion's first blocks.

    It follows from every ratio in which the cell appears: to its base, to a cell that differs in one axis, to the same
    cell under another launcher, to its twin. For a cell that is compared with no other cell it follows from its
    throughput as well. A base, and the cells that explain a cell, have as many blocks as the cell that needs most.
    ``placements``: the order of device_ids, as the experiment file has it.
    """

    def needed_for(values: Sequence[float], of: Callable[[Sequence[float]], int]) -> int:
        return of(values) if len(values) >= 2 else criterion.most

    pilot: dict[tuple[str, str], list[Record]] = {}  # by cell id and purpose ('' or 'twin')
    for line in lines:
        timed = line["kind"] == "throughput" or line["purpose"] == TWIN
        in_pilot = timed and line["outcome"] == "ok" and line["block"] < criterion.pilot
        if in_pilot and (speed := throughput(line["windows"])):
            known = {"environment": None, "device_model": None, **line, "throughput_per_s": speed}
            pilot.setdefault((line["cell_id"], line["purpose"]), []).append(Record(known))
    timed_rows = {cell: rows for (cell, purpose), rows in pilot.items() if not purpose}
    means = {cell: _with_twins(rows, pilot.get((cell, TWIN), [])) for cell, rows in timed_rows.items()}
    cells = {trial.cell for trial in trials if trial.kind == "throughput"}
    needed: dict[str, int] = {}
    compared: set[str] = set()
    based = [(cell, base) for cell in cells if comparable(cell) and (base := base_cell(cell)) != cell]
    for cell, other in [*based, *_other_pairs(cells, pilot, placements)]:
        ratios = paired(means.get(cell.id, []), means.get(other.id, [])).ratios
        if ratios:
            compared |= {cell.id, other.id}
            _raise(needed, _users(cell) | _users(other), needed_for(ratios, criterion.of_ratios))
        else:
            needed[cell.id] = criterion.most  # no more blocks of its base for it
            compared.add(cell.id)
    for cell in cells:
        own = pilot.get((cell.id, ""), [])
        if ratios := paired(pilot.get((cell.id, TWIN), []), own).ratios:
            _raise(needed, _users(cell), needed_for(ratios, criterion.of_others))
        if cell.id not in compared:
            speeds = {row.block: float(row.throughput_per_s) for row in own}
            _raise(needed, {cell.id}, needed_for([*speeds.values()], criterion.of_others))
    return needed


def _with_twins(rows: Sequence[Record], twins: Sequence[Record]) -> list[Record]:
    """Return a base's rows with the mean of both measurements of a block, as ratios.with_twins has them."""

    def place(row: Record) -> tuple[object, ...]:
        return row.block, row.invocation, row.device_model

    second = {place(row): float(row.throughput_per_s) for row in twins}
    both = ((row, float(row.throughput_per_s), second.get(place(row))) for row in rows)
    return [Record({**vars(row), "throughput_per_s": math.sqrt(own * (other or own))}) for row, own, other in both]


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
