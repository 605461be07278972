"""Recorded lines, steps and epochs -> trials, cells, trainings, outcomes, missing trials."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import mean
from types import MappingProxyType

import numpy as np
import pandas as pd

from harness.analysis.common import (
    KEYS,
    AnyRow,
    Lines,
    Row,
    Rows,
    Values,
    by_cell,
    columns_of,
    ends,
    grouped,
    last_of_blocks,
    order,
    rows_of,
    throughput,
    trial_key,
)
from harness.analysis.doubts import tally
from harness.analysis.equivalence import Verdicts, verdict_columns
from harness.analysis.phases import ROWS, timings
from harness.analysis.ratios import with_twins
from harness.analysis.stats import geometric_mean
from harness.analysis.step_times import StepTimes
from harness.config.axes import PrecisionName
from harness.config.known_hardware import Peak, peak_flops
from harness.config.script import CURVE_METRICS
from harness.config.sections import Target
from harness.plan.labels import Labels, joined
from harness.plan.run_environment import RunEnvironment
from harness.record.schema import (
    CELLS,
    CONVERGENCE,
    DESCRIPTION,
    MISSING,
    OUTCOMES,
    RANKS,
    STEPS,
    TRIALS,
    WINDOWS,
    Table,
)
from harness.record.schema.table import floats


def windows(lines: Lines) -> pd.DataFrame:
    """Return every window of every rank of every recorded trial."""
    return _nested(WINDOWS, lines)


def ranks(lines: Lines) -> pd.DataFrame:
    """Return every rank of every recorded trial."""
    return _nested(RANKS, lines)


def trials(lines: Lines, times: StepTimes, of_ranks: pd.DataFrame | None = None) -> pd.DataFrame:
    """Return one row a trial and attempt, with the values derived from its windows and steps.

    ``of_ranks``: ``windows(lines)``, if that is there already.
    """
    labels = labels_of(lines)
    cells = {(line["cell_id"], line["facts"].get("link")): line for line in reversed(lines)}
    named = {key: label_columns({**line, "link": key[1]}, labels) for key, line in cells.items()}
    rows = [{**trial_row(line), **named[line["cell_id"], line["facts"].get("link")]} for line in lines]
    frame = TRIALS.frame(rows).drop(columns=["step_s", "wait_fraction"])
    stats = times.by_trial.rename(columns={"step_median_s": "step_s"})[["step_s", "wait_fraction"]]
    merged = frame.merge(stats.reset_index(), on=KEYS, how="left", validate="one_to_one")
    # on CUDA the host may wait while the device computes: only an idle stream meanwhile is a part of the device's step
    on_gpu = merged["device"] == "cuda"
    of_ranks = windows(lines) if of_ranks is None else of_ranks
    known = timings(of_ranks[of_ranks["trial_id"].isin(merged["trial_id"][on_gpu])]) if on_gpu.any() else {}
    keys = zip(merged["trial_id"], merged["attempt"], strict=True)
    waits = floats(known[key].wait_fraction if key in known else None for key in keys)
    merged["wait_fraction"] = merged["wait_fraction"].where(~on_gpu, waits)
    return TRIALS.typed(merged)


def labels_of(lines: Lines) -> Labels:
    """Return the labels of the recorded cells; without any but diagnostic trials, these count."""
    cells = {line["cell_id"]: line for line in lines if line["kind"] != "diagnostic"}
    return Labels((cells or {line["cell_id"]: line for line in lines}).values())


def label_columns(axes: AnyRow, labels: Labels) -> dict[str, str]:
    """Return the columns of a cell's row that name it."""
    placed, setting, own_options = labels.parts(axes)
    return {"label": joined(placed, setting, own_options), "setting": setting, "own_options": own_options}


def trial_row(line: AnyRow) -> AnyRow:
    """Return the columns of a recorded trial that follow from its line alone."""
    known = {**line, **line["facts"]}
    ranks, windows = [*line["ranks"]], [*line["windows"]]  # each time that they are read they are made anew
    peaks = [rank["peak_memory_bytes"] for rank in ranks if rank.get("peak_memory_bytes") is not None]
    models = sorted({rank["device_model"] for rank in ranks if rank.get("device_model")})
    first = [window for window in windows if window["rank"] == 0]
    return {
        **{name: known[name] for name in TRIALS.names if name in known},
        "device_model": " + ".join(models) or None,
        "threads": ranks[0].get("threads") if ranks else None,
        "throughput_per_s": throughput(windows),
        "peak_memory_bytes": max(peaks, default=None),
        "warmup_steps": sum(w["steps"] for w in first if w["window_kind"] == "warmup") or None,
    }


def peak_estimates(lines: Lines) -> dict[str, int]:
    """Return the doctor's estimates of peak memory by cell id, in bytes; the largest of several of a cell."""
    # of several of a cell the largest comes last, and stays
    return dict(sorted(peak for line in lines for peak in line["facts"].get("estimates", {}).items()))


