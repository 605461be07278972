"""Text table of predicted steps beside measured ones, and the reasons of those that are not predicted."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from harness.analysis.common import grouped
from harness.analysis.prediction.collective_times import LINK_SHARES
from harness.analysis.prediction.observed import Size
from harness.analysis.prediction.predictions import ASSUMED
from harness.plan.labels import devices_text, joined
from harness.report.row import Row, Scalar, is_missing, rows_of, texts
from harness.report.tables.text import NO_BREAK, Column, TextTable, decimal, make_table, percent, speed, words

WIDE = ("cells", "from", "own, ms", "exposed, ms", "other, ms", "Amdahl", "ring line")
DISAGREE = 1.5
"""The largest model's step over the smallest's from which on that is said."""
MILLISECONDS = decimal("{:,.4g}", 1000)


def prediction_table(
    prediction: pd.DataFrame, *, narrow: bool = False, price: float | None = None, currency: str = ""
) -> TextTable:
    """Return each predicted size: measured and predicted step with intervals, error, parts, and simpler laws.

    ``narrow``: for a terminal of 80 columns, without the cells' label, the sizes that it follows from, the parts and
    the laws. ``price``: of a device for an hour, in ``currency``; then with that of a million samples or tokens.
    """

    def of_a_million(row: Row) -> str:
        hours = 1e6 / row.throughput_per_s / 3600
        return f"{speed(price * row.devices * hours)} {currency}".strip() if price else ""

    columns: tuple[Column, ...] = (
        ("cells", family_label, words),
        ("devices", devices_text, words),
        ("from", lambda row: ", ".join(dict.fromkeys(size.split()[0] for size in texts(row.fitted))), words),
        ("measured, ms", _measured, words),
        ("predicted, ms", lambda row: _interval(row.step_s, row.low, row.high), words),
        ("error", lambda row: _signed(row.error), words),
        ("per s", "throughput_per_s", speed),
        ("efficiency", "efficiency", percent),
        ("price of a million", of_a_million, words),
        ("own, ms", "own_s", MILLISECONDS),
        ("exposed, ms", "exposed_s", MILLISECONDS),
        ("other, ms", lambda row: row.other_s + row.data_s, MILLISECONDS),
        ("Amdahl", lambda row: _law(row, row.amdahl_s), words),
        ("ring line", lambda row: _law(row, row.ring_line_s), words),
        ("mark", lambda row: ", ".join(texts(row.marks)), words),
    )
    if narrow:
        columns = tuple(column for column in columns if column[0] not in WIDE)
    rows = rows_of(prediction[prediction["step_s"].notna()])
    return make_table(columns, rows, lambda row: "apart" if row.marks else "")


def prediction_words(prediction: pd.DataFrame) -> str:
    """Return what the table shows, how good held-out sizes were, and why some sizes are not predicted."""
    errors = prediction["error"].dropna().abs().tolist()
    graded = ""
    if errors:
        mean = percent(sum(errors) / len(errors))
        graded = f"Predictions of {len(errors)} measured sizes from smaller ones were {mean} off on average, at most "
        graded += f"{percent(max(errors))}. "
    least, expected, most = (percent(share) for share in LINK_SHARES)
    over = f"An assumed link is taken to reach {expected} ({least} to {most}) of its stated bandwidth; measure it. "
    over *= any(mark.startswith(ASSUMED) for row in rows_of(prediction) for mark in texts(row.marks))
    return (
        f"{graded}Mean step of a new run, with its 95 % prediction interval: the slowest rank's own time, the exchange "
        "that computation does not cover, replayed with measured or assumed collectives, and the rest. Ranks are taken "
        "as alike as those measured: a slower machine is not predicted. Beside it the same by Amdahl's law and by a "
        "cost as (n-1)/n and n-1 (ring line), fitted to the same sizes, over what was measured or, if nothing was, "
        f"over the prediction. {over}{' '.join(refusals(prediction))}"
    ).strip()


def refusals(prediction: pd.DataFrame) -> list[str]:
    """Return a sentence for each reason, with the cells and sizes that are not predicted for it."""
    refused = rows_of(prediction[prediction["refusal"].notna()])
    sizes = {
        key: [Size(row.devices, row.nodes).words for row in rows]
        for key, rows in grouped(refused, lambda row: (family_label(row), row.refusal)).items()
    }
    same = grouped(sizes, lambda key: (", ".join(sizes[key]), key[1]))
    return [
        f"Not predicted: {'; '.join(name for name, _ in alike)} on {of}: {reason}."
        for (of, reason), alike in same.items()
    ]


def disagreements(prediction: pd.DataFrame) -> list[str]:
    """Return a sentence for each family whose models are DISAGREE-fold apart at its largest predicted size."""
    found = []
    for _, family in prediction[prediction["step_s"].notna()].groupby("family_id", sort=False):
        row = max(rows_of(family), key=lambda row: int(row.devices))
        steps = {"predicted": row.step_s, "by Amdahl's law": row.amdahl_s, "by a ring line": row.ring_line_s}
        known = {name: float(step_s) for name, step_s in steps.items() if not is_missing(step_s)}
        apart = max(known.values()) / min(known.values())
        if apart >= DISAGREE:
            each = ", ".join(f"{MILLISECONDS(step_s)} ms {name}" for name, step_s in known.items())
            size = Size(row.devices, row.nodes).words
            found.append(f"{family_label(row)} on {size}: the models disagree {apart:.1f}-fold: {each}.")
    return found


def measured_alone(prediction: pd.DataFrame, devices: Sequence[int]) -> list[str]:
    """Return a sentence for each size among ``devices`` that was measured, and that too few smaller ones predict."""
    return [
        f"Not predicted: {family_label(row)} on {Size(row.devices, row.nodes).words}: it was measured, "
        f"{_measured(row)} ms a step, and a prediction of it needs two smaller measured sizes."
        for row in rows_of(prediction)
        if row.kind == "measured" and row.devices in devices
    ]


def family_label(row: Row) -> str:
    """Return 'ddp · resnet8 · batch 32 per device': what the cells of a curve have in common."""
    return joined(str(row.strategy), str(row.setting), str(row.own_options))


def _measured(row: Row) -> str:
    return _interval(row.measured_s, row.measured_low, row.measured_high)


def _interval(value: Scalar, low: Scalar, high: Scalar) -> str:
    ends = "" if is_missing(low) else f" ({MILLISECONDS(low)} to {MILLISECONDS(high)})"
    return "" if is_missing(value) else f"{MILLISECONDS(value)}{ends}"


def _law(row: Row, step_s: float | None) -> str:
    """Return the error of a law, or its step over the predicted one."""
    of = row.step_s if is_missing(row.measured_s) else row.measured_s
    return _signed(None if is_missing(step_s) or is_missing(of) else step_s / of - 1)


def _signed(share: float | None) -> str:
    return "" if share is None or is_missing(share) else f"{100 * share:+.1f}{NO_BREAK}%"
