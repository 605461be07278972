"""Every run below a folder as one table: each cell's throughput over time, with the changes of environment."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import astuple
from pathlib import Path

import pandas as pd

from harness.analysis.common import Row, ends
from harness.analysis.doubts import tally
from harness.analysis.environments import changes, facts_of
from harness.analysis.results import Results, load
from harness.analysis.run_cells import RunCell, git_commit, is_finished, run_cells, started_at
from harness.analysis.stats import geometric_mean
from harness.errors import HarnessError, RunFolderError
from harness.plan.labels import Labels
from harness.record.frames import records
from harness.record.reading import find_run_folders
from harness.record.schema import AXES, HISTORY

UNREAD = "unread"
"""The attribute of the table with the folders that could not be read: a mapping of paths to reasons."""


def load_history(folder: str | Path) -> pd.DataFrame:
    """Return one row a run and measured cell, for all runs below a folder, by start; results/README.md has the columns.

    Run folders that cannot be read are left out: ``frame.attrs["unread"]`` maps their paths to the reasons. Raises
    RunFolderError if there is no run.
    """
    rows: list[Row] = []
    unread: dict[str, str] = {}
    paths = find_run_folders(Path(folder))
    for path in paths:
        try:
            rows.extend(_rows(load(path)))
        except HarnessError as error:
            unread[str(path)] = str(error)
    if not paths:
        raise RunFolderError(f"{folder}: no run folder is below it; give a folder such as results/")
    in_order = sorted(rows, key=lambda row: (row["started_at"] is None, row["started_at"] or 0.0))
    labels = Labels(in_order)
    frame = HISTORY.frame({**row, "label": labels.of(row)} for row in _with_changes(in_order))
    frame.attrs[UNREAD] = unread
    return frame.drop(columns="facts", errors="ignore")


def _rows(results: Results) -> Iterator[Row]:
    efficiencies = {row["cell_id"]: row for row in records(results.scaling)}
    of_run = {
        "folder": str(results.folder.path),
        "experiment": results.experiment.name,
        "started_at": started_at(results),
        "git_commit": git_commit(results),
        "finished": is_finished(results),
        "facts": facts_of(results),
    }
    for cell_id, cell in run_cells(results).items():
        scaled = efficiencies.get(cell_id, {})
        yield {
            **of_run,
            **{name: cell.first.get(name) for name in ("cell_id", "unit", *AXES)},
            "environment": _hash(cell),
            **_throughput(cell),
            **{name: scaled.get(name) for name in ("base_id", "speedup", "efficiency")},
            "doubts": (*tally(cell.rows), *filter(None, [cell.excluded])),
        }


def _throughput(cell: RunCell) -> Row:
    speed = geometric_mean(cell.throughputs)
    return {"throughput_per_s": speed.value, **ends(speed)}


def _hash(cell: RunCell) -> str | None:
    if cell.conditions is None:
        return None
    return hashlib.sha256(json.dumps(astuple(cell.conditions)).encode()).hexdigest()[:8]


def _with_changes(rows: list[Row]) -> Iterator[Row]:
    """Yield the rows, given by start, each with the changes since the cell's row before."""
    last: dict[str, Row] = {}
    for row in rows:
        before = last.get(str(row["cell_id"]))
        last[str(row["cell_id"])] = row
        yield {**row, "changes": changes(before["facts"], row["facts"]) if before else ()}