def compile_seconds(lines: Lines) -> dict[str, float]:
    """Return the longest time that torch.compile took in a timed trial, by cell id."""
    timed = (line for line in lines if line["kind"] == "throughput" and line["parts"].get("compile"))
    # as above the largest stays
    return dict(sorted((line["cell_id"], line["parts"]["compile"]) for line in timed))


OF_STEPS = tuple(name for name in CELLS.names if name in STEPS.names)
"""The columns of CELLS that are medians over the timed steps of their trials: those that STEPS has too."""
TAILS: Mapping[str, float] = {"step_p5_s": 0.05, "step_p95_s": 0.95}
"""Quantiles of the time of a step."""


def cells(
    trials: pd.DataFrame,
    times: StepTimes,
    pilot: int | None = None,
    estimates: Mapping[str, int] = MappingProxyType({}),
    compiling: Mapping[str, float] = MappingProxyType({}),
    own_peaks: Mapping[PrecisionName, float] = MappingProxyType({}),
) -> pd.DataFrame:
    """Return one row a measured cell: its throughput over blocks (of a base that of its twin too), step times, memory.

    ``pilot``: the number of pilot blocks, if a rule set the number of blocks.
    ``estimates``: those of peak memory, by cell id. ``compiling``: the seconds of torch.compile, likewise.
    ``own_peaks``: FLOP/s of one device by precision, in place of the published ones.
    """
    counted = last_of_blocks(with_twins(trials))
    with_peak = rows_of(trials[trials["measured_peak_flops_per_s"].notna()])
    # the fastest matrix product on each kind of device over the whole run: one ceiling for all its cells
    ceilings = {
        kind: max(float(row.measured_peak_flops_per_s) for row in rows)
        for kind, rows in grouped(with_peak, _device_kind).items()
    }
    steps = {name: times.of_cells(counted, name) for name in OF_STEPS}
    step_s = steps["step_s"]
    rows = []
    for cell_id, group in by_cell(rows_of(counted)).items():
        first = group[0]
        in_pilot = sum(row.block < (pilot or 0) for row in group)
        by_block = sorted(group, key=lambda row: row.block)  # a resumed run has measured them in another order
        speed = geometric_mean([float(row.throughput_per_s) for row in by_block], pilot=in_pilot)
        rows.append(
            {
                **columns_of(first, "cell_id", "added", "parameters", "unit", *DESCRIPTION),
                "throughput_per_s": speed.value,
                **ends(speed),
                "per_device_per_s": speed.value / first.devices,
                **{name: _median(of[cell_id]) for name, of in steps.items() if cell_id in of},
                **{name: float(np.quantile(step_s[cell_id], q)) for name, q in TAILS.items() if cell_id in step_s},
                "wait_fraction": mean(waits) if (waits := _known(group, "wait_fraction")) else None,
                "compile_s": compiling.get(cell_id),
                "peak_memory_bytes": max(_known(group, "peak_memory_bytes"), default=None),
                "estimated_peak_bytes": estimates.get(cell_id),
                **_arithmetic(first, speed.value, ceilings.get(_device_kind(first)), own_peaks),
                "doubts": tally(group),
            }
        )
    return CELLS.frame(sorted(rows, key=order))


def _median(values: np.ndarray) -> float | None:
    """Return the median of the known values; None if there are none."""
    known = values[~np.isnan(values)]
    return float(np.median(known)) if len(known) else None


def _known(rows: Rows, name: str) -> list[float]:
    return [float(value) for row in rows if not pd.isna(value := getattr(row, name))]


def _device_kind(trial: Row) -> tuple[object, ...]:
    return trial.device_model, trial.precision, trial.threads


def _arithmetic(trial: Row, speed: float, ceiling: float | None, own_peaks: Mapping[PrecisionName, float]) -> Values:
    """Return the FLOP/s of one device and their fraction of its peak: MFU as Chowdhery et al. 2022 define it.

    No fraction if ranks share a device: ``devices`` then counts ranks, and one rank's part is not a device's.
    """
    if pd.isna(trial.flops_per_unit):
        return {"flops_reason": trial.flops_reason}
    achieved = float(trial.flops_per_unit) * speed / float(trial.devices)
    if trial.oversubscribed:
        return {"achieved_flops_per_s": achieved}
    known = None if pd.isna(trial.device_model) else peak_flops(trial.device_model, trial.precision)
    if own := own_peaks.get(trial.precision) or (own_peaks.get("bf16") if trial.precision == "fp16" else None):
        known = Peak(own, "hardware.peak_flops of the experiment file")
    return {
        "achieved_flops_per_s": achieved,
        "mfu": achieved / known.flops_per_s if known else None,
        "peak_source": known.source if known else None,
        "of_measured_peak": achieved / ceiling if ceiling else None,
    }


NO_METRIC = "no such metric was recorded"
OF_TRAINING = (*KEYS, "cell_id", "seed", "effective_lr", "training_samples", *DESCRIPTION)
"""The columns of a trial that the row of a training has."""


