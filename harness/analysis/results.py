"""A run folder as DataFrames: what was recorded, and the tables that follow from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import pandas as pd

from harness.analysis.common import Rule
from harness.analysis.convergence import convergence
from harness.analysis.device_memory import device_memory
from harness.analysis.doubts import doubts
from harness.analysis.equivalence import Verdicts, equivalence, verdicts
from harness.analysis.exchange_time import exchange_times
from harness.analysis.faulty import with_faulty
from harness.analysis.findings import findings, static_findings
from harness.analysis.gpus import gpus
from harness.analysis.graded import machine_devices, preview
from harness.analysis.leaders import leaders
from harness.analysis.links import collectives, links
from harness.analysis.missing import missing
from harness.analysis.overview import describe, efficiency_table, option_columns
from harness.analysis.pairs import noise, parity, versus
from harness.analysis.phases import host_phases, ledger, phases
from harness.analysis.prediction import Asked, Links, families, predictions, recorded_exchanges
from harness.analysis.published import published
from harness.analysis.ratios import scaling
from harness.analysis.stalls import stalls
from harness.analysis.steps import StepTimes, step_times
from harness.analysis.trials import cells, labels_of, outcomes, peak_estimates, ranks, trials, windows
from harness.analysis.verdict import READ, Tables, verdict
from harness.analysis.waterfall import waterfall
from harness.config.experiment import Experiment
from harness.errors import HarnessError
from harness.plan.environment import RunEnvironment
from harness.plan.feasibility import IMPOSSIBLE
from harness.plan.rows import RecordedTrial
from harness.record.estimate import read_estimate
from harness.record.folder import RunFolder
from harness.record.frames import records
from harness.record.mirror import on_this_machine
from harness.record.schema import FINDINGS, empty_table


@dataclass(frozen=True, repr=False)
class Results:
    """A run's tables, each computed on first access. ``harness.load`` makes one; results/README.md has the columns.

    Every name in TABLES is an attribute: ``results.scaling``. For reading: ``efficiency`` and ``options``.
    """

    folder: RunFolder

    def __getattr__(self, name: str) -> pd.DataFrame:
        """Return a table of TABLES; raises AttributeError, which lists their names."""
        if name not in TABLES:
            raise AttributeError(f"no table {name!r}; allowed: {', '.join(TABLES)}")
        table = vars(self)[name] = TABLES[name](self)
        return table

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *TABLES]

    def __repr__(self) -> str:
        return describe(self)

    @property
    def tables(self) -> tuple[str, ...]:
        """The names of all tables."""
        return tuple(TABLES)

    @cached_property
    def efficiency(self) -> pd.DataFrame:
        """Speedup and efficiency of each cell as text, by its label: to read, not to average; see efficiency_table."""
        return efficiency_table(self.scaling)

    @cached_property
    def options(self) -> pd.DataFrame:
        """The options in which cells differ, a column each, by cell_id: ``cells.join(options, on="cell_id")``."""
        return option_columns(self.trials)

    @cached_property
    def experiment(self) -> Experiment:
        return self.folder.experiment()

    @cached_property
    def environment(self) -> RunEnvironment:
        return self.folder.environment()

    @cached_property
    def _recorded(self) -> list[RecordedTrial]:
        return self.folder.lines()

    @cached_property
    def lines(self) -> list[RecordedTrial]:
        """The recorded trials, without those of cells that no machine can run, which earlier versions recorded."""
        possible = [line for line in self._recorded if line["skip_code"] not in IMPOSSIBLE]
        return with_faulty(possible, self.experiment.allow)

    @cached_property
    def impossible(self) -> Mapping[str, int]:
        """The number of cells that no machine can run, by reason; they have no row in any table."""
        reasons = {line["cell_id"]: line["reason"] for line in self._recorded if line["skip_code"] in IMPOSSIBLE}
        reasons |= {row["cell_id"]: str(row["reason"]) for row in self.folder.plan()["impossible"]}
        return Counter(reasons.values())

    @cached_property
    def steps(self) -> pd.DataFrame:
        return self.folder.steps(self.lines)

    @cached_property
    def step_times(self) -> StepTimes:
        """The timed steps, in the form that the analyses take."""
        return step_times(self.steps)

    @cached_property
    def epochs(self) -> pd.DataFrame:
        return self.folder.epochs(self.lines)

    @cached_property
    def training_steps(self) -> pd.DataFrame:
        return self.folder.training_steps(self.lines)

    @cached_property
    def checks(self) -> pd.DataFrame:
        return self.folder.checks(self.lines)

    @cached_property
    def verdicts(self) -> Verdicts:
        """Whether cells train as one device does, by the id of their equivalence check."""
        return verdicts(self.equivalence)

    @property
    def rule(self) -> Rule | None:
        """The rule that set the number of blocks; None if the file gives a number."""
        rule = self.experiment.throughput and self.experiment.throughput.rule
        return Rule(at_least=rule.at_least, at_most=rule.at_most, halfwidth=rule.halfwidth) if rule else None

    @property
    def pilot(self) -> int | None:
        """The number of blocks that the rule decided from; None without a rule."""
        return self.rule["at_least"] if self.rule else None


def attempt(results: Results, name: str) -> pd.DataFrame | None:
    """Return a table; None if it fails by an error of the harness, which the report names with its traceback."""
    try:
        table: pd.DataFrame = getattr(results, name)
    except HarnessError:
        raise
    except Exception:
        return None
    return table


def _trials(results: Results) -> pd.DataFrame:
    frame = trials(results.lines, results.step_times)
    return frame.assign(doubts=doubts(frame, results.step_times, results.windows, results.ranks, results.environment))


def _convergence(results: Results) -> pd.DataFrame:
    settings = results.experiment.convergence
    target = settings.target if settings else None
    return convergence(results.trials, results.epochs, target, results.verdicts)


def _published(results: Results) -> pd.DataFrame:
    entries = results.experiment.published
    steps = results.steps if any(entry.level == "steps" for entry in entries) else empty_table("steps")
    return published(entries, results.trials, results.epochs, steps, results.environment)


def _findings(results: Results) -> pd.DataFrame:
    """Return the doctor's findings on cells, the plan and the nodes; no rows if the doctor did not run."""
    of_trials = findings(results.lines, results.trials)
    checked = results.experiment.preflight and all(line["outcome"] == "skipped" for line in results.lines)
    if not (checked or any(line["purpose"] == "doctor" for line in results.lines)):
        return of_trials
    rest = static_findings(results.folder.plan(), results.environment, labels_of(results.lines))
    return FINDINGS.typed(pd.concat([of_trials, rest], ignore_index=True)) if len(rest) else of_trials


