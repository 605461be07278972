"""Published figures of the experiment file beside what this run measured of the same cells."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

import pandas as pd

from harness.analysis.common import Record, Records, columns_of, last_of_blocks, matches, rows_of
from harness.config.published import METRICS, RATE, UNITS, Level, Published
from harness.plan.run_environment import RunEnvironment
from harness.record.schema import DESCRIPTION, PUBLISHED
from harness.record.schema.table import floats

Found = Callable[[Records, int | None], Sequence[float]]
"""(trials of a cell, epoch or step) -> the value of each seed or block."""
FIGURES = ("published_low", "published_high", "measured", "measured_low", "measured_high")


def published(
    entries: Sequence[Published],
    trials: pd.DataFrame,
    epochs: pd.DataFrame,
    steps: pd.DataFrame,
    environment: RunEnvironment,
) -> pd.DataFrame:
    """Return one row a published figure, with what was measured of its cell: the mean over seeds or blocks."""
    hardware = hardware_of(environment)
    rows = [row for entry in entries for row in _rows(entry, trials, epochs, steps, hardware)]
    kept = {name: floats(row[name] for row in rows) for name in FIGURES}  # a loss may be no number
    return PUBLISHED.frame(rows).assign(**kept)


def hardware_of(environment: RunEnvironment) -> list[str]:
    """Return the models of the devices that the ranks used, each once; without GPUs those of the processors."""
    nodes = [node for group in environment.get("groups", []) for node in group["nodes"]]
    gpus = [device["model"] for node in nodes for device in node["devices"] if device["kind"] == "cuda"]
    return list(dict.fromkeys(gpus or [node["cpu"] for node in nodes]))


def _rows(
    entry: Published,
    trials: pd.DataFrame,
    epochs: pd.DataFrame,
    steps: pd.DataFrame,
    hardware: Sequence[str],
) -> Iterator[dict[str, Any]]:
    of_cell = _trials_of(entry, trials)
    values: Mapping[Level, Found] = {
        "epochs": lambda rows, at: _by_epoch(entry.metric, rows, epochs, at),
        "steps": lambda rows, at: _by_step(entry.metric, rows, steps, at),
        "cells": lambda rows, at: _by_block(entry.metric, rows, trials),
    }
    place, kind = METRICS[entry.metric]
    counted = f"{of_cell[0].unit}/s" if of_cell and kind == RATE else None
    comparable = bool(of_cell) and (counted is None or entry.unit in (None, counted))
    for at, low, high in entry.figures:
        measured = values[entry.level](of_cell, at) if comparable else []
        yield {
            **(columns_of(of_cell[0], "cell_id", "unit", *DESCRIPTION) if of_cell else {}),
            "cell": ", ".join(f"{name} {value}" for name, value in entry.cell.items()),
            "metric": entry.metric,
            "epoch": at if place == "epochs" else None,
            "step": at if place == "steps" else None,
            "metric_unit": entry.unit or counted if kind == RATE else next(iter(UNITS[kind]), ""),
            "published_low": low,
            "published_high": high,
            **_measured(measured, low, high),
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


def _trials_of(entry: Published, trials: pd.DataFrame) -> Records:
    """Return the last attempt at each trial of the entry's cell that has results; none if it was not measured.

    Timed trials of --inline are excluded, as from every ratio; losses and metrics of its trainings are like others.
    """
    kind = "convergence" if entry.level == "epochs" else "throughput"
    kept = trials[(trials["kind"] == kind) & trials["outcome"].isin(["ok", "diverged"])]
    if kind == "throughput":
        kept = kept[~kept["inline"].fillna(False).astype(bool)]
    asked = kept[~kept["added"].fillna(False).astype(bool)].drop_duplicates("trial_id", keep="last")
    rows = [row for row in rows_of(asked) if matches(vars(row), entry.cell)]
    return [row for row in rows if row.cell_id == rows[0].cell_id]


def _by_epoch(metric: str, rows: Records, epochs: pd.DataFrame, at: int | None) -> list[float]:
    """Return the value of each seed after an epoch; after the last one of those that did not diverge on the way."""
    if metric not in epochs:
        return []
    values = []
    whole = rows if at else [row for row in rows if row.outcome == "ok"]
    for row in whole:
        curve = _of_trial(epochs, row)
        place = curve["epoch"] == (curve["epoch"].max() if at is None else at)
        values += [float(value) for value in curve[place][metric].dropna()]
    return values


def _of_trial(frame: pd.DataFrame, row: Record) -> pd.DataFrame:
    own: pd.DataFrame = frame[(frame["trial_id"] == row.trial_id) & (frame["attempt"] == row.attempt)]
    return own


def _by_step(metric: str, rows: Records, steps: pd.DataFrame, at: int | None) -> list[float]:
    """Return the value at a step of each trial, counted from its first: the slowest rank's time, the ranks' loss."""
    assert at is not None  # the file gives the step
    values = []
    for row in rows:
        own = _of_trial(steps, row)
        by_step = own.groupby(["window", "step"], sort=True)
        each = by_step["step_s"].max() if metric == "step_s" else by_step["loss"].mean()
        series = [float(value) for value in each.astype("Float64").to_numpy(float, na_value=float("nan"))]
        if len(series) >= at:
            values.append(fmean(series[:at]) if metric == "running_loss" else series[at - 1])
    return values


def _by_block(metric: str, rows: Records, trials: pd.DataFrame) -> list[float]:
    """Return the value of each block's trial that counts; of the step time its median."""
    own = last_of_blocks(trials[trials["cell_id"] == rows[0].cell_id])
    return [float(value) for value in own[metric].dropna()]
