"""Schema of the tables over several runs: comparison, gate, history. No run folder holds them."""

from __future__ import annotations

from harness.record.schema.recorded import REASON
from harness.record.schema.table import AXIS_COLUMNS, CELL_COLUMNS, CELL_ID, INTERVAL, UNIT, Column, Table
from harness.record.schema.table import column as _c

_RUN = _c("run", "string", "letter of the later run, from B; A is the first run")

_OF_RUN = (
    _c("folder", "string", "run folder"),
    _c("experiment", "string", "name of the experiment"),
    _c("started_at", "Float64", "start of the run, as Unix time", "s since 1970"),
    _c("git_commit", "string", "commit of the experiment file's folder"),
    _c("finished", "boolean", "false if planned trials have no result, or the last invocation did not finish"),
)
RUNS = Table(
    "runs",
    "one of the compared runs",
    (
        _c("run", "string", "letter of the run, in the order given: A is the first, which others are compared with"),
        *_OF_RUN,
        _c("missing", "Int64", "number of planned trials without a result"),
        _c("failed", "Int64", "number of trials that neither succeeded nor were skipped"),
    ),
)

COMPARISON = Table(
    "comparison",
    "one cell of a later run against the same cell of the first run",
    (
        _RUN,
        CELL_ID,
        _c("first_cell_id", "string", "cell of the first run; another than cell_id only with --by"),
        *AXIS_COLUMNS,
        _c("by", "string", "values of the axes of --by, in the first run and in the later one"),
        UNIT,
        _c("first_throughput_per_s", "Float64", "throughput in the first run, geometric mean over blocks", "samples/s"),
        _c("throughput_per_s", "Float64", "throughput in the later run, geometric mean over blocks", "samples/s"),
        _c("first_blocks", "Int64", "number of blocks in the first run"),
        _c("blocks", "Int64", "number of blocks in the later run"),
        _c("ratio", "Float64", "throughput in the later run over that in the first"),
        _c("low", "Float64", "lower end of the ratio's 95 % confidence interval over runs; `<NA>` without run noise"),
        _c("high", "Float64", "upper end of the ratio's 95 % confidence interval over runs; `<NA>` without run noise"),
        _c(
            "run_noise",
            "Float64",
            "standard deviation of log throughput between runs; if stated, at least that of blocks",
        ),
        _c("earlier_runs", "Int64", "number of earlier runs that run_noise is estimated from; `<NA>` if it was given"),
        _c("p_adjusted", "Float64", "p-value of a ratio of 1, two-sided, Holm-adjusted over all rows"),
        _c(
            "change",
            "string",
            "faster or slower if p_adjusted is at most 0.05, else within noise; `<NA>` if not decided",
        ),
        _c("reason", "string", "reason if nothing is decided"),
        _c("first_speedup", "Float64", "speedup in the first run, paired by block"),
        _c("speedup", "Float64", "speedup in the later run, paired by block"),
        _c("speedup_ratio", "Float64", "speedup in the later run over that in the first"),
        _c("speedup_low", "Float64", "lower end of its 95 % confidence interval, from earlier runs alone"),
        _c("speedup_high", "Float64", "upper end of its 95 % confidence interval, from earlier runs alone"),
        _c("speedup_noise", "Float64", "standard deviation of the logarithm of the speedup between runs"),
        _c("speedup_runs", "Int64", "number of earlier runs that speedup_noise is estimated from"),
        _c("doubts", "list", "doubts of the cell in both runs, each with the letter of its run"),
    ),
)

GATE = Table(
    "gate",
    "one condition of --fail-if on one cell",
    (
        _RUN,
        CELL_ID,
        *AXIS_COLUMNS,
        _c("condition", "string", "condition under which the cell fails"),
        _c("ratio", "Float64", "later run's value over the first run's"),
        _c("p_adjusted", "Float64", "p-value of the threshold, two-sided, Holm-adjusted over all rows with one"),
        _c(
            "verdict", "string", "fails or passes if p_adjusted is at most 0.05, by the side of the ratio, or undecided"
        ),
        REASON,
    ),
)


def _ends(name: str, unit: str, meaning: str) -> tuple[Column, ...]:
    """Return the columns of a value and of its 95 % prediction interval."""
    of, interval = f"_{unit}" if unit else "", "end of its 95 % prediction interval"
    meanings = {"": meaning, "_low": f"lower {interval}", "_high": f"upper {interval}"}
    return tuple(_c(f"{name}{end}{of}", "Float64", words, unit) for end, words in meanings.items())


DECISION = Table(
    "decision",
    "one number of devices and global batch, with the time and price of a training to a target",
    (
        CELL_ID,
        _c("work", "string", "model, data and precision that are trained"),
        *CELL_COLUMNS,
        _c("source", "string", "of the throughput: measured, or predicted from smaller numbers of devices"),
        _c("trained", "boolean", "true if trainings at this global batch were measured; else the law extrapolates"),
        _c("throughput_per_s", "Float64", "throughput", "samples/s"),
        _c("samples", "Float64", "samples to the target by the law E (1 + B / Bc)", "samples"),
        *_ends("time", "s", "time of one training to the target, its start included"),
        *_ends("device_hours", "", "devices times hours"),
        *_ends("price", "", "device-hours times the price of one"),
        _c(
            "by_samples",
            "Float64",
            "part of the interval's squared width by the samples, the rest by the throughput",
        ),
        _c("on_frontier", "boolean", "true if no other is at least as fast and as cheap, and better in one"),
        _c("reason", "string", "why nothing is said of it"),
    ),
)

HISTORY = Table(
    "history",
    "one cell as one run measured it",
    (
        *_OF_RUN,
        _c("environment", "string", "hash of hardware, versions and settings of the cell's worker groups"),
        _c("changes", "list", "changes of environment or code since the cell's run before, by start"),
        CELL_ID,
        _c("label", "string", "label of the cell: strategy, devices, and the axes and options that vary over all runs"),
        *AXIS_COLUMNS,
        UNIT,
        _c("throughput_per_s", "Float64", "throughput, geometric mean over blocks", "samples/s"),
        *INTERVAL,
        _c("base_id", "string", "base cell of the speedup"),
        _c("speedup", "Float64", "throughput over that of the base, paired by block"),
        _c("efficiency", "Float64", "speedup over (devices / devices of the base)"),
        _c("doubts", "list", "doubts of its trials, each with its number of blocks"),
    ),
)
