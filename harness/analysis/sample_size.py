"""Stein's two-stage sample size: the number of blocks of each cell, determined once by its pilot blocks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from harness.analysis.common import Lines
from harness.analysis.stats import stein_blocks
from harness.analysis.trials import throughput
from harness.config.sections import BlockRule
from harness.plan.comparison import base_cell, comparable, single_device_cell, wrapped_single_device_cell
from harness.plan.trial import Trial


def needed_blocks(trials: Iterable[Trial], lines: Lines, rule: BlockRule) -> dict[str, int]:
    """Return the number of blocks by cell id, from the recorded trials of the first ``at_least`` blocks.

    It follows from the spread of a cell's ratio to its base; for a cell without a base that is no base itself,
    from the spread of its throughput. A base, and the cells that explain a cell, have as many blocks as the cell
    that needs most.
    """
    pilot = _pilot(lines, rule.at_least)
    cells = {trial.cell for trial in trials if trial.kind == "throughput"}
    needed: dict[str, int] = {}
    for cell in cells:
        base = base_cell(cell) if comparable(cell) else cell
        ratios = _ratios(pilot.get(cell.id, {}), pilot.get(base.id, {}))
        if base != cell and not ratios:
            needed[cell.id] = max(needed.get(cell.id, 0), rule.at_most)  # no more blocks of its base for it
        elif base != cell:
            blocks = _needed(ratios, rule)
            for user in (cell, base, single_device_cell(cell), wrapped_single_device_cell(cell)):
                needed[user.id] = max(needed.get(user.id, rule.at_least), blocks)
    for cell in cells:
        if cell.id not in needed:
            needed[cell.id] = _needed(_ratios(pilot.get(cell.id, {}), None), rule)
    return needed


def _needed(pilot: Sequence[float], rule: BlockRule) -> int:
    """Return the number of blocks for a pilot; the maximum if the pilot has fewer than two values."""
    return min(rule.at_most, stein_blocks(pilot, rule.halfwidth)) if len(pilot) >= 2 else rule.at_most


def _pilot(lines: Lines, blocks: int) -> dict[str, dict[tuple[int, int], float]]:
    """Return the throughput of each cell by block and invocation, in the first ``blocks`` blocks."""
    speeds: dict[str, dict[tuple[int, int], float]] = {}
    for line in lines:
        if line["kind"] == "throughput" and line["outcome"] == "ok" and line["block"] < blocks:
            speed = throughput(line["windows"])
            if speed:
                speeds.setdefault(line["cell_id"], {})[line["block"], line["invocation"]] = speed
    return speeds


def _ratios(speeds: Mapping[tuple[int, int], float], bases: Mapping[tuple[int, int], float] | None) -> list[float]:
    """Return one value a block: the ratio to the base of the same invocation or, without bases, the speed itself."""
    by_block: dict[int, float] = {}
    for (block, invocation), speed in sorted(speeds.items()):
        if bases is None:
            by_block[block] = speed
        elif (block, invocation) in bases:
            by_block[block] = speed / bases[block, invocation]
    return list(by_block.values())
