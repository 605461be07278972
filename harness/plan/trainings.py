"""The cells that are trained to convergence, and why these: named ones, or each strategy on its most devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from harness.config.sections import Convergence
from harness.config.strategy_traits import BUILTIN_TRAITS
from harness.errors import ExperimentError
from harness.plan.cell import Cell
from harness.plan.comparison import base_cell, base_cells
from harness.plan.feasibility import reason_to_skip
from harness.plan.inventory import Machine
from harness.plan.trial import Trial


def convergence_trials(asked: Sequence[Cell], settings: Convergence, machine: Machine) -> list[Trial]:
    """Return one trial a cell and seed, under Ray if the grid has it; the k-th seed runs in block k.

    Raise ExperimentError if no cell, or none on one of the named device counts, is left.
    """
    chosen = [cell for cell in asked if cell.matches(settings.only)]
    if "launcher" not in settings.only:  # the launcher changes the speed, which is measured, not the curves
        chosen = [cell for cell in chosen if cell.launcher == "ray"] or chosen
    if not chosen:
        raise ExperimentError("convergence.only", [f"got {settings.only}; no cell of the grid matches"])
    _check_devices(chosen, settings)
    chosen = [as_trained(cell, settings) for cell in chosen]
    chosen = _chosen(chosen, settings, machine)
    if settings.global_batch_size:
        chosen = [as_trained(cell.at_global_batch_size(settings.global_batch_size), settings) for cell in chosen]
    cells = dict.fromkeys(chosen)
    bases = {**base_cells(chosen), **{base_cell(cell): None for cell in chosen if cell.uneven}}
    return [
        Trial(cell, "convergence", block, seed, added=cell not in cells)
        for block, seed in enumerate(settings.seeds)
        for cell in {**cells, **bases}
    ]


def as_trained(cell: Cell, settings: Convergence) -> Cell:
    """Return the cell with its flag ``uneven``: built-in strategies train on unequal shares if the file says so."""
    uneven = settings.uneven and cell.per_device_batch_size is None and cell.strategy in BUILTIN_TRAITS
    return replace(cell, uneven=uneven or None)


def why_trained(settings: Convergence) -> str:
    """Return the reason for the choice of cells, as the options of the file determine it."""
    named = [axis for axis in settings.only if axis != "devices"]
    rules = [f"cells that match convergence.only ({', '.join(named)})"] if named else []
    if settings.devices:
        rules.append(f"on the devices of convergence.devices, {', '.join(map(str, settings.devices))}")
    elif "devices" in settings.only:
        rules.append("on the devices of convergence.only")
    else:
        rules.append("each strategy on the most devices that it can have here")
    if settings.global_batch_size:
        rules.append("at convergence.global_batch_size")
    elif not _names_batch(settings):
        rules.append("at the first batch size of the grid")
    return f"{', '.join(rules)}; and the base of each"


def _check_devices(cells: Sequence[Cell], settings: Convergence) -> None:
    counts = sorted({cell.devices for cell in cells})
    absent = [count for count in settings.devices or () if count not in counts]
    if absent:
        allowed = ", ".join(map(str, counts))
        raise ExperimentError("convergence.devices", [f"got {', '.join(map(str, absent))}; allowed: {allowed}"])


def _check_batch(cells: Sequence[Cell], of_first: Sequence[Cell], settings: Convergence) -> None:
    """Raise ExperimentError unless each named device count has a cell of the first batch size."""
    without = sorted({cell.devices for cell in cells} - {cell.devices for cell in of_first})
    if settings.devices and without:
        raise ExperimentError(
            "convergence.devices",
            [
                f"got {', '.join(map(str, without))}, without a cell at the first batch size, {_batch(cells[0])}; give "
                "convergence.global_batch_size, or the batch sizes to train at in convergence.only"
            ],
        )


def _chosen(cells: Sequence[Cell], settings: Convergence, machine: Machine) -> list[Cell]:
    """Return the cells on the named device counts, else each strategy's largest that can run; of one batch size.

    Named ones that cannot run here become skipped rows with a reason. Raise ExperimentError if a named count has no
    cell of that batch.
    """
    if settings.devices:
        chosen = [cell for cell in cells if cell.devices in settings.devices]
    else:
        chosen = [cell for cell in cells if reason_to_skip(cell, machine) is None] or list(cells)
    if chosen and not (_names_batch(settings) or settings.global_batch_size):
        first = _batch(chosen[0])
        of_first = [cell for cell in chosen if _batch(cell) == first]
        _check_batch(chosen, of_first, settings)
        chosen = of_first
    if settings.devices is None and "devices" not in settings.only:
        most = {cell.strategy: 0 for cell in chosen}
        for cell in chosen:
            most[cell.strategy] = max(most[cell.strategy], cell.devices)
        chosen = [cell for cell in chosen if cell.devices == most[cell.strategy]]
    return chosen


def _names_batch(settings: Convergence) -> bool:
    return bool({"per_device_batch_size", "global_batch_size"} & settings.only.keys())


def _batch(cell: Cell) -> int | None:
    return cell.per_device_batch_size if cell.scaling == "weak" else cell.global_batch_size
