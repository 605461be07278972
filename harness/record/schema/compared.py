"""Schema of the tables over several runs: comparison, gate, history. No run folder holds them."""

from __future__ import annotations

from harness.record.schema.recorded import REASON
from harness.record.schema.table import (
    AXIS_COLUMNS,
    CELL_COLUMNS,
    CELL_ID,
    INTERVAL,
    UNIT,
    Column,
    Table,
    flag,
    integer,
    real,
    string,
    texts,
)

_RUN = string("run", "letter of the later run, from B; A is the first run")

_OF_RUN = (
    string("folder", "run folder"),
    string("experiment", "name of the experiment"),
    real("started_at", "start of the run, as Unix time", "s since 1970"),
    string("git_commit", "commit of the experiment file's folder"),
    flag("finished", "false if planned trials have no result, or the last invocation did not finish"),
)
RUNS = Table(
    "runs",
    "one of the compared runs",
    string("run", "letter of the run, in the order given: A is the first, which others are compared with"),
    *_OF_RUN,
    integer("missing", "number of planned trials without a result"),
    integer("failed", "number of trials that neither succeeded nor were skipped"),
)

COMPARISON = Table(
    "comparison",
    "one cell of a later run against the same cell of the first run",
    _RUN,
    CELL_ID,
    string("first_cell_id", "cell of the first run; another than cell_id only with --by"),
    *AXIS_COLUMNS,
    string("by", "values of the axes of --by, in the first run and in the later one"),
    UNIT,
    real("first_throughput_per_s", "throughput in the first run, geometric mean over blocks", "samples/s"),
    real("throughput_per_s", "throughput in the later run, geometric mean over blocks", "samples/s"),
    integer("first_blocks", "number of blocks in the first run"),
    integer("blocks", "number of blocks in the later run"),
    real("ratio", "throughput in the later run over that in the first"),
    real("low", "lower end of the ratio's 95 % confidence interval over runs; `<NA>` without run noise"),
    real("high", "upper end of the ratio's 95 % confidence interval over runs; `<NA>` without run noise"),
    real("run_noise", "standard deviation of log throughput between runs; if stated, at least that of blocks"),
    integer("earlier_runs", "number of earlier runs that run_noise is estimated from; `<NA>` if it was given"),
    real("p_adjusted", "p-value of a ratio of 1, two-sided, Holm-adjusted over all rows"),
    string("change", "faster or slower if p_adjusted is at most 0.05, else within noise; `<NA>` if not decided"),
    string("reason", "reason if nothing is decided"),
    real("first_speedup", "speedup in the first run, paired by block"),
    real("speedup", "speedup in the later run, paired by block"),
    real("speedup_ratio", "speedup in the later run over that in the first"),
    real("speedup_low", "lower end of its 95 % confidence interval, from earlier runs alone"),
    real("speedup_high", "upper end of its 95 % confidence interval, from earlier runs alone"),
    real("speedup_noise", "standard deviation of the logarithm of the speedup between runs"),
    integer("speedup_runs", "number of earlier runs that speedup_noise is estimated from"),
    texts("doubts", "doubts of the cell in both runs, each with the letter of its run"),
)

GATE = Table(
    "gate",
    "one condition of --fail-if on one cell",
    _RUN,
    CELL_ID,
    *AXIS_COLUMNS,
    string("condition", "condition under which the cell fails"),
    real("ratio", "later run's value over the first run's"),
    real("p_adjusted", "p-value of the threshold, two-sided, Holm-adjusted over all rows with one"),
    string("verdict", "fails or passes if p_adjusted is at most 0.05, by the side of the ratio, or undecided"),
    REASON,
)


def _ends(name: str, unit: str, meaning: str) -> tuple[Column, ...]:
    """Return the columns of a value and of its 95 % prediction interval."""
    of, interval = f"_{unit}" if unit else "", "end of its 95 % prediction interval"
    meanings = {"": meaning, "_low": f"lower {interval}", "_high": f"upper {interval}"}
    return tuple(real(f"{name}{end}{of}", words, unit) for end, words in meanings.items())


DECISION = Table(
    "decision",
    "one number of devices and global batch, with the time and price of a training to a target",
    CELL_ID,
    string("work", "model, data and precision that are trained"),
    *CELL_COLUMNS,
    string("source", "of the throughput: measured, or predicted from smaller numbers of devices"),
    flag("trained", "true if trainings at this global batch were measured; else the law extrapolates"),
    real("throughput_per_s", "throughput", "samples/s"),
    real("samples", "samples to the target by the law E (1 + B / Bc)", "samples"),
    *_ends("time", "s", "time of one training to the target, its start included"),
    real("start_s", "time in which its processes start, as in the run", "s"),
    *_ends("device_hours", "", "devices times hours"),
    *_ends("price", "", "device-hours times the price of one"),
    real("by_samples", "part of the interval's squared width by the samples, the rest by the throughput"),
    flag("on_frontier", "true if no other is at least as fast and as cheap, and better in one"),
    string("reason", "why nothing is said of it"),
)

HISTORY = Table(
    "history",
    "one cell as one run measured it",
    *_OF_RUN,
    string("environment", "hash of hardware, versions and settings of the cell's worker groups"),
    texts("changes", "changes of environment or code since the cell's run before, by start"),
    CELL_ID,
    string("label", "label of the cell: strategy, devices, and the axes and options that vary over all runs"),
    *AXIS_COLUMNS,
    UNIT,
    real("throughput_per_s", "throughput, geometric mean over blocks", "samples/s"),
    *INTERVAL,
    string("base_id", "base cell of the speedup"),
    real("speedup", "throughput over that of the base, paired by block"),
    real("efficiency", "speedup over (devices / devices of the base)"),
    texts("doubts", "doubts of its trials, each with its number of blocks"),
)
