"""Text tables on the evidence: findings, noise, ratios, equivalence, doubts, memory, time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

import pandas as pd

from harness.analysis.common import KEYS, grouped
from harness.analysis.doubts import doubt_of, kind_of, plain_doubt, timed, usual_doubts
from harness.analysis.stats import LEAST_BLOCKS
from harness.plan.labels import joined
from harness.report.row import Row, cell_label, check_label, is_missing, is_true, number, plural, rows_of, settings
from harness.report.tables.ratios import pair_label, pair_setting, parity_label, ratio
from harness.report.tables.scaling import DOUBTFUL, UNVERIFIED
from harness.report.tables.text import (
    CELL,
    TextTable,
    decimal,
    duration,
    first_of,
    flush_right,
    make_table,
    size,
    speed,
    words,
)

NAMED = 6
"""The most cells that a sentence names."""
LEVELS = {"trial": "trials", "group": "worker groups, outside trials", "run": "command, outside worker groups"}
PARTS = ("parameter_bytes", "gradient_bytes", "optimizer_bytes")
OF_RANK = ("cell_id", "peak_memory_bytes", "peak_reserved_bytes")
OF_PROCESS = ("peak_memory_bytes", "peak_reserved_bytes", "build_peak_bytes", "estimated_peak_bytes")
"""The columns that on a CPU are of the whole process."""
SEVERITIES = ("error", "warning", "note")
SAID = ["check", "severity", "means", "advice"]
FINDING_TEXTS = {"place": "place", "observed": "seen", "meaning": "means", "action": "advice"}
"""What a finding says, with its column."""
INTERVALS: Mapping[str, Callable[[Row], str]] = {
    "scaling": lambda row: row.label,
    "versus": lambda row: joined(pair_label(row), pair_setting(row)),
    "parity": lambda row: f"{parity_label(row)} under Ray / torchrun",
    "noise": lambda row: f"{row.label} / its twin",
}
"""The tables whose intervals throughput.blocks sets, each with the label of a row."""


def unverified(equivalence: pd.DataFrame) -> str:
    """Return a sentence on the checks without a verdict, with the cause of each; empty if there are none."""
    unknown = rows_of(equivalence[equivalence["equivalent"].isna()])
    causes = grouped(unknown, lambda row: str(row.reason).removeprefix("unknown: "))
    if not causes:
        return ""
    each = "; ".join(f"{', '.join(dict.fromkeys(map(check_label, rows)))} ({why})" for why, rows in causes.items())
    return f"Equivalence to one device unknown ({UNVERIFIED}): {each}."


def equivalence_table(equivalence: pd.DataFrame) -> TextTable:
    """Return whether each strategy is equivalent to one device."""
    two_digits = decimal("{:.2g} %", 100)
    columns = (
        ("strategy", cell_label, words),
        ("setting", "setting", words),
        ("global batch", "global_batch_size", flush_right),
        ("in", "computed_in", words),
        ("gradient difference", "gradient_difference", two_digits),
        ("first update's", "first_difference", two_digits),
        ("update difference", "difference", two_digits),
        ("verdict", lambda row: "equivalent" if is_true(row.equivalent) else str(row.reason), words),
    )
    return make_table(columns, rows_of(equivalence.assign(setting=settings(equivalence, batch=False))))


def doubt_table(trials: pd.DataFrame) -> TextTable:
    """Return each doubt with its number of timed trials and its meaning."""
    counted = timed(trials)
    columns = (
        ("doubt", "doubt", words),
        ("timed trials", lambda row: f"{row.trials} of {len(counted)}", flush_right, "trials"),
        ("meaning", lambda row: doubt_of(row.doubt).meaning, words),
    )
    counts = Counter(name for names in counted["doubts"] for name in names)
    rows = [{"doubt": name, "trials": count} for name, count in counts.most_common()]
    return make_table(columns, rows)


def usual_words(trials: pd.DataFrame) -> str:
    """Return a sentence on the doubts that are usual in this run, which mark no cell; empty if there are none."""
    usual = usual_doubts(trials)
    if not usual:
        return ""
    each = "; ".join(
        f"{plain_doubt(name)} ({name}, in {count} of {total} timed trials)" for name, (count, total) in usual.items()
    )
    return f"Usual in this run: {each}. A cell is marked ({DOUBTFUL}) for other doubts, or for clearly more."


def stalls_table(stalls: pd.DataFrame) -> TextTable:
    """Return each stalled window with seconds and ranks, and the trial's throughput with and without such windows."""
    columns = (
        ("cell", "label", words),
        ("block", "block", flush_right),
        ("window", "window", flush_right),
        ("stalled", "stalled_s", duration),
        ("median step, s", "step_median_s", decimal("{:.3g}")),
        ("ranks", "waiting_ranks", words),
        ("cause", lambda row: "not known" if is_missing(row.cause) else row.cause, words),
        ("with it, per s", "throughput_per_s", speed),
        ("without, per s", "unstalled_throughput_per_s", speed),
    )
    return make_table(columns, rows_of(stalls))


