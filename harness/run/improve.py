"""``--improve``: options are tried on the best cell of a run, and what helps is confirmed in blocks of its own."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from harness.analysis.improvements import (
    COMBINATION,
    CONFIRMATION,
    CONFIRMING_BLOCKS,
    SCREENING,
    SCREENING_BLOCKS,
    changes_of,
)
from harness.analysis.results import IMPROVE_FOLDER, Results, improving_runs, load
from harness.config.experiment import Experiment
from harness.config.sections import Improve
from harness.errors import HarnessError
from harness.report.candidates import Changes, best_cell, candidates, combined, experiment_of
from harness.report.html import write_report
from harness.report.row import Row, plural, rows_of
from harness.report.sentence import Context
from harness.report.tables.text import duration
from harness.report.verdict import verdict_if_possible
from harness.run.events import (
    Emit,
    Event,
    GroupReady,
    GroupStarting,
    Note,
    Reported,
    RunStarted,
    TrialEnded,
    TrialStarting,
)
from harness.run.pipeline import SHOWN, run
from harness.run.request import Request, resume_command
from harness.system.process import INTERRUPTED, UNSETTLED

SHARE = {SCREENING: 0.35, COMBINATION: 0.5}
"""The share of the time after which a step starts no further trial; the confirmation has what is left."""
OF_TRIALS = 0.5
"""The share of a step's time for its trials; the rest is for starts of processes and for reports."""
OF_BLOCKS = 0.8
"""The share of a step's time that blocks as long as those of earlier steps may take."""
BLOCKS = {
    SCREENING: (SCREENING_BLOCKS, 6),
    COMBINATION: (SCREENING_BLOCKS, 6),
    CONFIRMATION: (CONFIRMING_BLOCKS + CONFIRMING_BLOCKS % 2, 12),
}
"""The fewest and the most blocks of a step, even numbers, of which each setting is before another in half.

An interval of 12 is half as wide as one of 5 (Student's t).
"""
SHORTEST = 0.1
"""The least time of a trial, as a share of that in the run: fewer candidates are tried instead."""
LEAST_S = 2.0
"""The seconds below which a step is not started."""
EXPLAINED = 3
"""The number of trials a block of a confirmation with bases and explaining trials, as a multiple of that without."""
SHOWN_EVENTS = (RunStarted, GroupStarting, GroupReady, TrialStarting, TrialEnded)


def run_and_improve(request: Request, experiment: Experiment, emit: Emit) -> int:
    """Run an experiment and then, if it asks for it, improve its best cell; return the exit code of the run.

    INTERRUPTED if the improvement is interrupted. Raises what ``run`` raises.
    """
    reported: list[Reported] = []

    def listen(event: Event) -> None:
        if isinstance(event, Reported):
            reported.append(event)
        emit(event)

    code = run(request, experiment, listen)
    if experiment.improve is None or not reported or code in (INTERRUPTED, UNSETTLED):
        return code
    results = load(reported[-1].folder)
    with results.folder.locked():
        return Improvement(request, experiment, experiment.improve, results, emit).run() or code


