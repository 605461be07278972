"""A run folder as DataFrames: what was recorded, and the tables that follow from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from harness import analysis
from harness.analysis.findings import static_findings
from harness.config.experiment import Experiment
from harness.record.folder import RunFolder
from harness.record.schema import FINDINGS
from harness.system.process import no_garbage_collection


@dataclass(frozen=True)
class Results:
    """What a run left, read when it is asked for. ``harness.load`` makes one; results/README.md has the columns.

    Python's collector of cycles would go through all that was recorded again and again meanwhile: it waits.
    """

    folder: RunFolder

    @cached_property
    def experiment(self) -> Experiment:
        return self.folder.experiment()

    @cached_property
    def environment(self) -> Mapping[str, Any]:
        return self.folder.environment()

    @cached_property
    @no_garbage_collection()
    def lines(self) -> list[dict[str, Any]]:
        return self.folder.lines()

    @cached_property
    @no_garbage_collection()
    def steps(self) -> pd.DataFrame:
        return self.folder.steps(self.lines)

    @cached_property
    @no_garbage_collection()
    def step_times(self) -> analysis.StepTimes:
        """The timed ones of the steps, in the form that the analyses take."""
        return analysis.step_times(self.steps)

    @cached_property
    @no_garbage_collection()
    def epochs(self) -> pd.DataFrame:
        return self.folder.epochs(self.lines)

    @cached_property
    @no_garbage_collection()
    def checks(self) -> pd.DataFrame:
        return self.folder.checks(self.lines)

    @cached_property
    @no_garbage_collection()
    def trials(self) -> pd.DataFrame:
        trials = analysis.trials(self.lines, self.step_times)
        return trials.assign(
            doubts=analysis.doubts(trials, self.step_times, self.windows, self.ranks, self.environment)
        )

    @cached_property
    @no_garbage_collection()
    def windows(self) -> pd.DataFrame:
        return analysis.windows(self.lines)

    @cached_property
    @no_garbage_collection()
    def ranks(self) -> pd.DataFrame:
        return analysis.ranks(self.lines)

    @cached_property
    @no_garbage_collection()
    def cells(self) -> pd.DataFrame:
        return analysis.cells(self.trials, self.step_times, self._pilot)

    @cached_property
    @no_garbage_collection()
    def scaling(self) -> pd.DataFrame:
        return analysis.scaling(self.trials, self._rule, analysis.not_equivalent(self.agreement))

    @cached_property
    @no_garbage_collection()
    def agreement(self) -> pd.DataFrame:
        return analysis.agreement(self.trials, self.checks)

    @cached_property
    @no_garbage_collection()
    def waterfall(self) -> pd.DataFrame:
        return analysis.waterfall(self.trials, self.windows, self.scaling, self._pilot)

    @cached_property
    @no_garbage_collection()
    def phases(self) -> pd.DataFrame:
        return analysis.phases(self.trials, self.windows)

    @cached_property
    @no_garbage_collection()
    def host_phases(self) -> pd.DataFrame:
        return analysis.host_phases(self.trials, self.windows)

    @cached_property
    @no_garbage_collection()
    def gpus(self) -> pd.DataFrame:
        return analysis.gpus(self.trials, self.ranks)

    @cached_property
    @no_garbage_collection()
    def ledger(self) -> pd.DataFrame:
        return analysis.ledger(self.lines, self.environment)

    @cached_property
    @no_garbage_collection()
    def findings(self) -> pd.DataFrame:
        """The doctor's: of the cells that were examined, of the plan, and of the nodes; none where it was not asked."""
        found = analysis.findings(self.lines, self.trials)
        asked = self.experiment.preflight and all(line["outcome"] == "skipped" for line in self.lines)
        if not (asked or any(line["purpose"] == "doctor" for line in self.lines)):
            return found
        rest = static_findings(self.folder.plan(), self.environment)
        return FINDINGS.typed(pd.concat([found, rest], ignore_index=True)) if len(rest) else found

    @cached_property
    @no_garbage_collection()
    def noise(self) -> pd.DataFrame:
        return analysis.noise(self.trials, self._rule)

    @cached_property
    @no_garbage_collection()
    def parity(self) -> pd.DataFrame:
        return analysis.parity(self.trials, self._rule, analysis.not_equivalent(self.agreement))

    @cached_property
    @no_garbage_collection()
    def versus(self) -> pd.DataFrame:
        return analysis.versus(self.trials, self._rule, analysis.not_equivalent(self.agreement))

    @property
    def _rule(self) -> dict[str, Any] | None:
        settings = self.experiment.throughput
        return settings.rule.model_dump() if settings and settings.rule else None

    @property
    def _pilot(self) -> int | None:
        """How many blocks decided on the number of all."""
        return int(self._rule["at_least"]) if self._rule else None

    @cached_property
    @no_garbage_collection()
    def convergence(self) -> pd.DataFrame:
        settings = self.experiment.convergence
        target = settings.target.model_dump(exclude_none=True) if settings and settings.target else None
        return analysis.convergence(self.trials, self.epochs, target, analysis.not_equivalent(self.agreement))

    @cached_property
    @no_garbage_collection()
    def missing(self) -> pd.DataFrame:
        return analysis.missing(self.lines, self.folder.plan(), self.environment)

    @cached_property
    @no_garbage_collection()
    def outcomes(self) -> pd.DataFrame:
        return analysis.outcomes(self.trials)


def load(run_folder: str | Path) -> Results:
    """The results in a run folder; raises RunFolderError where it is none."""
    return Results(RunFolder.open(Path(run_folder)))