def convergence(
    trials: pd.DataFrame, epochs: pd.DataFrame, target: Target | None, checked: Verdicts | None = None
) -> pd.DataFrame:
    """Return one row a training: its last epoch, and the time to the target if it was reached.

    ``target``: the one of the experiment file, if it has any. ``checked``: the verdicts of equivalence checks.
    """
    done = trials[(trials["kind"] == "convergence") & trials["outcome"].isin(["ok", "diverged"])]
    by_trial = dict(iter(epochs.groupby(KEYS)))
    rows = []
    for trial in rows_of(done):
        curve = by_trial.get(trial_key(trial))
        if curve is None:
            continue
        curve = curve.sort_values("epoch")
        last = curve.iloc[-1]
        rows.append(
            {
                **columns_of(trial, *OF_TRAINING),
                "epochs": last["epoch"],
                **{name: last[name] for name in ("train_loss", "train_accuracy", "train_s")},
                **{name: last[name] for name in curve.columns if str(name).startswith(CURVE_METRICS)},
                "best_val_accuracy": curve["val_accuracy"].max(),
                **_time_to_target(curve, target),
                **verdict_columns(checked, [trial.check_id]),
            }
        )
    rows.sort(key=order)
    # of a training that diverged, the loss and the metrics may be values that are not finite
    kept = {name: floats(row.get(name) for row in rows) for name in CONVERGENCE.names if name.endswith("_loss")}
    return CONVERGENCE.frame(rows).assign(**kept)


def _time_to_target(curve: pd.DataFrame, target: Target | None) -> Values:
    if not target:
        return {}
    if target.metric not in curve:
        return {"target": f"{target.metric}: {NO_METRIC}"}
    values = curve[target.metric].astype("Float64")
    if target.at_least is not None:
        reached, words = values >= target.at_least, f">= {target.at_least:g}"
    else:
        assert target.at_most is not None  # the file gives exactly one of the two
        reached, words = values <= target.at_most, f"<= {target.at_most:g}"
    named: Values = {"target": f"{target.metric} {words}"}
    hits = curve[reached.fillna(False).astype(bool)]
    if hits.empty:
        return {**named, "reached": False}
    time_s, samples, epoch = hits.iloc[0][["train_s", "samples", "epoch"]]
    first: Values = {"time_to_target_s": time_s, "samples_to_target": samples, "epochs_to_target": epoch}
    return {**named, "reached": True, **first}


def outcomes(trials: pd.DataFrame) -> pd.DataFrame:
    """Return the number of trials by outcome and reason; the last attempt of each trial counts."""
    last = trials.drop_duplicates("trial_id", keep="last")
    counts = last.groupby(["kind", "outcome", "reason"], dropna=False, sort=True).size().reset_index(name="trials")
    return OUTCOMES.typed(counts)


def _nested(table: Table, lines: Sequence[AnyRow]) -> pd.DataFrame:
    """Return the rows nested in each line under the table's name, with the line's trial and attempt."""
    counts = [len(line[table.name]) for line in lines]
    # of some lines at a time: as mappings rows take ten times the memory of a frame
    parts = np.cumsum(counts, dtype=int) // ROWS
    cuts = [*np.flatnonzero(np.diff(parts, prepend=-1)), len(lines)]
    frames = [
        table.frame(row for line in lines[first:last] for row in line[table.name]) for first, last in pairwise(cuts)
    ]
    frame = frames[0] if len(frames) == 1 else _joined([table.frame([]), *frames])
    frame["trial_id"] = pd.array([line["trial_id"] for line in lines], dtype="string").repeat(counts)
    frame["attempt"] = pd.array([line["attempt"] for line in lines], dtype="Int64").repeat(counts)
    return frame


def _joined(parts: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Return the rows of frames of one table, which lose them: column by column, so that they are in memory once."""
    names = dict.fromkeys(name for part in parts for name in part.columns)
    columns = {}
    for name in names:
        columns[name] = pd.concat([part.filter([name]) for part in parts], ignore_index=True)[name]
        for part in parts:
            if name in part:
                del part[name]
    return pd.DataFrame(columns, copy=False)


NOT_STARTED: Mapping[str | None, str] = {
    "interrupted": "the run was interrupted",
    "finished": "it was no part of the last call (--only, or another machine)",
    "error": "the run ended with an error of its own",
    None: "the run was killed, or is still going on",
}
"""Why a trial was not started, by the end of the last invocation; None if it recorded none, since it was killed."""
RUNNING = "cut short: it was being measured when the run was interrupted"


def missing(lines: Lines, plan: AnyRow, environment: RunEnvironment) -> pd.DataFrame:
    """Return one row a planned trial without a recorded line, in the order of the plan."""
    invocations = environment.get("invocations", [])
    last = invocations[-1] if invocations else {}
    why = f"not started: {NOT_STARTED.get(last.get('ended'), NOT_STARTED[None])}"
    recorded = {line["trial_id"] for line in lines}
    labels = plan.get("cells", {})
    return MISSING.frame(
        {
            "trial_id": trial_id,
            "cell_id": (cell_id := trial_id.rpartition("-")[0]),
            "label": labels.get(cell_id),
            "block": group["block"],
            "reason": RUNNING if trial_id == last.get("running") else why,
        }
        for group in plan["groups"]
        for trial_id in group["trials"]
        if trial_id not in recorded
    )
