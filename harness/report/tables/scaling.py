"""Text tables on scaling, convergence epoch by epoch, and the trials' outcomes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial
from statistics import median

import pandas as pd

from harness.analysis.common import KEYS, grouped, is_no_claim
from harness.analysis.doubts import LOUD
from harness.analysis.stats import SIGNIFICANCE, word
from harness.config.script import CURVE_METRICS, REPORTED
from harness.plan.labels import batch_text, joined
from harness.plan.trial import Columns
from harness.report.row import (
    NOT_EQUIVALENT,
    Row,
    Scalar,
    cell_label,
    is_missing,
    is_not_equivalent,
    is_unverified,
    number,
    rate_unit,
    rows_of,
    setting_without_batch,
    why_excluded,
)
from harness.report.tables.text import (
    CELL,
    NO_BREAK,
    Column,
    TextTable,
    decimal,
    estimate,
    flush_right,
    loss_form,
    make_table,
    percent,
    ranges,
    speed,
    with_ends,
    words,
)

DOUBTFUL = "?"
"""Marks a cell with doubts in a terminal."""
UNVERIFIED = "!"
"""Marks a ratio if the check whether its cells train as one device does has no verdict."""
METRICS = {
    "val_accuracy": ("accuracy", 100.0, "{:.1f}", " %"),
    "train_accuracy": ("training accuracy", 100.0, "{:.1f}", " %"),
    "val_perplexity": ("perplexity", 1.0, "{:.2f}", ""),
    "val_psnr": ("PSNR", 1.0, "{:.1f}", " dB"),
    "val_iou": ("IoU", 100.0, "{:.1f}", " %"),
}
"""Title, factor, format and unit of the metrics of the built-in workloads; other metrics are shown as recorded."""
VALUES = ("train_loss", "val_loss", "time_to_target_s", "samples_to_target")
"""The numbers of a training beside its metrics."""
MOST_EPOCHS = 20
"""The most epochs of a training that are shown."""
MOST_ROWS = 200
MOST_RANKED = 12
"""The most rows of the ranked table, which stands on the first screen."""
SETS = {"train": "training", "val": "validation"}
LOSSES = {"train_loss": "training loss", "val_loss": "validation loss"}
two_digits = decimal("{:.2f}")
rate = decimal("{:.4g}")


def scaling_by_setting(scaling: pd.DataFrame) -> list[tuple[str, TextTable]]:
    """Return the scaling table, for a terminal, in parts that hold the same things fixed, each with its name and base.

    Speedup's interval is left out: it is that of efficiency, times the devices. Unusual doubts are a mark.
    """
    columns = (
        ("strategy", lambda row: cell_label(row) + (f" {DOUBTFUL}" if row.unusual else ""), words),
        (  # a terminal has no space for the range of fewer blocks
            rate_unit(scaling),
            lambda row: with_ends(speed, row.throughput_per_s, row.throughput_low, row.throughput_high),
            flush_right,
        ),
        ("speedup", lambda row: _speedup(row, two_digits(row.speedup)), flush_right),
        (  # with the doubts that take its meaning away
            "efficiency",
            lambda row: "; ".join([_efficiency(row), *(name for name in LOUD if name in row.unusual)]),
            flush_right,
        ),
        ("n", "blocks", flush_right),
    )
    rows_by_setting = grouped(
        _scaling_rows(scaling), lambda row: words(row.setting) or joined(words(row.model), batch_text(row))
    )
    return [
        (f"{name} (base: {', '.join(dict.fromkeys(map(_base, rows)))})", make_table(columns, rows, _kind))
        for name, rows in rows_by_setting.items()
    ]


def scaling_table(scaling: pd.DataFrame, significance: float = SIGNIFICANCE) -> TextTable:
    """Return throughput, speedup and efficiency of each cell against its base, with intervals; n; base; doubts.

    And whether its difference from the base is clear at this ``significance``, and the device time of a million
    samples.
    """
    throughput, speedup, difference, device_time = _decisive_columns(scaling, significance)
    columns = (
        *CELL,
        throughput,
        speedup,
        ("efficiency", _efficiency, flush_right, "efficiency"),
        ("n", "blocks", flush_right),
        difference,
        device_time,
        (f"base ({rate_unit(scaling)})", _base, flush_right),
        ("doubts, by blocks", "unusual", words),
    )
    return make_table(columns, _scaling_rows(scaling), _kind)


def ranked_table(scaling: pd.DataFrame, significance: float = SIGNIFICANCE) -> TextTable:
    """Return the fastest cells of each setting but its batch, the fastest first; what is no claim comes last."""
    settings = grouped(rows_of(scaling), setting_without_batch).values()
    each = max(1, MOST_RANKED // max(1, len(settings)))
    ranked = [sorted(rows, key=lambda row: (_kind(row) == "apart", -number(row.throughput_per_s))) for rows in settings]
    shown = [row for rows in ranked for row in rows[:each]]
    others = [row for rows in ranked for row in rows[each:]]
    columns = (*CELL, *_decisive_columns(scaling, significance))
    most = min(len(shown), MOST_RANKED)
    return make_table(columns, [*shown, *others], _kind, most=most, every="the table Throughput and scaling")


def _decisive_columns(scaling: pd.DataFrame, significance: float) -> tuple[Column, ...]:
    """Return the columns of throughput, speedup, the certainty of the latter, and the device time of samples."""
    unit = rate_unit(scaling)

    def sure(row: Row) -> str:
        return "" if _is_base(row) or is_missing(row.p_value) else word(number(row.p_value), significance)

    def device_time(row: Row) -> str:
        return speed(1e6 * number(row.devices) / number(row.throughput_per_s))

    return (
        (unit, lambda row: estimate(speed, row, "throughput_per_s", "throughput_"), flush_right, "throughput_per_s"),
        ("speedup", lambda row: _speedup(row, estimate(two_digits, row, "speedup")), flush_right, "speedup"),
        ("difference", sure, words),
        (f"device-s a million {unit.removesuffix('/s')}", device_time, flush_right),
    )


def _scaling_rows(scaling: pd.DataFrame) -> list[Row]:
    """Return the rows with each cell's unusual doubts as text; its base has a row of its own."""
    return [Row(row, unusual="; ".join(map(str, row.unusual))) for row in rows_of(scaling)]