@dataclass
class Improvement:
    """The improvement of one cell of a run, whose steps are runs of their own in its folder."""

    request: Request
    experiment: Experiment
    settings: Improve
    results: Results
    emit: Emit

    def __post_init__(self) -> None:
        self._began = time.time()
        self._context = Context(self.results)
        self._asked: dict[str, list[dict[str, object]]] = {}  # by step, the settings of this call

    def run(self) -> int:
        """Try, combine and confirm; write the report again.

        Return INTERRUPTED, UNSETTLED if that would be repeated, or 0: the run itself is fine.
        """
        cell_id, why = best_cell(self._context), self._refusal()
        if why or cell_id is None:
            self.emit(Note(f"Nothing is improved: {why or 'no setting was measured that makes a claim about speed'}."))
            return 0
        self._cell_id, self._row = cell_id, self._context.cells[cell_id]
        try:
            code = self._steps()
            results = write_report(self.results.folder.path)
        except KeyboardInterrupt:
            code = INTERRUPTED
        except HarnessError as error:
            self.emit(Note(f"The improvement ended: {error}"))
            return 0
        if code:
            resume = resume_command(replace(self.request, improve=self.settings.time), self.results.folder.path)
            self.emit(Note(f"The improvement was interrupted; the run is complete. Go on with: {resume}"))
            return code
        tables, spent_s = {name: getattr(results, name) for name in SHOWN}, time.time() - self._began
        folder = results.folder
        self.emit(Reported(folder.path, folder.report, tables, verdict_if_possible(results), spent_s))
        return 0

    def _refusal(self) -> str:
        """Return why nothing more is measured; empty if there is no reason."""
        if any(one.code == "time_up" for one in self._context.stated("incomplete")):
            return "a limit has ended the run"
        return "; ".join(text for text, _ in self.experiment.against_improving)

    def _steps(self) -> int:
        """Measure the steps; return 0, or the exit code of the one that was interrupted."""
        name, tried = self._context.name(self._cell_id), self._candidates()
        if not tried:
            self.emit(Note(f"Nothing to try for {name}: no option reduces what takes time; improve.allow has more."))
            return 0
        most = duration(self.settings.time)
        self.emit(Note(f"Improve {name}: {plural(len(tried), 'option')} to try, about {most}."))
        if code := self._measure(SCREENING, tried):
            return code
        if (screened := self._run_of(SCREENING)) and not any(row.step == SCREENING for row in self._compared()):
            late = (screened.trials["skip_code"] == "time_up").any()
            why = "in the time there was; give --improve more" if late else "as it failed when it was measured again"
            self.emit(Note(f"Nothing was compared with {name} {why}."))
            return 0
        helped = self._kept(SCREENING)
        if several := combined(helped):
            if code := self._measure(COMBINATION, [helped[0], *several]):
                return code
            helped = self._kept(COMBINATION) or helped
        return self._measure(CONFIRMATION, helped[:1]) if helped else 0

    def _blocks(self, step: str, tried: Sequence[Changes]) -> int:
        """Return the number of blocks of a step for which there is time, by the worker groups of earlier steps.

        With windows as long as the run's, and in a confirmation with the trials that explain it. Fixed before any is
        measured: an interval needs no correction for it.
        """
        fewest, most = BLOCKS[step]
        runs = [run for cell_id, _, run in improving_runs(self.results.folder) if cell_id == self._cell_id]
        groups = [group for run in runs or [self.results] for group in run.environment["groups"]]
        group_s = max((group["whole_s"] for group in groups), default=math.inf)
        trials = (EXPLAINED if step == CONFIRMATION else 1) * (1 + len(tried))
        left_s = self._left_s(step)
        fits = min(OF_BLOCKS * left_s / group_s, OF_TRIALS * left_s / (trials * self._trial_s))
        return max(fewest, min(most, int(fits)) // 2 * 2)

    def _left_s(self, step: str) -> float:
        wall, invocations = self.experiment.limits.wall, self.results.environment.get("invocations", [])
        ends = invocations[-1]["started_at"] + wall if wall and invocations else math.inf
        return min(self._began + SHARE.get(step, 1.0) * self.settings.time, ends) - time.time()

    def _candidates(self) -> list[Changes]:
        """Return what there is time to try, the most likely first."""
        found = candidates(self._cell_id, self._context, self.settings.allow)
        trials = OF_TRIALS * SHARE[SCREENING] * self.settings.time / (SCREENING_BLOCKS * SHORTEST * self._trial_s)
        return found[: max(1, int(trials) - 1)]

    @property
    def _trial_s(self) -> float:
        """The time of a trial of the cell in the run."""
        lines = (line for line in self.results.lines if line["cell_id"] == self._cell_id and line["outcome"] == "ok")
        return max(median([line["trial_s"] or 0.0 for line in lines if line["kind"] == "throughput"]), 0.01)

    def _measure(self, step: str, tried: Sequence[Changes]) -> int:
        """Time the cell to improve beside the same cell with each of some changes.

        Return 0, or INTERRUPTED or UNSETTLED, as ``run`` does. A step of the same settings is kept if it is finished,
        and resumed if it is not.
        """
        left_s, blocks = self._left_s(step), self._blocks(step, tried)
        trial_s = OF_TRIALS * max(left_s, 0.0) / (blocks * (1 + len(tried)))
        proves = step == CONFIRMATION and EXPLAINED * self._trial_s <= trial_s
        cells: list[tuple[Row, Changes]] = [(self._row, {}), *((self._row, changes) for changes in tried)]
        if proves:  # for the waterfall before and after
            cells += self._bases(tried[0])
        shorter = min(1.0, max(trial_s / self._trial_s, SHORTEST))
        content = experiment_of(self.experiment, step, cells, blocks, shorter, proves=proves)
        wall = max(left_s, LEAST_S)  # of a trial too: one that hangs may not take more than the step
        asked, experiment = self.request.inside(
            {**content, "limits": {"wall": wall, "trial": min(self.experiment.limits.trial, wall), "attempts": 1}},
            step,
            output=self.results.folder.path / IMPROVE_FOLDER / self._cell_id,
            bases=proves,
        )
        self._asked[step] = _settings(experiment, tried)
        earlier = self._run_of(step)
        alike = earlier is not None and _settings(earlier.experiment, tried) == self._asked[step]
        if earlier and step == CONFIRMATION and not alike:  # of several, one would be claimed by chance more often
            self.emit(Note(f"Another setting was to be confirmed before, in {earlier.folder.path}: only the first is."))
            return 0
        if earlier and alike:
            if not earlier.folder.why_unfinished:
                self.emit(Note(f"{step.capitalize()}: already measured in {earlier.folder.path}."))
                return 0
            asked, kept = replace(asked, resume=earlier.folder.path), earlier.experiment
            as_before = {"cells": kept.cells, "throughput": kept.throughput, "equivalence": kept.equivalence}
            experiment = experiment.model_copy(update=as_before)
        if left_s < LEAST_S:
            self.emit(Note(f"{step.capitalize()}: no time is left; give --improve more."))
            return 0
        code = run(asked, experiment, lambda event: self.emit(event) if isinstance(event, SHOWN_EVENTS) else None)
        return code if code in (INTERRUPTED, UNSETTLED) else 0

    def _bases(self, changes: Changes) -> list[tuple[Row, Changes]]:
        """Return the base of the cell to improve, as it is and with the changes that a base can have."""
        ratio = self._context.ratio(self._cell_id)
        if ratio is None:
            return []
        base = self._context.cells[ratio.base_id]
        shared = {axis: value for axis, value in changes.items() if axis.partition(".")[0] != self._row.strategy}
        return [(base, {}), (base, shared)]

    def _kept(self, step: str) -> list[Changes]:
        """Return the changes of a step that went on, the fastest first."""
        found = self._run_of(step)
        asked = self._asked[step]
        if found and _settings(found.experiment, asked[1:]) != asked:  # of an earlier call, as no time was left
            return []
        known = {row.cell_id: row for row in rows_of(found.trials)} if found else {}
        kept = [row.cell_id for row in self._compared() if row.step == step and row.kept]
        return [changes_of(known[self._cell_id], known[cell_id]) for cell_id in kept]

    def _compared(self) -> list[Row]:
        """Return the rows of the table improvements on the cell to improve, computed anew."""
        rows = rows_of(Results(self.results.folder).improvements)
        return [row for row in rows if row.improved_id == self._cell_id]

    def _run_of(self, step: str) -> Results | None:
        """Return the newest run of a step of this improvement."""
        runs = improving_runs(self.results.folder)
        return next((run for cell_id, name, run in runs if (cell_id, name) == (self._cell_id, step)), None)


def _settings(experiment: Experiment, tried: Sequence[object]) -> list[dict[str, object]]:
    """Return the cell to improve and what is tried, as grids; without their bases."""
    return [grid.model_dump() for grid in experiment.cells[: 1 + len(tried)]]
