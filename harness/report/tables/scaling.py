"""Finished tables -> rows of text, for the terminal and the report alike."""

from __future__ import annotations

from typing import Any

import pandas as pd

from harness.record.frames import records
from harness.report.labels import rate_unit, settings, shown_devices, shown_strategy, with_settings
from harness.report.tables.text import NO_BREAK, Heading, Line, TextTable, _number, percent, ranges, speed, with_ends

DOUBTFUL = "?"
"""Stands in a terminal behind a cell that has doubts."""
METRICS = {
    "val_accuracy": ("accuracy", 100.0, "{:.1f}", " %"),
    "val_perplexity": ("perplexity", 1.0, "{:.2f}", ""),
    "val_psnr": ("PSNR", 1.0, "{:.1f}", " dB"),
}
"""Title, factor, format and unit of the metrics of the built-in workloads; those of others are shown as they are."""


def scaling_by_setting(scaling: pd.DataFrame) -> list[tuple[str, TextTable]]:
    """The scaling table, for a terminal, in parts that hold the same things fixed, each with its name and its base.

    Speedup's interval is left out: it is that of efficiency, times the devices. Doubts are a mark.
    """
    names = settings(scaling)
    parts = []
    for name in dict.fromkeys(names):
        rows = scaling[names == name]
        bases = ", ".join(dict.fromkeys(_base(row) for row in records(rows)))
        whole = scaling_table(rows, narrow=True)
        marks = [f" {DOUBTFUL}" if own_doubts(row) else "" for row in records(rows)]
        narrow = tuple(
            Line((" x".join(row.cells[1:3]) + mark, *row.cells[3:-1]), row.kind)
            for row, mark in zip(whole.rows, marks, strict=True)
        )
        columns = (Heading("strategy"), *whole.columns[3:-1])
        parts.append((f"{name} (base: {bases})", TextTable(columns, narrow)))
    return parts


def scaling_table(scaling: pd.DataFrame, *, narrow: bool = False) -> TextTable:
    """Throughput, speedup and efficiency of each cell against its base, each with its interval; n; base; doubts."""
    unit = rate_unit(scaling)
    doubtful = not narrow and any(own_doubts(row) for row in records(scaling))
    columns = (
        Heading("setting"),
        Heading("strategy"),
        Heading("devices", True),
        Heading(unit, True),
        Heading("speedup", True),
        Heading("efficiency", True),
        Heading("n", True),
        Heading(f"base ({unit})", True),
        *([Heading("doubts, by blocks")] if doubtful else []),
    )
    rows = []
    for row, name in with_settings(scaling):
        is_base = row["cell_id"] == row["base_id"]
        values = (
            name,
            shown_strategy(row),
            shown_devices(row),
            with_ends(speed, row["throughput_per_s"], row["throughput_low"], row["throughput_high"]),
            "1" if is_base else _number(row["speedup"]) if narrow else _speedup(row),
            "base" if is_base else _efficiency(row),
            str(row["blocks"]),
            _base(row),
            *([own_doubts(row)] if doubtful else []),
        )
        apart = bool(row["emulated"] or row["oversubscribed"])
        rows.append(Line(values, "base" if is_base else "apart" if apart else ""))
    return TextTable(columns, tuple(rows))


def own_doubts(row: Any) -> str:
    """A cell's doubts without those of its base, which has a row of its own."""
    names = [] if pd.isna(row["doubts"]) else str(row["doubts"]).split("; ")
    return "; ".join(name for name in names if not name.startswith("base: "))


def convergence_table(convergence: pd.DataFrame) -> TextTable:
    """Where each cell's trainings ended and when they reached the target, over the seeds."""
    metrics = _metrics(convergence)
    columns = (
        Heading("strategy"),
        Heading("setting"),
        Heading("seeds", True),
        Heading("training loss", True),
        Heading("validation loss", True),
        *(Heading(METRICS[name][0] if name in METRICS else name.removeprefix("val_"), True) for name in metrics),
        Heading("reached target", True),
        Heading("time to target (s)", True),
        Heading("samples to target", True),
    )
    rows = []
    for _, group in convergence.groupby("cell_id", sort=False):
        first = group.iloc[0].to_dict()
        model = "" if pd.isna(first["model"]) else str(first["model"])
        reached = group["reached"].fillna(False)
        otherwise = "never" if group["reached"].notna().any() else "-"
        values = (
            f"{shown_strategy(first)} x{first['devices']}"
            + ("" if pd.isna(first["excluded"]) else " (not equivalent)"),
            ", ".join(part for part in (model, f"global batch {first['global_batch_size']}") if part),
            str(len(group)),
            _span(group["train_loss"], "{:.4f}"),
            _span(group["val_loss"], "{:.4f}"),
            *(_metric(group, name) for name in metrics),
            f"{int(reached.sum())} of {len(group)}" if group["reached"].notna().any() else "-",
            _span(group["time_to_target_s"], "{:.1f}") if reached.any() else otherwise,
            _span(group["samples_to_target"], "{:,.0f}") if reached.any() else otherwise,
        )
        rows.append(Line(values, "apart" if first["emulated"] or first["oversubscribed"] else ""))
    return TextTable(columns, tuple(rows))