def _is_base(row: Row) -> bool:
    return bool(row.cell_id == row.base_id)


def _kind(row: Row) -> str:
    return "base" if _is_base(row) else "apart" if is_no_claim(row) or is_not_equivalent(row) else ""


def _base(row: Row) -> str:
    return f"{row.base_strategy} x{row.base_devices}: {speed(row.base_throughput_per_s)}"


def _speedup(row: Row, text: str) -> str:
    return "1" if _is_base(row) else marked(text, row, in_words=False)


def marked(text: str, row: Row, *, in_words: bool = True) -> str:
    """Return a text with the mark of a row whose cells may not train as one device does, or ``in_words`` do not."""
    if is_unverified(row):
        return f"{text}{NO_BREAK}{UNVERIFIED}"
    return f"{text} ({NOT_EQUIVALENT})" if in_words and is_not_equivalent(row) else text


def _efficiency(row: Row) -> str:
    if _is_base(row):
        return "base"
    if is_missing(row.efficiency):
        return why_excluded(row)
    return marked(estimate(percent, row, "efficiency", "efficiency_"), row)


def convergence_table(convergence: pd.DataFrame) -> TextTable:
    """Return each cell's final losses and metrics, and time and samples to the target, over the seeds."""
    names = [str(name) for name in convergence.columns if str(name).startswith(CURVE_METRICS) and name != "val_loss"]
    metrics = [name for name in names if convergence[name].notna().any()]
    columns: tuple[Column, ...] = (
        ("strategy", lambda row: marked(cell_label(row), row), words),
        ("setting", training_setting, words),
        ("seeds", "seeds", flush_right),
        ("training samples", "training_samples", decimal("{:,.0f}")),
        ("training loss", "train_loss", flush_right, "train_loss_median"),
        ("training accuracy", "train_accuracy", flush_right),
        ("validation loss", "val_loss", flush_right, "val_loss_median"),
        *((metric_title(name).removeprefix("validation "), name, flush_right, f"{name}_median") for name in metrics),
        ("reached target", "reached", flush_right),
        ("time to target (s)", "time_to_target_s", flush_right, "time_to_target_s_median"),
        ("samples to target", "samples_to_target", flush_right, "samples_to_target_median"),
    )
    rows = [_over_seeds(group, metrics) for _, group in convergence.groupby("cell_id", sort=False)]
    return make_table(columns, rows, lambda row: "apart" if is_no_claim(row) else "")


