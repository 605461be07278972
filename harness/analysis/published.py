"""Published figures of the experiment file beside what this run measured of the same cells."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

import pandas as pd

from harness.analysis.common import AnyRow, Rows, columns_of, last_of_blocks, matches, rows_of
from harness.config.published import METRICS, RATE, UNITS, Level, Published
from harness.plan.run_environment import RunEnvironment
from harness.record.schema import DESCRIPTION, PUBLISHED
from harness.record.schema.table import floats

FIGURES = ("published_low", "published_high", "measured", "measured_low", "measured_high")


def published(
    entries: Sequence[Published],
    trials: pd.DataFrame,
    epochs: pd.DataFrame,
    steps: pd.DataFrame,
    environment: RunEnvironment,
) -> pd.DataFrame:
    """Return one row a published figure, with what was measured of its cell: the mean over seeds or blocks."""
    tables: Mapping[Level, pd.DataFrame] = {"cells": trials, "epochs": epochs, "steps": steps}
    rows = [row for entry in entries for row in _rows(entry, tables, hardware_of(environment))]
    kept = {name: floats(row[name] for row in rows) for name in FIGURES}  # a loss may be no number
    return PUBLISHED.frame(rows).assign(**kept)


def hardware_of(environment: RunEnvironment) -> list[str]:
    """Return the models of the devices that the ranks used, each once; without GPUs those of the processors."""
    nodes = [node for group in environment.get("groups", []) for node in group["nodes"]]
    gpus = [device["model"] for node in nodes for device in node["devices"] if device["kind"] == "cuda"]
    return list(dict.fromkeys(gpus or [node["cpu"] for node in nodes]))


def _rows(entry: Published, tables: Mapping[Level, pd.DataFrame], hardware: Sequence[str]) -> Iterator[AnyRow]:
    cell = _trials_of(entry, tables["cells"])
    level, kind, _ = METRICS[entry.metric]
    counted = f"{cell[0].unit}/s" if cell and kind == RATE else None
    comparable = bool(cell) and (counted is None or entry.unit in (None, counted))
    for at, low, high in entry.figures:
        yield {
            **(columns_of(cell[0], "cell_id", "unit", *DESCRIPTION) if cell else {}),
            "cell": ", ".join(f"{name} {value}" for name, value in entry.cell.items()),
            "metric": entry.metric,
            "epoch": at if level == "epochs" else None,
            "step": at if level == "steps" else None,
            "metric_unit": entry.unit or counted if kind == RATE else next(iter(UNITS[kind]), ""),
            "published_low": low,
            "published_high": high,
            **_measured(_values(entry, cell, tables, at) if comparable else [], low, high),
            "source": entry.source,
            "url": entry.url,
            "hardware": entry.hardware,
            "measured_on": ", ".join(hardware) or None,
            "other_hardware": not any(model and model in entry.hardware for model in hardware),
        }


def _measured(values: Sequence[float], low: float, high: float) -> dict[str, float | int | None]:
    """Return the mean of the values, and its difference from the nearer end of what was published; 0 between both."""
    if not values:
        return {**dict.fromkeys(FIGURES[2:]), "n": 0}
    mean = fmean(values)
    end = low if mean < low else high if mean > high else mean
    difference = mean - end if mean == mean and end == end and low == low else None
    return {
        "measured": mean,
        "measured_low": min(values),
        "measured_high": max(values),
        "n": len(values),
        "difference": difference,
        "relative_difference": difference / abs(end) if difference is not None and end else None,
    }


def _trials_of(entry: Published, trials: pd.DataFrame) -> Rows:
    """Return the last attempt at each trial of the entry's cell that has results; none if it was not measured.

    Timed trials of --inline are excluded, as from every ratio; losses and metrics of its trainings are like others.
    """
    kind = "convergence" if entry.level == "epochs" else "throughput"
    kept = trials[(trials["kind"] == kind) & trials["outcome"].isin(["ok", "diverged"])]
    if kind == "throughput":
        kept = kept[~kept["inline"].fillna(False).astype(bool)]
    asked = kept[~kept["added"].fillna(False).astype(bool)].drop_duplicates("trial_id", keep="last")
    rows = [row for row in rows_of(asked) if matches(row, entry.cell)]
    return [row for row in rows if row.cell_id == rows[0].cell_id]


def _values(entry: Published, cell: Rows, tables: Mapping[Level, pd.DataFrame], at: int | None) -> list[float]:
    """Return the value of each block or, after an epoch or a step, of each trial; ``at``: None for the last epoch.

    Steps are counted from the first of a trial: the slowest rank's time, the mean of the ranks' losses.
    """
    table, metric = tables[entry.level], entry.metric
    if entry.level == "cells":
        blocks = last_of_blocks(table[table["cell_id"] == cell[0].cell_id])
        return [float(value) for value in blocks[metric].dropna()]
    values: list[float] = []
    for row in cell:
        own = table[(table["trial_id"] == row.trial_id) & (table["attempt"] == row.attempt)]
        if entry.level == "steps":
            by_step = own.groupby(["window", "step"], sort=True)
            each = by_step["step_s"].max() if metric == "step_s" else by_step["loss"].mean()
            series = [float(value) for value in each.astype("Float64").to_numpy(float, na_value=float("nan"))][:at]
            if len(series) == at:
                values.append(fmean(series) if metric == "running_loss" else series[-1])
        elif metric in own and (at or row.outcome == "ok"):  # a training that diverged has no last epoch
            after = own["epoch"] == (own["epoch"].max() if at is None else at)
            values += [float(value) for value in own[after][metric].dropna()]
    return values
