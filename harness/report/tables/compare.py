"""Text tables and sentences of a comparison of several runs, for the terminal, the page and Markdown."""

from __future__ import annotations

import time

from harness.analysis.common import is_no_claim
from harness.analysis.compare import FAILS, FASTER, SLOWER, Comparison
from harness.plan.labels import Labels, joined
from harness.report.row import Row, Scalar, is_missing, is_true, number, plural, rate_unit, rows_of
from harness.report.tables.ratios import ratio
from harness.report.tables.scaling import METRICS
from harness.report.tables.text import (
    NO_BREAK,
    Column,
    TextTable,
    decimal,
    flush_right,
    make_table,
    speed,
    with_ends,
    words,
)

NO_CLAIM, NOT_DECIDED = "no claim", "undecided"
METHOD = (
    "Ratio of throughputs, later run over first. Blocks inside a run are no replicates of the run: on the logarithm, "
    "the half-width of the 95 % interval is t(k - 1) s sqrt(2), with s the standard deviation of the cell's log "
    "throughput between k earlier runs in the same environment. A stated s has the normal quantile; if s between the "
    "blocks inside both runs gives a wider interval, that is taken: what runs differ by beyond it, earlier runs alone "
    "show. A change is claimed if 1 is rejected at 5 % after Holm's adjustment over all rows. Speedups are paired by "
    "block inside each run."
)

GATE_METHOD = (
    "A cell fails, or passes, if its threshold is rejected at 5 % after Holm's adjustment over all rows; else it is "
    "undecided. Emulated, oversubscribed and faulty cells have no row: their speed is no claim."
)
CONVERGENCE_METHOD = (
    "Medians over the seeds that both runs trained, and the mean difference with its t interval over seeds. Times have "
    "no interval: seeds are no replicates of a run's speed."
)


def labels_of(comparison: Comparison) -> Labels:
    """Return the labels of the compared cells, which name what differs among them."""
    return Labels([*rows_of(comparison.cells), *rows_of(comparison.unmatched), *rows_of(comparison.convergence)])


def runs_table(comparison: Comparison) -> TextTable:
    """Return the compared runs: folder, start, commit, and whether they are finished."""
    columns = (
        ("run", "run", words),
        ("folder", "folder", words),
        ("started", lambda row: start_text(row.started_at), words),
        ("commit", lambda row: words(row.git_commit)[:12], words),
        ("state", run_state, words),
    )
    return make_table(columns, rows_of(comparison.runs))


def start_text(seconds: object) -> str:
    """Return a Unix time as local time, '2026-11-24 04:10'; 'unknown' if it is missing."""
    if not isinstance(seconds, int | float) or seconds != seconds:
        return "unknown"
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def run_state(run: Row) -> str:
    """Return whether a run is finished, and how many of its trials failed."""
    parts = [
        "finished" if is_true(run.finished) else "unfinished",
        f"{plural(run.missing, 'trial')} without a result" * (run.missing > 0),
        f"{run.failed} failed" * (run.failed > 0),
    ]
    return ", ".join(filter(None, parts))


def run_lines(comparison: Comparison) -> list[str]:
    """Return the compared runs for a terminal, two lines each."""
    lines = []
    for run in rows_of(comparison.runs):
        commit = "" if is_missing(run.git_commit) else f", commit {run.git_commit[:12]}"
        lines += [f"{run.run}  {run.folder}", f"   {start_text(run.started_at)}{commit}, {run_state(run)}"]
    return lines


def cell_tables(comparison: Comparison) -> list[tuple[str, TextTable]]:
    """Return the cells of each later run, for a terminal, in parts of one setting, each with its title.

    Settings of one cell each are no parts: the label of the cell names the setting.
    """
    labels, rows = labels_of(comparison), rows_of(comparison.cells)
    settings = [labels.parts(row)[1] for row in rows]
    if len({*settings}) * (len(comparison.runs) - 1) >= len(rows):
        settings = [""] * len(rows)
    parts: dict[str, list[Row]] = {}
    for row, setting in zip(rows, settings, strict=True):
        title = joined(f"{row.run} / A", setting, words(row.by), f"A in {rate_unit(comparison.cells)}")
        label = labels.of(row)
        short = label.replace(f" · {setting}", "", 1) if setting else label  # the setting stands above
        parts.setdefault(title, []).append(Row(row, label=short))
    columns = (
        ("cell", "label", words),
        ("A", "first_throughput_per_s", speed),
        ("ratio (95 %)", ratio_text, flush_right),
        ("speedups", "speedup_ratio", ratio),
        ("change", _change_text, words),
    )
    return [(title, make_table(columns, part, kind)) for title, part in parts.items()]


