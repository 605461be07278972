"""A run folder as DataFrames: what was recorded, the tables that follow from it, and the run at a glance."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import pandas as pd

from harness.analysis.common import rows_of
from harness.analysis.doubts import doubts
from harness.analysis.equivalence import Verdicts, equivalence, verdicts
from harness.analysis.evidence import stalls
from harness.analysis.findings import findings, static_findings, unequal_metrics, with_faulty
from harness.analysis.hardware import collectives, device_memory, gpus, links
from harness.analysis.improvements import STEPS, step_rows
from harness.analysis.phases import host_phases, ledger, phases
from harness.analysis.prediction.collective_times import Links, recorded_exchanges
from harness.analysis.prediction.observed import families
from harness.analysis.prediction.predictions import Asked, predictions
from harness.analysis.preview import preview
from harness.analysis.published import published
from harness.analysis.ratios import leaders, noise, parity, scaling, versus
from harness.analysis.stats import LOOKS_SIGNIFICANCE, SIGNIFICANCE, look_significance
from harness.analysis.step_times import StepTimes, step_times
from harness.analysis.trials import (
    cells,
    compile_seconds,
    convergence,
    labels_of,
    missing,
    outcomes,
    peak_estimates,
    ranks,
    trials,
    windows,
)
from harness.analysis.verdict import Statement, Tables
from harness.analysis.verdict.rules import statements
from harness.analysis.waterfall import exchange_times, waterfall
from harness.config.experiment import Experiment
from harness.config.sections import AssumedLink, BlockRule, Rule, Target
from harness.config.strategy_traits import BUILTIN_TRAITS
from harness.errors import HarnessError
from harness.plan.rows import LinkTier, RecordedTrial
from harness.plan.run_environment import RunEnvironment
from harness.record.estimate import read_estimate
from harness.record.folder import RunFolder
from harness.record.frames import records
from harness.record.mirror import on_this_machine
from harness.record.schema import FINDINGS, IMPROVEMENTS, RAW, VERDICT, empty_table

OF_STEPS = tuple(table.name for table in RAW)
"""The recorded tables by step, epoch and check."""
IMPROVE_FOLDER = "improve"
"""The folder of a run folder for the runs of ``--improve``: improve/<cell>/<step>/<time>-<id>."""
SUMMARY = (
    *("devices", "global_batch_size", "blocks", "throughput_per_s", "throughput_low", "throughput_high"),
    *("speedup", "low", "high", "p_value", "efficiency"),
)
"""The columns of ``scaling`` that a summary has."""


def option_columns(trials: pd.DataFrame) -> pd.DataFrame:
    """Return the options in which the measured cells differ, one column each, by cell_id; <NA> if a cell has none.

    ``trials``: the table of that name. An option of a strategy is compared among the cells of that strategy.
    """
    measured = trials[trials["kind"] != "diagnostic"].drop_duplicates("cell_id")
    cells = records(measured[["cell_id", "strategy", "options"]])
    known = [name for cell in cells for name in (cell["options"] or {})]
    columns = {}
    for name in sorted(set(known)):
        values = [(cell["options"] or {}).get(name) for cell in cells]
        section = name.rpartition(".")[0]
        of_strategy = section in BUILTIN_TRAITS or ":" in section
        compared = [
            json.dumps(value)
            for cell, value in zip(cells, values, strict=True)
            if section == cell["strategy"] or not of_strategy
        ]
        if len(set(compared)) > 1:
            columns[name] = _column(values)
    return pd.DataFrame(columns, index=pd.Index([cell["cell_id"] for cell in cells], name="cell_id", dtype="string"))


def _column(values: Sequence[object]) -> pd.api.extensions.ExtensionArray:
    """Return values as a column of one type; of several types as their text in a file."""
    dtypes = {"boolean": "boolean", "integer": "Int64", "string": "string"}
    numbers = dict.fromkeys(("floating", "mixed-integer-float"), "Float64")
    if dtype := (dtypes | numbers).get(pd.api.types.infer_dtype(values, skipna=True)):
        typed: pd.api.extensions.ExtensionArray = pd.Series(list(values), dtype=dtype).array
        return typed
    texts = [value if isinstance(value, str) or value is None else json.dumps(value) for value in values]
    return pd.array(texts, dtype="string")


def summary_table(scaling: pd.DataFrame) -> pd.DataFrame:
    """Return the twelve numbers of each cell, by its label; ``scaling``: the table of that name.

    ``low`` and ``high``: the ends of the speedup's interval. Ratios that are excluded are <NA>, as those of a cell that
    does not train as its base does: ``scaling`` has the reason. ``device_s_per_million``: device time of a million
    samples or tokens, in s.
    """
    frame = scaling.set_index(pd.Index(scaling["label"], name="cell"))
    numbers = frame[list(SUMMARY)]
    numbers.loc[frame["excluded"].notna(), "speedup":] = pd.NA
    return numbers.assign(device_s_per_million=1e6 * frame["devices"] / frame["throughput_per_s"])


@dataclass(frozen=True, repr=False)
class Results:
    """A run's tables, each computed on first access. ``harness.load`` makes one; results/README.md has the columns.

    Every name in TABLES is an attribute: ``results.scaling``. For reading: ``summary``, ``best``, ``options``.
    """

    folder: RunFolder

    def __getattr__(self, name: str) -> pd.DataFrame:
        """Return a table of TABLES, or a recorded one of OF_STEPS; raises AttributeError, which lists their names."""
        if name not in TABLES and name not in OF_STEPS:
            raise AttributeError(f"no table {name!r}; allowed: {', '.join(TABLES)}")
        made = self.folder.rows(name, self.lines) if name in OF_STEPS else TABLES[name](self)
        table: pd.DataFrame = vars(self).setdefault(name, made)
        return table

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *OF_STEPS, *TABLES]

    def __repr__(self) -> str:
        """Return what the run is and what its results have, in a few lines; computes no table."""
        lines = {line["trial_id"]: line for line in self.lines}  # the last attempt of each trial
        counts = Counter(str(line["outcome"]) for line in lines.values())
        outcomes = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())) or "none finished"
        measured = {line["cell_id"] for line in lines.values() if line["outcome"] == "ok" and line["purpose"] == ""}
        invocations = self.environment.get("invocations", [])
        ended = (invocations[-1].get("ended") or "not ended") if invocations else "not started"
        return (
            f"Results of {self.experiment.name}: {self.folder.path}\n"
            f"  trials: {outcomes}; cells measured: {len(measured)}; last invocation: {ended}\n"
            f"  .summary (12 numbers a cell), .best, .options (by cell_id), .plot.throughput() and others\n"
            f"  tables: {', '.join(f'.{name}' for name in self.tables)}"
        )

    @property
    def tables(self) -> tuple[str, ...]:
        """The names of all tables."""
        return tuple(TABLES)

    @cached_property
    def summary(self) -> pd.DataFrame:
        """Throughput, speedup, efficiency and cost of each cell, by its label; see summary_table."""
        return summary_table(self.scaling)

    @cached_property
    def best(self) -> pd.DataFrame:
        """The summary of the settings to use, as in the verdict: one for each model, data set and precision.

        On the most devices, or the base if that shows no gain; the smallest batch, if several are about as fast. Its
        ``p_value`` is that of its gain over the base, and not over the settings beside it, which the table ``leaders``
        has.
        """
        verdict, rows = self.verdict, {row.cell_id: row for row in rows_of(self.scaling)}
        fastest = [rows[cell] for cell in verdict["cell_id"][verdict["topic"] == "fastest"] if cell in rows]
        chosen = [row.base_id if not pd.isna(row.p_value) and row.speedup <= 1 else row.cell_id for row in fastest]
        return self.summary[self.scaling["cell_id"].isin(chosen).to_numpy()]

    @cached_property
    def statements(self) -> list[Statement]:
        """The statements of the verdict, which are the rows of the table ``verdict``."""
        return statements(Tables(partial(attempt, self), None if self.rule else self.look, self.significance))

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
    def lines(self) -> list[RecordedTrial]:
        """The recorded trials."""
        return with_faulty(self.folder.lines(), self.experiment.allow)

    @cached_property
    def impossible(self) -> Mapping[str, int]:
        """The number of cells that no machine can run, by reason; they have no row in any table."""
        return Counter(str(row["reason"]) for row in self.folder.plan()["impossible"])

    @cached_property
    def step_times(self) -> StepTimes:
        """The timed steps, in the form that the analyses take."""
        return step_times(self.steps)

    @cached_property
    def verdicts(self) -> Verdicts:
        """Whether cells train as one device does, by the id of their equivalence check."""
        return verdicts(self.equivalence, self.trials)

    @property
    def target(self) -> Target | None:
        """The target of trainings; None if the file has none."""
        return self.experiment.convergence.target if self.experiment.convergence else None

    @property
    def rule(self) -> Rule | None:
        """The rule that set the number of blocks; None if the file gives a number."""
        return self.experiment.throughput.rule if self.experiment.throughput else None

    @property
    def look(self) -> int:
        """The number of looks at the run: one, and one more after each invocation that added blocks."""
        counts = [one["blocks"] for one in self.environment.get("invocations", []) if one.get("blocks")]
        return max(1, len(set(counts)))

    @property
    def significance(self) -> float:
        """The p-value up to which a difference is clear: that of the last look, as blocks can be added.

        A BlockRule plans the number of blocks from their spread alone, and is looked at once.
        """
        if self.rule == "decide":
            return LOOKS_SIGNIFICANCE
        return SIGNIFICANCE if self.rule else look_significance(self.look)

    @property
    def pilot(self) -> int | None:
        """The number of blocks that a BlockRule decided from; None without one."""
        return self.rule.at_least if isinstance(self.rule, BlockRule) else None


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
    frame = trials(results.lines, results.step_times, results.windows)
    tables = (results.step_times, results.windows, results.ranks, results.environment, results.epochs)
    return frame.assign(doubts=doubts(frame, *tables, results.lines))


def improving_runs(folder: RunFolder) -> Iterator[tuple[str, str, Results]]:
    """Yield the runs that ``--improve`` made: the cell to improve, the step, and its newest run, in their order."""
    for cell in sorted((folder.path / IMPROVE_FOLDER).glob("*")):
        for step in STEPS:
            runs = sorted(path.parent for path in (cell / step).glob("*/plan.json"))
            if runs:
                yield cell.name, step, Results(RunFolder.open(runs[-1]))


def _improvements(results: Results) -> pd.DataFrame:
    def wall_s(run: Results) -> float:
        return sum(one.get("wall_s", 0.0) + one.get("report_s", 0.0) for one in run.environment.get("invocations", []))

    return IMPROVEMENTS.frame(
        row
        for cell_id, step, run in improving_runs(results.folder)
        for row in step_rows(
            cell_id, step, run.trials, run.verdicts, wall_s(run), finished=not run.folder.why_unfinished
        )
    )


def _published(results: Results) -> pd.DataFrame:
    entries = results.experiment.published
    steps = results.steps if any(entry.level == "steps" for entry in entries) else empty_table("steps")
    return published(entries, results.trials, results.epochs, steps, results.environment)


def _findings(results: Results) -> pd.DataFrame:
    """Return the doctor's findings on cells, the plan and the nodes, none if it did not run, and those of trainings."""
    examined = findings(results.lines, results.trials)
    found = [examined, unequal_metrics(results.trials, results.convergence, examined)]
    checked = results.experiment.preflight and all(line["outcome"] == "skipped" for line in results.lines)
    if checked or any(line["purpose"] == "doctor" for line in results.lines):
        found.append(static_findings(results.folder.plan(), results.environment, labels_of(results.lines)))
    filled = [frame for frame in found if len(frame)] or [examined]
    return FINDINGS.typed(pd.concat(filled, ignore_index=True))