def _over_seeds(group: pd.DataFrame, metrics: list[str]) -> Row:
    """Return the row of a cell: its axes, and the median and ends of what its trainings reached."""
    known = bool(group["reached"].notna().any())
    reached = int(group["reached"].fillna(False).sum())
    row = rows_of(group[:1])[0]
    for name in LOSSES:
        largest = max(filter(math.isfinite, group[name].dropna()), default=0.0)
        row[name] = _span(group[name], loss_form(largest))
    for name in ("train_accuracy", *metrics):
        _, factor, form, suffix = _format_of(name)
        row[name] = _span(group[name] * factor, form, suffix)
    row |= {f"{name}_median": median(_or_infinite(group[name])) for name in (*VALUES, *metrics)}
    return Row(
        row,
        seeds=len(group),
        reached=f"{reached} of {len(group)}" if known else "-",
        time_to_target_s=_to_target(group, "time_to_target_s", "{:.1f}"),
        samples_to_target=_to_target(group, "samples_to_target", "{:,.0f}"),
    )


def _or_infinite(values: pd.Series[float]) -> list[float]:
    """Return the values of the seeds in order, of which a missing one counts as infinite."""
    return sorted(values.astype("Float64").fillna(math.inf).astype(float))


def _to_target(group: pd.DataFrame, name: str, form: str) -> str:
    """Return the median over all seeds, of which a miss counts as infinite, with the least and the largest.

    If the median seed missed the target: the least that its training time can be, '-' for samples.
    """
    values = _or_infinite(group[name])
    if median(values) < math.inf:
        return _spread(values, form).replace(form.format(math.inf), f"not{NO_BREAK}reached")
    least = median(group[name].fillna(group["train_s"]).astype(float)) if name == "time_to_target_s" else math.nan
    return f">= {form.format(least)}" if group["reached"].notna().any() and not math.isnan(least) else "-"


def training_setting(row: Row) -> str:
    """Return what varies in the run besides strategy and devices, and the global batch."""
    return joined(setting_without_batch(row), f"global batch {row.global_batch_size}")


def _span(values: pd.Series[float], form: str, suffix: str = "") -> str:
    known = sorted(values.dropna().astype(float), key=lambda value: (math.isnan(value), value))
    return _spread(known, form, suffix) if known else "-"


