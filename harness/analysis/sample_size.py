"""The number of blocks of each cell: by the spread of its pilot blocks (Stein), or by looks at its comparisons."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import pandas as pd

from harness.analysis.common import Lines, Records, by_cell, measured, rows_of, throughput
from harness.analysis.ratios import paired, with_twins
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
PAIRED = (
    *("cell_id", "kind", "purpose", "outcome", "inline"),
    *("block", "invocation", "environment", "device_model"),
)
"""The columns of a trial, beside its throughput, that its pairs are made from."""


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

    timed = (line for line in lines if line["block"] is not None and line["block"] < criterion.pilot)
    rows = [
        {**dict.fromkeys(PAIRED), **{name: line[name] for name in PAIRED if name in line}, "throughput_per_s": speed}
        for line in timed
        if (speed := throughput(line["windows"]))
    ]
    frame = pd.DataFrame(rows, columns=[*PAIRED, "throughput_per_s"])
    own, twins, means = (by_cell(rows_of(of)) for of in (measured(frame), measured(frame, TWIN), with_twins(frame)))
    cells = {trial.cell for trial in trials if trial.kind == "throughput"}
    needed: dict[str, int] = {}
    compared: set[str] = set()
    based = [(cell, base) for cell in cells if comparable(cell) and (base := base_cell(cell)) != cell]
    for cell, other in [*based, *_other_pairs(cells, own, placements)]:
        ratios = paired(means.get(cell.id, []), means.get(other.id, [])).ratios
        if ratios:
            compared |= {cell.id, other.id}
            _raise(needed, _users(cell) | _users(other), needed_for(ratios, criterion.of_ratios))
        else:
            needed[cell.id] = criterion.most  # no more blocks of its base for it
            compared.add(cell.id)
    for cell in cells:
        if ratios := paired(twins.get(cell.id, []), own.get(cell.id, [])).ratios:
            _raise(needed, _users(cell), needed_for(ratios, criterion.of_others))
        if cell.id not in compared:
            speeds = {row.block: float(row.throughput_per_s) for row in own.get(cell.id, [])}
            _raise(needed, {cell.id}, needed_for([*speeds.values()], criterion.of_others))
    return needed


def _raise(needed: dict[str, int], cell_ids: Iterable[str], blocks: int) -> None:
    for cell_id in cell_ids:
        needed[cell_id] = max(needed.get(cell_id, 0), blocks)


def _other_pairs(
    cells: set[Cell], own: Mapping[str, Records], placements: Sequence[str]
) -> Iterator[tuple[Cell, Cell]]:
    """Yield the pairs of the tables versus and parity that have blocks of the pilot in common."""
    known = [cell for cell in cells if cell.id in own]
    along = axis_pairs(((axes_of(cell), cell) for cell in known), placements)
    pairs = [(pair.one, pair.other) for pair in along if pair.axis not in SIZES]
    pairs += [(cell, other) for cell in known for other in other_launcher_cells(cell) if other in cells]
    for cell, other in pairs:
        if paired(own[cell.id], own.get(other.id, [])).ratios:
            yield cell, other


def _users(cell: Cell) -> set[str]:
    """Return the ids of the cells that are measured as long as this one is: itself, its base, those that explain it."""
    if not comparable(cell):
        return {cell.id}
    return {one.id for one in (cell, base_cell(cell), single_device_cell(cell), wrapped_single_device_cell(cell))}
