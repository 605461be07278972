"""The options that may make a cell faster, and the experiment files that try some and confirm one."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from harness.analysis.common import axis_value
from harness.analysis.verdict.rules import HOST, SAVED
from harness.config.axes import batch_axis
from harness.config.experiment import Experiment
from harness.config.values import PlainValue
from harness.plan.planner import least_warmup_s
from harness.report.causes import (
    ACCUMULATION,
    ADVICE,
    BUCKETS,
    COMPILE,
    COMPRESSION,
    GRAPHS,
    OF_OTHER_CELLS,
    Option,
    grid_of,
    is_automatic,
    options_in,
    pinned,
)
from harness.report.row import Row, number
from harness.report.sentence import Context

Changes = Mapping[str, PlainValue]
"""The values of a candidate by axis, if they differ from the values of the cell that is improved."""
PRECISION = Option("precision", ("fp32", "bf16"))
OF_STRATEGIES = (
    Option("ddp.find_unused_parameters", (True, False)),
    Option("ddp.gradient_as_bucket_view", (False, True)),
    BUCKETS,
    *ADVICE["shard copies"],
)
"""What a strategy can do otherwise without a change of what is trained. A step that needs it the other way fails."""
ALLOWED_BY: Mapping[str, str] = {
    COMPILE.axis: "compile",
    GRAPHS.axis: "compile",
    COMPRESSION.axis: "precision",
    PRECISION.axis: "precision",
    "per_device_batch_size": "batch",
    "global_batch_size": "batch",
}
"""By axis that changes what is trained, or its numbers, the word of ``improve.allow`` without which it is not tried."""
NEVER = frozenset(
    {
        *("strategy", "ddp.broadcast_buffers", ("ddp.find_unused_parameters", True)),
        *(("precision", "fp32"), ("compile", False)),
    }
)
"""What the grid compares, what changes the statistics of a batch norm, and what only costs."""


def candidates(cell_id: str, context: Context, allow: Collection[str] = ()) -> list[Changes]:
    """Return what may make a cell of a run faster, one change each, the most likely first.

    What reduces the parts of its step that take time, the largest part first; then what its strategy can do otherwise,
    accumulation that the file asks for, and what ``allow`` names.
    """
    row = context.cells[cell_id]
    causes = [cause for cause in context.causes.get(cell_id, ()) if cause.code != SAVED]
    advised = [option for cause in causes for option in ADVICE.get(str(cause.subject), ())]
    if any(cause.subject == "waiting for data" for cause in causes) and axis_value(row, "loader.workers"):
        advised.append(Option("loader.prefetch_factor", (2, 4, 8)))
    # the same batch in one pass
    once = [] if is_automatic(row) else [Option(ACCUMULATION.axis, (1, axis_value(row, ACCUMULATION.axis)))]
    offered = options_in([*advised, *OF_STRATEGIES, *once, COMPILE, COMPRESSION, PRECISION], cell_id, context)
    batch = batch_axis(row.scaling)
    offered.append(Option(batch, (2 * row[batch],)))
    found = [
        {option.axis: value}
        for option in offered
        if ALLOWED_BY.get(option.axis, "") in ("", *allow)
        for value in option.values
        if value != axis_value(row, option.axis) and not {option.axis, (option.axis, value)} & NEVER
    ]
    return [change for at, change in enumerate(found) if change not in found[:at]]


def combined(helped: Sequence[Changes]) -> list[Changes]:
    """Return the combinations of the first two, three, ... of some changes, at most one of each axis."""
    by_axis: dict[str, PlainValue] = {}
    found: list[Changes] = []
    for change in helped:
        by_axis = {**change, **by_axis}
        if len(by_axis) > max(1, len(found[-1]) if found else 1):
            found.append(by_axis)
    return found


def experiment_of(
    experiment: Experiment,
    name: str,
    cells: Sequence[tuple[Row, Changes]],
    blocks: int,
    shorter: float,
    *,
    proves: bool,
) -> dict[str, object]:
    """Return the content of an experiment file that times some cells of a run, each with changes.

    ``shorter``: the length of warm-up and windows as a share of the run's. ``proves``: whether the cells are explained,
    and checked for equivalence. No cell is measured twice in a block.
    """
    row, timed = cells[0][0], experiment.throughput
    assert timed is not None  # an experiment with improve has the section
    settings = {**experiment.model_dump(mode="json"), **pinned(row, experiment)}
    warmup_s = timed.warmup_seconds if timed.warmup_seconds is not None else least_warmup_s(timed, row.device)
    grids = [{**grid_of(row, experiment), **changes} for row, changes in cells]
    return {
        **{name: value for name, value in settings.items() if name not in OF_OTHER_CELLS},
        "name": name,
        "cells": [grid for at, grid in enumerate(grids) if grid not in grids[:at]],
        "launcher": [row.launcher],
        "throughput": {
            **settings["throughput"],
            **{part: max(2, round(shorter * getattr(timed, part))) for part in ("warmup_steps", "window_steps")},
            "warmup_seconds": shorter * warmup_s,
            "window_seconds": shorter * timed.window_seconds,
            "blocks": blocks,
            "twin": False,
            "explain": proves,
            "traces": False,
            "links_seconds": 0,
        },
        "equivalence": proves and experiment.equivalence,
    }


def best_cell(context: Context) -> str | None:
    """Return the leading cell that loses the largest share of its step; None if no cell leads."""
    leading = [str(one.cell_id) for one in context.stated("fastest")]

    def lost(cell_id: str) -> float:
        parts = (one for one in context.causes.get(cell_id, ()) if one.subject != HOST)  # which may be in the others
        return sum(max(number(one.facts.share), 0.0) for one in parts)

    return max(leading, key=lost, default=None)