def _prediction(results: Results) -> pd.DataFrame:
    return predict(results)


def predict(results: Results, asked: Asked | None = None, links: pd.DataFrame | None = None) -> pd.DataFrame:
    """Return the predictions of a run: of its larger sizes from smaller ones, and of those ``asked``.

    ``links``: the collectives of another measurement, for placements and sizes that the run did not measure.
    """
    excluded = {row["cell_id"]: str(row["excluded"]) for row in records(results.scaling) if row["excluded"] is not None}
    found = families(results.trials, results.windows, results.lines, results.step_times)
    per_node = max(results.folder.plan()["machine"]["devices_per_node"], default=None)
    asked = replace(asked or Asked(), per_node=per_node)
    return predictions(found, Links(results.collectives, links), excluded, asked)


def _preview(results: Results) -> pd.DataFrame:
    folder, cost = results.folder, results.experiment.cost
    devices = machine_devices(folder.plan())
    return preview(read_estimate(folder), devices, cost, results.lines, results.environment)


def _verdict(results: Results) -> pd.DataFrame:
    return verdict(Tables({name: attempt(results, name) for name in READ}, fixed_blocks=results.rule is None))


TABLES: Mapping[str, Callable[[Results], pd.DataFrame]] = {
    "trials": _trials,
    "cells": lambda r: cells(r.trials, r.step_times, r.pilot, peak_estimates(r.lines)),
    "scaling": lambda r: scaling(r.trials, r.rule, r.verdicts),
    "noise": lambda r: noise(r.trials, r.rule),
    "parity": lambda r: parity(r.trials, r.rule, r.verdicts),
    "leaders": lambda r: leaders(r.trials, r.rule, r.verdicts),
    "verdict": _verdict,
    "versus": lambda r: versus(r.trials, r.rule, r.verdicts, tuple(r.experiment.variants), r.experiment.placements),
    "equivalence": lambda r: equivalence(r.trials, r.checks),
    "waterfall": lambda r: waterfall(
        r.trials, r.windows, r.scaling, r.pilot, exchange_times(r.exchanges, r.collectives)
    ),
    "prediction": _prediction,
    "phases": lambda r: phases(r.trials, r.windows, r.pilot),
    "host_phases": lambda r: host_phases(r.trials, r.windows),
    "stalls": lambda r: stalls(r.trials, r.windows, r.ranks, r.steps, r.step_times),
    "convergence": _convergence,
    "published": _published,
    "outcomes": lambda r: outcomes(r.trials),
    "missing": lambda r: missing(r.lines, r.folder.plan(), r.environment),
    "preview": _preview,
    "ledger": lambda r: ledger(r.lines, r.environment),
    "gpus": lambda r: gpus(r.trials, r.ranks),
    "device_memory": lambda r: device_memory(r.trials, r.ranks),
    "links": lambda r: links(r.lines),
    "collectives": lambda r: collectives(r.lines),
    "exchanges": lambda r: recorded_exchanges(r.lines, r.trials),
    "findings": _findings,
    "ranks": lambda r: ranks(r.lines),
    "windows": lambda r: windows(r.lines),
}
"""Every table of tables/: its name and the function that makes it."""


def load(run_folder: str | Path) -> Results:
    """Return the results in a run folder, or of a URI, copied below results/; raises RunFolderError or StoreError."""
    return Results(RunFolder.open(on_this_machine(run_folder, "results")))