def predict(results: Results, asked: Asked | None = None, links: pd.DataFrame | None = None) -> pd.DataFrame:
    """Return the predictions of a run: of its larger sizes from smaller ones, and of those ``asked``.

    ``links``: the collectives of another measurement, for placements and sizes that the run did not measure.
    """
    ratios = records(results.scaling)
    excluded = {row["cell_id"]: str(row["excluded"]) for row in ratios if row["excluded"] is not None}
    bases = {row["cell_id"]: row["base_throughput_per_s"] / row["base_devices"] for row in ratios}
    found = families(results.trials, results.windows, results.lines, results.step_times)
    per_node = max(results.folder.plan()["machine"]["devices_per_node"], default=None)
    asked = replace(asked or Asked(), per_node=per_node)
    hardware = results.experiment.hardware
    assumed: Mapping[LinkTier, AssumedLink | None] = {
        "inside a node": hardware.inside_a_node,
        "between nodes": asked.between or hardware.between_nodes,
    }
    return predictions(found, Links(results.collectives, links, assumed), excluded, asked, bases)


TABLES: Mapping[str, Callable[[Results], pd.DataFrame]] = {
    "trials": _trials,
    "cells": lambda r: cells(
        r.trials,
        r.step_times,
        r.pilot,
        peak_estimates(r.lines),
        compile_seconds(r.lines),
        r.experiment.hardware.peak_flops,
    ),
    "scaling": lambda r: scaling(r.trials, r.rule, r.verdicts),
    "noise": lambda r: noise(r.trials, r.rule),
    "parity": lambda r: parity(r.trials, r.rule, r.verdicts),
    "leaders": lambda r: leaders(r.trials, r.rule, r.verdicts, r.significance),
    "verdict": lambda r: VERDICT.frame(statement.row() for statement in r.statements),
    "versus": lambda r: versus(r.trials, r.rule, r.verdicts, tuple(r.experiment.variants), r.experiment.placements),
    "improvements": _improvements,
    "equivalence": lambda r: equivalence(r.trials, r.checks),
    "waterfall": lambda r: waterfall(
        r.trials, r.windows, r.scaling, r.pilot, exchange_times(r.exchanges, r.collectives)
    ),
    "prediction": predict,
    "phases": lambda r: phases(r.trials, r.windows, r.pilot),
    "host_phases": lambda r: host_phases(r.trials, r.windows),
    "stalls": lambda r: stalls(r.trials, r.windows, r.ranks, r.steps, r.step_times),
    "convergence": lambda r: convergence(r.trials, r.epochs, r.target, r.verdicts),
    "published": _published,
    "outcomes": lambda r: outcomes(r.trials),
    "missing": lambda r: missing(r.lines, r.folder.plan(), r.environment),
    "preview": lambda r: preview(
        read_estimate(r.folder), sum(r.folder.plan()["machine"]["devices_per_node"]), r.lines, r.environment
    ),
    "ledger": lambda r: ledger(r.lines, r.environment),
    "gpus": lambda r: gpus(r.trials, r.ranks, r.windows, r.lines),
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