def _spread(values: Sequence[float], form: str, suffix: str = "") -> str:
    """Return '4.0 (3.5 to 6.0)', the median of sorted values between the ends."""
    middle = (values[(len(values) - 1) // 2] + values[len(values) // 2]) / 2  # statistics.median would not sort NaN
    ends = f" ({form.format(values[0])}{NO_BREAK}to{NO_BREAK}{form.format(values[-1])})"
    return f"{form.format(middle)}{suffix}{ends * (len(values) > 1)}"


def outcome_table(outcomes: pd.DataFrame) -> TextTable:
    """Return the trials by kind, outcome and reason."""
    columns = (
        ("kind", "kind", words),
        ("outcome", "outcome", words),
        ("trials", "trials", flush_right),
        ("reason", "reason", words),
    )
    return make_table(columns, rows_of(outcomes.sort_values(["kind", "trials"], ascending=[False, False])))


def failure_table(trials: pd.DataFrame, most: int = 50) -> TextTable:
    """Return the trials that neither succeeded nor were skipped, each with its log."""
    columns = (
        ("trial", lambda row: f"{row.label}, {row.trial_id}", words),
        ("attempt", "attempt", flush_right),
        ("outcome", "outcome", words),
        ("reason", "reason", words),
        ("log", "log", words),
    )
    bad = trials[~trials["outcome"].isin(["ok", "skipped"])]
    return make_table(columns, rows_of(bad), most=most, every="tables/trials.csv")


def missing_table(missing: pd.DataFrame, most: int = 50) -> TextTable:
    """Return the planned trials without a result by cell: blocks and reason."""
    columns = (
        ("cell", "label", words),
        ("trials", "trials", flush_right),
        ("blocks", "blocks", words),
        ("reason", "reason", words),
    )
    named = missing.assign(label=missing["label"].fillna(missing["cell_id"]))
    rows = [
        Row(label=label, reason=reason, trials=len(group), blocks=ranges(sorted({*group["block"]})))
        for (label, reason), group in named.groupby(["label", "reason"], sort=False)
    ]
    return make_table(columns, rows, most=most, every="tables/missing.csv")


def epochs_table(epochs: pd.DataFrame, trials: pd.DataFrame) -> TextTable:
    """Return the epochs of each training: losses, metrics and learning rate, and the samples of the training set."""
    own = [name for name in trials.columns if name in KEYS or name not in epochs.columns]
    merged = epochs.merge(trials.loc[trials["kind"] == "convergence", own], on=KEYS, validate="many_to_one")
    columns: tuple[Column, ...] = (
        ("strategy", cell_label, words),
        ("setting", training_setting, words),
        ("seed", "seed", flush_right),
        ("epoch", "epoch", flush_right),
        *((title, name, _loss) for name, title in LOSSES.items()),
        *((metric_title(name), partial(_metric, name), flush_right) for name in _metrics(epochs.columns)),
        ("learning rate", "learning_rate", rate),
        ("training samples", "training_samples", decimal("{:,.0f}")),
    )
    rows = [row for _, group in merged.groupby(KEYS, sort=False) for row in _some(rows_of(group.sort_values("epoch")))]
    return make_table(columns, rows, most=MOST_ROWS, every="epochs.parquet")


def epoch_lines(epochs: Columns) -> list[str]:
    """Return a line an epoch of one training, as its result has them: 'epoch 3: training loss 0.0634, ...'."""
    rows = [Row(zip(epochs, values, strict=True)) for values in zip(*epochs.values(), strict=True)]
    lines = []
    for row in _some(rows):
        values = (
            *(f"{title} {_loss(row[name])}" for name, title in LOSSES.items() if row.get(name) is not None),
            *(f"{metric_title(name)} {_metric(name, row)}" for name in _metrics(row) if not is_missing(row[name])),
            *([] if is_missing(row.learning_rate) else [f"learning rate {rate(row.learning_rate)}"]),
        )
        lines.append(f"epoch {row.epoch:.0f}: {', '.join(values)}")
    return lines


def _loss(value: Scalar) -> str:
    """Return a loss, '-' if it is missing, and 'nan' if the training diverged."""
    return "-" if value is None else loss_form(number(value)).format(number(value))


def _some(rows: Sequence[Row]) -> list[Row]:
    """Return at most MOST_EPOCHS rows, evenly spaced, and of these always the last."""
    every = -(-len(rows) // MOST_EPOCHS)
    return [row for place, row in enumerate(rows, start=1) if (len(rows) - place) % every == 0]


def _metrics(names: Iterable[object]) -> list[str]:
    """Return the metrics among the columns of epochs: of the training set, then of the validation set, then others."""
    found = [str(name) for name in names if name not in (*LOSSES, "train_s")]
    return [name for start in ("train_", *CURVE_METRICS) for name in found if name.startswith(start)]


def metric_title(name: str) -> str:
    """Return the heading of a metric: 'training accuracy', 'validation accuracy', 'reported f1'."""
    of, _, metric = name.partition("_")
    return f"{SETS.get(of, of)} {_format_of(name)[0] or metric}"


def _metric(name: str, row: Row) -> str:
    _, factor, form, suffix = _format_of(name)
    return decimal(form + suffix, factor)(row[name])


def _format_of(name: str) -> tuple[str, float, str, str]:
    """Return title, factor, format and unit of a metric, the same on both sets; reported ones may be percentages."""
    known = "" if name.startswith(REPORTED) else f"val_{name.partition('_')[2]}"
    return METRICS.get(known, ("", 1.0, "{:.4g}", ""))