def _metrics(convergence: pd.DataFrame) -> list[str]:
    """The columns of the metrics that any training has."""
    names = [str(name) for name in convergence.columns if str(name).startswith("val_") and name != "val_loss"]
    return [name for name in names if convergence[name].notna().any()]


def _metric(group: pd.DataFrame, name: str) -> str:
    _, factor, form, suffix = METRICS.get(name, ("", 1.0, "{:.4g}", ""))
    return _span(group[name] * factor, form, suffix)


def outcome_table(outcomes: pd.DataFrame) -> TextTable:
    """Trials by kind, outcome and reason."""
    columns = (Heading("kind"), Heading("outcome"), Heading("trials", True), Heading("reason"))
    ordered = outcomes.sort_values(["kind", "trials"], ascending=[False, False])
    rows = [
        Line((row["kind"], row["outcome"], str(row["trials"]), "" if pd.isna(row["reason"]) else row["reason"]))
        for row in records(ordered)
    ]
    return TextTable(columns, tuple(rows))


def failure_table(trials: pd.DataFrame, most: int = 50) -> TextTable:
    """The trials that ended otherwise than ok or skipped, with the log that tells more."""
    bad = trials[~trials["outcome"].isin(["ok", "skipped"])]
    columns = (Heading("trial"), Heading("attempt", True), Heading("outcome"), Heading("reason"), Heading("log"))
    rows = []
    for row in records(bad.head(most)):
        what = f"{row['strategy']} x{row['devices']}, {row['trial_id']}"
        log = "" if pd.isna(row["log"]) else row["log"]
        rows.append(Line((what, str(row["attempt"]), row["outcome"], row["reason"] or "", log)))
    if len(bad) > most:
        rows.append(Line((f"and {len(bad) - most} more, in tables/trials.csv", "", "", "", "")))
    return TextTable(columns, tuple(rows))


def missing_table(missing: pd.DataFrame, most: int = 50) -> TextTable:
    """The planned trials without a result, by cell: in which blocks, and why."""
    columns = (Heading("cell"), Heading("trials", True), Heading("blocks"), Heading("reason"))
    named = missing.assign(label=missing["label"].fillna(missing["cell_id"]))
    rows = []
    for (label, reason), group in named.groupby(["label", "reason"], sort=False):
        blocks = sorted(set(group["block"].tolist()))
        rows.append(Line((str(label), str(len(group)), ranges(blocks), str(reason))))
    if len(rows) > most:
        rows = [*rows[:most], Line((f"and {len(rows) - most} more, in tables/missing.csv", "", "", ""))]
    return TextTable(columns, tuple(rows))


def _base(row: Any) -> str:
    return f"{row['base_strategy']} x{row['base_devices']}: {speed(row['base_throughput_per_s'])}"


def _speedup(row: Any) -> str:
    return with_ends(_number, row["speedup"], row["low"], row["high"])


def _efficiency(row: Any) -> str:
    if not pd.isna(row["excluded"]):
        return "not equivalent"
    shown = with_ends(percent, row["efficiency"], row["efficiency_low"], row["efficiency_high"])
    return f"{shown} (one block)".replace(" ", NO_BREAK) if pd.isna(row["efficiency_low"]) else shown


def _span(values: pd.Series[Any], form: str, suffix: str = "") -> str:
    known = values.dropna().astype(float)
    if known.empty:
        return "-"
    low, middle, high = known.min(), known.median(), known.max()
    if len(known) == 1:
        return form.format(middle) + suffix
    spread = f"({form.format(low)} to {form.format(high)})".replace(" ", NO_BREAK)
    return f"{form.format(middle)}{suffix} {spread}"