def cell_table(comparison: Comparison) -> TextTable:
    """Return the cells of every later run against the first, with both throughputs."""
    unit = rate_unit(comparison.cells)
    columns = (
        *_letters(comparison),
        ("cell", labels_of(comparison).of, words),
        *((("compared by", "by", words),) if comparison.question.by else ()),
        (f"A ({unit})", "first_throughput_per_s", speed),
        (f"later ({unit})", "throughput_per_s", speed),
        ("ratio (95 %)", ratio_text, flush_right),
        ("speedups", lambda row: with_ends(ratio, row.speedup_ratio, row.speedup_low, row.speedup_high), flush_right),
        ("change", _change_text, words),
        ("reason", "reason", words),
    )
    keys = {"ratio (95 %)": "ratio", "speedups": "speedup_ratio"}
    return make_table(columns, rows_of(comparison.cells), kind, keys=keys)


def _letters(comparison: Comparison) -> tuple[Column, ...]:
    """Return the column of the later run's letter, if there are several later runs."""
    return (("run", "run", words),) if len(comparison.runs) > 2 else ()


def change(row: Row) -> str:
    """Return what is claimed of a cell: slower, faster, within noise, undecided, or no claim."""
    if not is_missing(row.change):
        return str(row.change)
    return NO_CLAIM if is_no_claim(row) else NOT_DECIDED


def _change_text(row: Row) -> str:
    return change(row).replace(" ", NO_BREAK)


def kind(row: Row) -> str:
    """Return the style of a cell's line: 'apart' for a rehearsal, 'base' for a claimed change."""
    return "apart" if is_no_claim(row) else "base" if change(row) in (SLOWER, FASTER) else ""


def ratio_text(row: Row) -> str:
    """Return a cell's ratio with its interval, if there is one."""
    return with_ends(ratio, row.ratio, row.low, row.high)


def gate_table(comparison: Comparison) -> TextTable:
    """Return the verdict of each condition of --fail-if on each cell."""

    def p_value(value: Scalar) -> str:
        return "-" if is_missing(value) else "< 0.001" if number(value) < 0.001 else f"{number(value):.3f}"

    columns = (
        *_letters(comparison),
        ("cell", labels_of(comparison).of, words),
        ("fails if", "condition", words),
        ("ratio", "ratio", ratio),
        ("p (Holm)", "p_adjusted", p_value),
        ("verdict", "verdict", words),
        ("reason", "reason", words),
    )
    return make_table(columns, rows_of(comparison.gate), lambda row: "base" if row.verdict == FAILS else "")


def unmatched_table(comparison: Comparison) -> TextTable:
    """Return the cells that only one of both runs has measured."""
    columns = (
        ("compared with A", "run", words),
        ("measured in", "measured_in", words),
        ("cell", labels_of(comparison).of, words),
        ("reason", "reason", words),
    )
    return make_table(columns, rows_of(comparison.unmatched))


def convergence_table(comparison: Comparison, *, narrow: bool = False) -> TextTable:
    """Return each metric of the trainings in both runs; ``narrow``, for a terminal: without training loss, reasons."""
    rows = [row for row in rows_of(comparison.convergence) if not (narrow and row.metric == "train_loss")]

    def form_of(row: Row) -> tuple[str, float, str, str]:
        return METRICS.get(row.metric, (row.metric, 1.0, "{:.4g}", ""))

    def value(row: Row, name: str) -> str:
        _, factor, form, unit = form_of(row)
        return decimal(form + unit, factor)(row[name])

    def difference(row: Row) -> str:
        _, factor, _, unit = form_of(row)
        return with_ends(decimal("{:+.3g}", factor), row.difference, row.low, row.high) + unit

    columns = (
        *_letters(comparison),
        ("cell", labels_of(comparison).of, words),
        ("metric", lambda row: form_of(row)[0], words),
        ("A", lambda row: value(row, "first"), flush_right),
        ("later", lambda row: value(row, "later"), flush_right),
        ("later - A (95 %)", difference, flush_right),
        ("n", "seeds", flush_right),
        *(() if narrow else (("reason", "reason", words),)),
    )
    return make_table(columns, rows)


def environment_table(comparison: Comparison, *, differing: bool = False) -> TextTable:
    """Return the environments side by side; ``differing``: only the facts that differ."""
    letters = [str(run) for run in comparison.runs["run"]]
    facts = [fact for fact in comparison.environment if fact.differs or not differing]
    columns = (("", "name", words), *((letter, letter, words) for letter in letters))
    rows = [Row(zip(letters, fact.values, strict=True), name=fact.name, differs=fact.differs) for fact in facts]
    return make_table(columns, rows, lambda row: "base" if row.differs else "")