def ledger_table(ledger: pd.DataFrame) -> TextTable:
    """Return the run's time by part, the largest part first."""
    total = float(ledger["seconds"].sum())
    columns = (
        ("level", lambda row: LEVELS[row.level], words),
        ("part", "part", words),
        ("time", "seconds", duration),
        ("of total", lambda row: row.seconds / total, decimal("{:.1f} %", 100)),
    )
    sums = ledger.groupby(["level", "part"], sort=False)["seconds"].sum().sort_values(ascending=False)
    return make_table(columns, rows_of(sums[sums >= 0.0005 * total].reset_index()))


def memory_table(cells: pd.DataFrame, ranks: pd.DataFrame, trials: pd.DataFrame) -> TextTable:
    """Return peak memory of the rank with the most memory of each cell, and its known parts.

    On a CPU the known parts alone: the peak is that of a process, libraries included, not of the rank's device.
    """

    def rest(row: Row) -> float | None:
        if is_missing(row.peak_memory_bytes):
            return None
        return max(0.0, number(row.peak_memory_bytes) - sum(number(row[part]) for part in PARTS))

    columns = (
        *CELL[:2],
        ("devices", "devices", flush_right),
        ("peak", "peak_memory_bytes", size),
        ("estimated", "estimated_peak_bytes", size),
        ("reserved", "peak_reserved_bytes", size),
        ("parameters", "parameter_bytes", size),
        ("gradients", "gradient_bytes", size),
        ("optimizer", "optimizer_bytes", size),
        ("rest", rest, size),
        ("construction", "build_peak_bytes", size),
    )
    keys = trials[trials["kind"] == "throughput"][[*KEYS, "cell_id"]]
    merged = ranks.merge(keys, on=KEYS).dropna(subset=["peak_memory_bytes"])
    fullest = merged.sort_values("peak_memory_bytes").drop_duplicates("cell_id", keep="last")
    known = fullest.dropna(subset=["parameter_bytes"])[[*OF_RANK, *PARTS]]
    construction = merged.groupby("cell_id", as_index=False)["build_peak_bytes"].max()
    shown = cells.drop(columns="peak_memory_bytes").merge(known, on="cell_id").merge(construction, on="cell_id")
    shown.loc[shown["device"] != "cuda", [*OF_PROCESS]] = None
    return make_table(columns, rows_of(shown))


def imprecise(tables: Mapping[str, pd.DataFrame]) -> str:
    """Return a sentence on the intervals that are wider than the rule for blocks asks; empty if there are none."""
    asked, wide = 0, []
    for name, label in INTERVALS.items():
        claims = [row for row in rows_of(tables[name]) if is_missing(row.get("excluded"))]
        asked += sum(not is_missing(row.precise) for row in claims)
        wide += [label(row) for row in claims if row.precise is False]
    if not wide:
        return ""
    return f"{len(wide)} of {asked} intervals are wider than throughput.blocks asks: {first_of(wide, NAMED)}."


