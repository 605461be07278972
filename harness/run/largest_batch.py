"""``per_device_batch_size: max``: the largest batch of a device that trains, found before a run."""

from __future__ import annotations

import hashlib
import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from harness.analysis.results import load
from harness.config.axes import BATCHES
from harness.config.experiment import Experiment
from harness.config.sections import ACCUMULATION, AUTO, Grid
from harness.config.values import MAX_BATCH, as_axis
from harness.errors import ClusterError, ExperimentError
from harness.plan.cell import MEASURES
from harness.plan.memory_forecast import available
from harness.plan.planner import Plan
from harness.record.folder import RunFolder
from harness.report.causes import OF_OTHER_CELLS, grid_of
from harness.report.row import Row, plural, rows_of
from harness.run.events import Emit, Note
from harness.run.pipeline import run
from harness.run.prepare import check_runnable, prepare
from harness.run.provenance import MOST_FILES
from harness.run.request import AUTO as NEWEST
from harness.run.request import Request, check_output
from harness.system.files import code_hash, package_version, replace_text, writing
from harness.system.process import INTERRUPTED, UNSETTLED

Content = dict[str, Any]
"""The content of an experiment file, or of one of its grids."""
NAME = "largest_batch"
FIRST, GROWTH, MOST_GROWTH = 8, 4, 16
"""The first batch of a device; by how much the second, and any further one, may be larger than one that fits."""
STEP = 8
"""Batches of at least twice this are multiples of it, as matrix units prefer."""
SHARE = 0.9
"""The largest peak, as a share of a device's memory."""
NAMED = ("model", "strategy", "devices", "precision")
"""The axes by which a message names a cell."""
CLOSE = 0.03
"""The search ends at this share below the limit, or below a batch that fails."""
MOST_ROUNDS = 12
ROUND: Mapping[str, float | bool] = {
    "blocks": 1,
    "warmup_steps": 5,
    "warmup_rounds": 2,
    "warmup_seconds": 0.0,
    "windows": 1,
    "window_steps": 10,
    "window_seconds": 0.0,
    "twin": False,
    "explain": False,
    "links_seconds": 0.0,
}
"""The throughput section of a round, of 20 steps: two rounds of warm-up and a window."""
APART = frozenset(
    {*OF_OTHER_CELLS - {"grid", "cells", "exclude"}, "throughput", "equivalence", "preflight", "limits", "effort"}
    | {"cost", "cluster", "hardware", "allow"}
)
"""The sections on which a largest batch does not depend; of hardware its memory alone is known to matter."""


