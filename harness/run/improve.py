"""``--improve``: options are tried on the best cell of a run, and what helps is confirmed in blocks of its own."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from harness.analysis.improvements import COMBINATION, CONFIRMATION, CONFIRMING_BLOCKS, SCREENING, changes_of
from harness.analysis.results import IMPROVE_FOLDER, Results, improving_runs, load
from harness.config.experiment import Experiment
from harness.config.load import parse_experiment
from harness.config.sections import Improve
from harness.config.yaml_source import parse_mapping
from harness.report.candidates import Changes, candidates, combined, experiment_of
from harness.report.html import write_report
from harness.report.row import Row, number, plural, rows_of
from harness.report.sentence import Context, context_of
from harness.report.tables.text import duration
from harness.report.verdict import verdict_if_possible
from harness.run.auto_resume import why_unfinished
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
from harness.run.request import Request
from harness.system.process import INTERRUPTED, UNSETTLED

SCREENING_BLOCKS = 2
SHARE = {SCREENING: 0.35, COMBINATION: 0.5}
"""The share of the time after which a step starts no further trial; the confirmation has what is left."""
SHOWN_EVENTS = (RunStarted, GroupStarting, GroupReady, TrialStarting, TrialEnded)
NO_LEADER = "Nothing to improve: no setting was measured that makes a claim about speed"
NO_CANDIDATE = "Nothing to try for {name}: no option reduces what its waterfall names; improve.allow may name more"


def run_and_improve(request: Request, experiment: Experiment, emit: Emit) -> int:
    """Run an experiment and then, if it asks for it, improve its best cell; return the exit code of the run.

    INTERRUPTED if the improvement is interrupted. Raises what ``run`` raises.
    """
    folders: list[Path] = []

    def listen(event: Event) -> None:
        if isinstance(event, Reported):
            folders.append(event.folder)
        emit(event)

    code = run(request, experiment, listen)
    settings = experiment.improve
    if settings is None or not folders or code in (INTERRUPTED, UNSETTLED):
        return code
    return Improvement(request, load(folders[-1]), settings, emit).run() or code


@dataclass
class Improvement:
    """The improvement of one cell of a run, whose steps are runs of their own in its folder."""

    request: Request
    results: Results
    settings: Improve
    emit: Emit

    def __post_init__(self) -> None:
        self._began = time.time()
        self._context = context_of(self.results)

    def run(self) -> int:
        """Try, combine and confirm; write the report again. Return INTERRUPTED, or 0."""
        if (cell_id := best_cell(self._context)) is None:
            self.emit(Note(NO_LEADER))
            return 0
        self._cell_id, self._row = cell_id, self._context.cells[cell_id]
        name, tried = self._context.name(cell_id), candidates(cell_id, self._context, self.settings.allow)
        if not tried:
            self.emit(Note(NO_CANDIDATE.format(name=name)))
            return 0
        time_s = duration(self.settings.time)
        self.emit(Note(f"Improve {name}: {plural(len(tried), 'option')} to try, at most {time_s}."))
        code = self._measure(SCREENING, tried, SCREENING_BLOCKS)
        helped = self._kept(SCREENING)
        if not code and (several := combined(helped)):
            code = self._measure(COMBINATION, [helped[0], *several], SCREENING_BLOCKS)
            helped = self._kept(COMBINATION) or helped
        if not code and helped:
            code = self._measure(CONFIRMATION, helped[:1], CONFIRMING_BLOCKS)
        if code:
            return code
        results, path = write_report(self.results.folder.path), self.results.folder
        tables, spent_s = {name: getattr(results, name) for name in SHOWN}, time.time() - self._began
        self.emit(Reported(path.path, path.report, tables, verdict_if_possible(results), spent_s))
        return 0

    def _measure(self, step: str, tried: Sequence[Changes], blocks: int) -> int:
        """Time the cell to improve beside the same cell with each of some changes; a step that is finished is kept."""
        earlier = self._run_of(step)
        if earlier and not why_unfinished(earlier.folder):
            self.emit(Note(f"{step.capitalize()}: already measured in {earlier.folder.path}."))
            return 0
        cells: list[tuple[Row, Changes]] = [(self._row, {}), *((self._row, changes) for changes in tried)]
        if step == CONFIRMATION:  # for the waterfall before and after
            cells += self._bases(tried[0])
        left_s = self._began + SHARE.get(step, 1.0) * self.settings.time - time.time()
        proves = step == CONFIRMATION
        content = experiment_of(self.results.experiment, step, cells, blocks, max(left_s, 1.0), proves=proves)
        output = self.results.folder.path / IMPROVE_FOLDER / self._cell_id
        asked = replace(
            self.request, content=content, output=output, resume=None, add_blocks=0, only={}, like=None, preflight=False
        )
        experiment = parse_experiment(parse_mapping(content, source=step), source=step, home=asked.home)
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
        known = {row.cell_id: row for row in rows_of(found.trials)} if found else {}
        improvements = Results(self.results.folder).improvements  # computed anew
        kept = [
            row for row in rows_of(improvements) if row.improved_id == self._cell_id and row.step == step and row.kept
        ]
        return [changes_of(known[self._cell_id], known[row.cell_id]) for row in kept]

    def _run_of(self, step: str) -> Results | None:
        """Return the newest run of a step of this improvement."""
        runs = improving_runs(self.results.folder)
        return next((run for cell_id, name, run in runs if (cell_id, name) == (self._cell_id, step)), None)


def best_cell(context: Context) -> str | None:
    """Return the leading cell that loses the largest share of its step; None if no cell leads."""
    leading = [str(one.cell_id) for one in context.stated("fastest")]
    lost = {
        cell_id: sum(max(number(one.facts.share), 0) for one in causes) for cell_id, causes in context.causes.items()
    }
    return max(leading, key=lambda cell_id: lost.get(cell_id, 0.0), default=None)