def _aa_test(row: Row, blocks: int | None) -> str:
    """Return 'resnet8: 0.98 to 1.03'; with the blocks that have the base twice, if not all of its ``blocks`` do."""
    label = f"{row.setting}: " if words(row.setting) else ""
    partly = f" (in {row.blocks} of {blocks} blocks)" if blocks and row.blocks and row.blocks < blocks else ""
    return f"{label}{ratio(row.low)} to {ratio(row.high)}{partly}"


def belief_lines(tables: Mapping[str, pd.DataFrame]) -> list[str]:
    """Return the A/A test, the wide intervals and the doubts in a line each, for the end of a run."""
    lines = []
    noise = tables["noise"]
    known = noise[noise["low"].notna()]
    if not known.empty:
        blocks = tables["scaling"].set_index("cell_id")["blocks"]
        tests = "; ".join(_aa_test(row, blocks.get(row.cell_id)) for row in rows_of(known))
        wrong = int(known["excludes_one"].fillna(False).sum())
        chance = f" {wrong} of {len(known)} exclude 1; 1 in 20 does by chance." if wrong else ""
        what = "One setting measured twice, the second over the first (A/A test of the base, 95 % interval)"
        lines.append(f"{what}: {tests}.{chance} Ratios are to the mean of both.")
    elif len(noise):
        lines.append(f"A/A test: without an interval, which needs {LEAST_BLOCKS} blocks.")
    if wide := imprecise(tables):
        lines.append(wide)
    trials = tables["trials"]
    lines += filter(None, (unverified(tables["equivalence"]), usual_words(trials)))
    usual, rows = usual_doubts(trials), [line.cells for line in doubt_table(trials).rows]
    if rest := [f"{plain_doubt(name)} ({name}, in {count})" for name, count, *_ in rows if kind_of(name) not in usual]:
        lines.append(f"Reasons to distrust a number ({DOUBTFUL}), by timed trials: {'; '.join(rest)}.")
    return lines


def findings_table(findings: pd.DataFrame) -> TextTable:
    """Return the findings, errors first; one that several cells share is one row."""
    columns = (
        ("severity", "severity", words),
        ("check", "check", words),
        ("where", "where", words),
        *((title, name, words) for title, name in FINDING_TEXTS.items()),
    )
    return make_table(columns, finding_rows(findings), lambda row: "base" if row.severity == "error" else "")


def finding_rows(findings: pd.DataFrame) -> list[Row]:
    """Return a row for each finding, errors first, with all that was observed, and the places in the user's code.

    ``where``: its cells, 'ddp x2 · resnet8, dp x2 · resnet8', or 'the nodes' for a finding of no cell in particular.
    """
    found = []
    for _, group in findings.groupby(SAID, sort=False):
        rows = rows_of(group)
        where = ("the nodes" if is_missing(row.strategy) else str(row.label) for row in rows)
        places = (row.place for row in rows if not is_missing(row.place))
        seen = "; ".join(dict.fromkeys(str(row.seen) for row in rows))
        found.append(
            Row(rows[0], seen=seen, where=", ".join(dict.fromkeys(where)), place=", ".join(dict.fromkeys(places)))
        )
    return sorted(found, key=lambda row: SEVERITIES.index(row.severity))


def summary_line(findings: pd.DataFrame, examined: int) -> str:
    """Return a line with the number of findings by severity."""
    kinds = [row.severity for row in finding_rows(findings)]
    found = [plural(kinds.count(kind), kind) for kind in SEVERITIES if kind in kinds]
    return f"{plural(examined, 'cell')} examined: {', '.join(found) if found else 'nothing found'}."
