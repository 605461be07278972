"""The measured cells of one run, as they enter comparisons between runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pandas as pd

from harness.analysis.common import Row, Rows, bases_of, by_cell, measured, rows_by_cell
from harness.analysis.doubts import tally
from harness.analysis.environments import Conditions, conditions_of
from harness.analysis.equivalence import NOT_RUN, Verdict, Verdicts
from harness.analysis.ratios import paired
from harness.analysis.results import Results
from harness.analysis.trials import trial_row
from harness.plan.labels import TAGS


@dataclass(frozen=True)
class RunCell:
    """A cell as one run measured it.

    ``first``: a row of its trials, for its axes. ``throughputs``: one a block, in order. ``speedups``: over the base,
    paired by block; empty for the base itself, and without ``base``. ``is_base``: whether it is the base, or stands
    in for one that failed. ``verdict``: whether it is equivalent to one device; None if that is not checked.
    """

    first: Row
    rows: Rows = field(repr=False)
    throughputs: tuple[float, ...]
    base: Row | None
    is_base: bool
    speedups: tuple[float, ...]
    conditions: Conditions | None
    verdict: Verdict | None

    @property
    def excluded(self) -> str | None:
        """The reason if it is not equivalent to one device."""
        return self.verdict.reason if self.verdict and self.verdict.equivalence == "not equivalent" else None

    def doubts(self, letter: str) -> tuple[object, ...]:
        """Return the doubts of its trials and of its equivalence, with the letter of the run."""
        unknown = self.verdict.reason if self.verdict and self.verdict.equivalence == "unknown" else None
        return (*tally(self.rows, letter), *((f"{letter}: equivalence {unknown}",) if unknown else ()))

    @property
    def rehearsal(self) -> str | None:
        """The reason if its speed is no claim: emulated, oversubscribed or faulty."""
        return next((tag for tag in TAGS if not pd.isna(self.first.get(tag)) and self.first[tag]), None)


def run_cells(results: Results) -> dict[str, RunCell]:
    """Return the measured cells of a run by id, in their order of appearance."""
    return _cells(results, by_cell(measured(results.trials)), results.verdicts)


def quick_run_cells(results: Results) -> dict[str, RunCell]:
    """Return the same from trials.jsonl alone, in a tenth of the time: without doubts and exclusions."""
    last = {
        (line["cell_id"], line["block"], line["invocation"]): trial_row(line)
        for line in results.lines
        if line["kind"] == "throughput" and line["outcome"] == "ok" and not line["facts"].get("inline")
    }
    return _cells(results, rows_by_cell(last.values()), {})


def _cells(results: Results, cells: Mapping[str, Rows], verdicts: Verdicts) -> dict[str, RunCell]:
    bases = bases_of(cells)
    return {
        cell_id: _cell(results, group, cells[bases[cell_id]], verdicts.get(str(group[0]["check_id"]), NOT_RUN))
        for cell_id, group in cells.items()
    }


def _cell(results: Results, group: Rows, base: Rows, verdict: Verdict) -> RunCell:
    last = {row["block"]: float(row["throughput_per_s"]) for row in group}
    is_base = group[0]["cell_id"] == base[0]["cell_id"]
    speeds, bases, _ = ([], [], None) if is_base else paired(group, base, None)
    return RunCell(
        first=group[0],
        rows=group,
        throughputs=tuple(last.values()),
        base=base[0] if speeds else None,
        is_base=bool(is_base),
        speedups=tuple(speed / other for speed, other in zip(speeds, bases, strict=True)),
        conditions=conditions_of(results, group),
        verdict=verdict if group[0]["check_id"] else None,
    )


def started_at(results: Results) -> float | None:
    """Return the start of a run as Unix time; None if it is not recorded."""
    invocations = results.environment.get("invocations", [])
    recorded = [invocation["started_at"] for invocation in invocations if "started_at" in invocation]
    return min([*recorded, *(line["started_at"] for line in results.lines if line["started_at"])], default=None)


def git_commit(results: Results) -> str | None:
    """Return the commit of the experiment file's folder at the first invocation that recorded one."""
    invocations = results.environment.get("invocations", [])
    return next((commit for invocation in invocations if (commit := invocation.get("git_commit"))), None)


def is_finished(results: Results) -> bool:
    """Return whether every planned trial has a result and the last invocation finished."""
    invocations = results.environment.get("invocations", [])
    ended = invocations[-1].get("ended", "finished") if invocations else "finished"
    return results.missing.empty and ended == "finished"