@dataclass
class Search:
    """The search for the largest batch of a device at which a cell trains below a limit of memory.

    ``cell``: its grid without a batch. ``unit``: what a batch is a multiple of, its micro-batches. ``fits``, ``fails``:
    the largest batch that trained below the limit, the smallest that did not. ``peaks``: bytes by batch, of those that
    trained. ``ended``: why the search ended, if a batch failed for another reason than memory.
    """

    cell: Content
    unit: int = 1
    fits: int = 0
    fails: int | None = None
    peaks: dict[int, int] = field(default_factory=dict)
    ended: str = ""

    def add(self, batch: int, peak: int | None, limit: float, outcome: str = "ok") -> None:
        """Add the outcome of a batch, and its peak in bytes if it trained."""
        if peak is not None:
            self.peaks[batch] = peak
        if peak is not None and peak <= limit:
            self.fits = max(self.fits, batch)
        elif peak is not None or outcome == "oom":
            self.fails = min(batch, self.fails or batch)
        else:
            self.ended = f"batch {batch} ended with {outcome}"

    def next_batch(self, limit: float) -> int | None:
        """Return the batch to try next; None if the largest is known, or if not even one sample fits.

        Peaks grow by a constant amount a sample, so that the first and the last forecast the largest batch; between one
        that fits and one that fails it is bisected if the forecast is not between them.
        """
        if self.ended or self.fits == MAX_BATCH or self.fails == self.unit:
            return None
        if not self.fits:
            return max(1, self.fails // GROWTH // self.unit) * self.unit if self.fails else first_batch(self.unit)
        step = self.unit * (STEP if self.fits >= 2 * STEP * self.unit else 1)
        if self.fails is not None and self.fails - self.fits <= max(step, CLOSE * self.fits):
            return None
        if self.peaks[self.fits] >= (1 - CLOSE) * limit:
            return None
        guess, (one, *_, two) = self.fits * GROWTH, [*sorted(self.peaks), max(self.peaks)]
        if self.peaks[two] > self.peaks[one]:
            rate = (self.peaks[two] - self.peaks[one]) / (two - one)
            guess = min(int(one + (limit - self.peaks[one]) / rate), self.fits * MOST_GROWTH)
        guess = min(guess, MAX_BATCH) // step * step
        if self.fails is None:
            return guess if guess > self.fits else None
        middle = max((self.fits + self.fails) // 2 // step * step, self.fits + self.unit)
        return guess if self.fits < guess < self.fails else middle

    def sentence(self, limit: float) -> str:
        """Return what was found."""
        which = " ".join(str(self.cell[axis][0]) for axis in NAMED if axis in self.cell)
        if not self.fits:
            why = self.ended or f"not even {plural(self.unit, 'sample')} a device trains in {limit / 1e9:.3g} GB"
            return f"max of {which}: {why}; the run has it at batch {self.batch}."
        tried = ", ".join(map(str, sorted({*self.peaks, *([self.fails] if self.fails else [])})))
        peak = f"{self.peaks[self.fits] / 1e9:.3g} of {limit / 1e9:.3g} GB that may be used"
        ended = f"; {self.ended}, which ended the search" * bool(self.ended)
        return f"max of {which}: {self.fits} a device ({peak}; tried {tried}{ended})."

    @property
    def batch(self) -> int:
        """The batch of the run: the largest that fits or, without one, the smallest that there is."""
        return self.fits or (first_batch(self.unit) if self.ended else self.unit)


def first_batch(unit: int) -> int:
    """Return FIRST, or the next multiple of the micro-batches of a step."""
    return -(-FIRST // unit) * unit


def with_largest_batches(request: Request, experiment: Experiment, emit: Emit, *, search: bool) -> Experiment:
    """Return the experiment with numbers in place of ``max``: of the resumed run, an earlier search, or a new one.

    ``search``: whether a new one is made; else the first batch stands for it, for a plan. Raises ExperimentError if the
    memory of a device is not known, ClusterError if no cell can run here, what ``run`` raises, and KeyboardInterrupt.
    """
    if not experiment.seeks_batches:
        return experiment
    if request.resume not in (None, NEWEST) and request.resume.is_dir():
        folder = RunFolder.open(request.resume)
        if folder.given(request.home).grids == experiment.grids:
            return _of_grids(experiment, folder.experiment().grids)
    stand_in = _of_grids(experiment, [_with(grid, _first(experiment, grid)) for grid in experiment.grids])
    with ExitStack() as stack:
        plan = prepare(replace(request, resume=None, only={}), stand_in, stack, emit).plan
    path, key = request.output / experiment.name / f"{NAME}.json", _key(request, experiment, plan)
    found = _read(path, key)
    if found is None and not search:
        emit(Note(f"max: found when the run begins; planned as a batch of about {FIRST} a device."))
        return stand_in
    if found is None:
        check_runnable(request, plan)
        check_output(request)
        with writing(path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
        found, is_whole = _found(request, experiment, _limit(request, plan), emit)
        if is_whole:  # else the next run searches again
            replace_text(path, json.dumps({"key": key, "cells": found}, indent=1))
    else:
        emit(Note(f"max: as found by an earlier search, in {path}; remove it to search again."))
    given = [grid for grid in experiment.grids if grid.per_device_batch_size or not grid.seeks_max]
    numbers = [grid.model_copy(update={"seeks_max": False}) for grid in given]
    return _of_grids(experiment, [*numbers, *map(Grid.model_validate, found)])


def _key(request: Request, experiment: Experiment, plan: Plan) -> str:
    """Return a hash of what a largest batch depends on: the cells, the machine, and the user's code."""
    code = code_hash(request.home, most=MOST_FILES) if experiment.own_modules else None
    nodes = [(node.shape, node.gpu_memory_bytes) for node in plan.inventory.nodes]
    content = experiment.model_dump(mode="json", exclude={*APART})
    versions = [MEASURES, package_version("torch")]
    whole = [content, experiment.hardware.memory_gb, sorted(map(repr, nodes)), code, versions, request.inline]
    return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()[:16]


def _read(path: Path, key: str) -> list[Content] | None:
    with suppress(OSError, ValueError, KeyError, TypeError):
        kept = json.loads(path.read_text(encoding="utf-8"))
        if kept["key"] == key:
            for cell in kept["cells"]:
                Grid.model_validate(cell)
            return [dict(cell) for cell in kept["cells"]]
    return None


def _first(experiment: Experiment, grid: Grid) -> int:
    """Return the first batch of a grid, which every number of micro-batches divides."""
    given = grid.options.get(ACCUMULATION, experiment.training.accumulation)
    return first_batch(math.lcm(*(int(str(parts)) for parts in as_axis(given) if parts != AUTO)))


def _of_grids(experiment: Experiment, grids: Sequence[Grid]) -> Experiment:
    return experiment.model_copy(update={"grid": None, "cells": tuple(grids)})


def _with(grid: Grid, batch: int) -> Grid:
    """Return a grid with a number in place of ``max``."""
    batches = (*(grid.per_device_batch_size or ()), *((batch,) if grid.seeks_max else ()))
    return grid.model_copy(update={"per_device_batch_size": batches or None, "seeks_max": False})


def _found(request: Request, experiment: Experiment, limit: float, emit: Emit) -> tuple[list[Content], bool]:
    """Search; return a grid for each cell with its batch, and whether no search was cut short by a failure.

    A cell that cannot run here keeps the first batch.
    """
    found: list[Content] = []
    is_whole = True
    for grid in (grid for grid in experiment.grids if grid.seeks_max):
        total = grid.global_batch_size
        options = {name: value for name, value in grid.options.items() if name != ACCUMULATION or not total}
        without = {"per_device_batch_size": None, "global_batch_size": None, "options": options}
        first = _first(experiment, grid)
        cells = [_with(grid.model_copy(update=without), first).model_dump(mode="json")]
        searches: dict[str, Search] = {}
        skipped: dict[str, Content] = {}
        for number in range(MOST_ROUNDS):
            tried = ", ".join(str(cell["per_device_batch_size"][0]) for cell in cells)
            emit(Note(f"max, round {number + 1}: 20 steps at a batch of {tried} a device."))
            rows = _round(request, _content(experiment, cells, one_pass=bool(total)))
            for row, peak in {row.trial_id: (row, peak) for row, peak in rows}.values():  # the last attempt
                cell = grid_of(row, experiment)
                (batch,) = cell.pop("per_device_batch_size")
                key = json.dumps(cell, sort_keys=True)
                if row.outcome == "skipped" and key not in searches:
                    skipped[key] = {**cell, "per_device_batch_size": [batch]}
                    continue
                unit = int(row.options.get(ACCUMULATION, 1))
                searches.setdefault(key, Search(cell, unit)).add(int(str(batch)), peak, limit, row.outcome)
            batches = [(one, one.next_batch(limit)) for one in searches.values()]
            cells = [{**one.cell, "per_device_batch_size": [batch]} for one, batch in batches if batch]
            if not cells:
                break
        for one in searches.values():
            emit(Note(one.sentence(limit)))
            is_whole = is_whole and not one.ended
        known = [{**one.cell, "per_device_batch_size": [one.batch]} for one in searches.values()]
        kept = {"global_batch_size": total, ACCUMULATION: AUTO} if total else {}
        found += [{**cell, **kept} for cell in (*known, *skipped.values())]
    return found, is_whole


def _content(experiment: Experiment, cells: Sequence[Content], *, one_pass: bool = False) -> Content:
    """Return the content of the file of a round; ``one_pass``: without micro-batches.

    A rule of ``exclude`` that names a batch is for batches that are known.
    """
    settings = experiment.model_dump(mode="json")
    return {
        **{name: value for name, value in settings.items() if name not in OF_OTHER_CELLS},
        "name": NAME,
        "cells": list(cells),
        "exclude": [rule for rule in settings["exclude"] if not {*rule} & {*BATCHES}],
        "training": {**settings["training"], **({"accumulation": [1]} if one_pass else {})},
        "launcher": settings["launcher"][:1],
        "throughput": ROUND,
        "equivalence": False,
        "limits": {name: settings["limits"][name] for name in ("trial", "attempts")},
    }


def _limit(request: Request, plan: Plan) -> float:
    """Return the bytes that a rank may use of its device. Raises ExperimentError if its memory is not known."""
    cell, gb = plan.trials[0].cell, plan.experiment.hardware.memory_gb
    memory = gb * 1e9 if gb else None if cell.device == "cpu" else available(cell, plan.inventory)
    if memory is None:
        what = "of one rank's process" if cell.device == "cpu" else "of a GPU, which the driver does not report"
        raise ExperimentError(
            str(request.file), [f"per_device_batch_size: max needs hardware.memory_gb, the memory {what}, as 8"]
        )
    return SHARE * memory


def _round(request: Request, content: Content) -> list[tuple[Row, int | None]]:
    """Train each cell for some steps; return its row, and the largest peak of its ranks if it trained, in bytes."""
    with tempfile.TemporaryDirectory(prefix="harness-") as output:
        asked, experiment = request.inside(content, NAME, output=Path(output), bases=False)
        if run(asked, experiment, lambda event: None) in (INTERRUPTED, UNSETTLED):
            raise KeyboardInterrupt
        (folder,) = Path(output, NAME).iterdir()
        results = load(folder)
        if not results.lines:
            raise ClusterError("max: a round ended before it trained anything; try it as a run with a number: batch 8")
        used = results.ranks["peak_reserved_bytes"].fillna(results.ranks["peak_memory_bytes"])
        peaks = used.groupby(results.ranks["trial_id"]).max()
        return [(row, int(peaks[row.trial_id]) if row.outcome == "ok" else None) for row in rows_of(results.trials)]
