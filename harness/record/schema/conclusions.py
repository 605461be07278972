"""Schema of the tables that conclude: the fastest settings, the statements of the verdict, and what was tried."""

from __future__ import annotations

from harness.record.schema.derived import CHECKED
from harness.record.schema.table import CELL_COLUMNS, INTERVAL, UNIT, Table, ends, paired
from harness.record.schema.table import column as _c

LEADERS = Table(
    "leaders",
    "one setting against the fastest of its group: same model, data, precision, number of devices and global batch",
    (
        _c("cell_id", "string", "cell of the setting"),
        _c("leader_id", "string", "cell of the fastest setting of the group, by geometric mean over blocks"),
        *CELL_COLUMNS,
        UNIT,
        _c("settings", "Int64", "number of settings in the group"),
        _c("throughput_per_s", "Float64", "throughput, geometric mean over blocks", "samples/s"),
        *ends("throughput", "samples/s"),
        _c("ratio", "Float64", "throughput over the leader's, geometric mean over the paired blocks"),
        *INTERVAL,
        _c("p_value", "Float64", "two-sided t test of the mean log ratio, adjusted by Holm over the group"),
        _c("tied", "boolean", "true if p_value is above the level of this look; `<NA>` below three blocks"),
    ),
)

VERDICT = Table(
    "verdict",
    "one statement of the verdict, which follows from the other tables by a rule",
    (
        _c(
            "topic",
            "string",
            "incomplete, fastest, fewer, choice, training, scaling, loss, ingest, trust, equivalence, failed or open",
        ),
        _c("code", "string", "which statement of the topic it is, such as faster, leaning or open"),
        _c("cell_id", "string", "cell that it is about"),
        _c(
            "others",
            "list",
            "further cells: those that cannot be told apart from it, or failed alike; of a choice the other cell",
        ),
        _c("devices", "Int64", "number of devices"),
        _c("value", "Float64", "its number: throughput, efficiency, ratio, share of the step, seconds"),
        _c("low", "Float64", "lower end of the number's 95 % confidence interval, or its least over seeds"),
        _c("high", "Float64", "upper end of the number's 95 % confidence interval, or its largest over seeds"),
        _c(
            "p_value",
            "Float64",
            "of a choice: two-sided t test of the mean log ratio, adjusted by Holm over the choices",
        ),
        _c("n", "Int64", "number of blocks, seeds, checks, trials or tables; of trust the blocks to add"),
        _c("subject", "string", "part of the step, target, outcome, check, or axis with both values"),
        _c(
            "reasons",
            "list",
            "reasons, such as doubts, or failed tables; of the fastest the cells with too few blocks in common",
        ),
        _c("evidence", "string", "section of the report that shows the numbers"),
    ),
)

PUBLISHED = Table(
    "published",
    "one published figure of the experiment file beside what this run measured of the same cell",
    (
        _c("cell", "string", "the cell, as the file selects it"),
        _c("cell_id", "string", "its id; `<NA>` if it was not measured"),
        *CELL_COLUMNS,
        UNIT,
        _c(
            "metric",
            "string",
            "column of the table epochs, steps or cells, or running_loss: the mean of the losses so far",
        ),
        _c("epoch", "Int64", "number of the epoch, from 1; `<NA>` for the last one, and for other metrics"),
        _c("step", "Int64", "number of the step in its trial, from 1; `<NA>` for other metrics"),
        _c("metric_unit", "string", "unit of the numbers; of a throughput as published, else as the workload counts"),
        _c("published_low", "Float64", "published figure, lowest if a range was published"),
        _c("published_high", "Float64", "published figure, highest if a range was published"),
        _c("measured", "Float64", "measured here: mean over seeds, or over blocks; `<NA>` in another unit"),
        _c("measured_low", "Float64", "lowest of the seeds or blocks"),
        _c("measured_high", "Float64", "highest of the seeds or blocks"),
        _c("n", "Int64", "number of seeds or blocks; without an epoch, of the seeds that did not diverge"),
        _c("difference", "Float64", "measured less the nearer end of what was published, 0 between both"),
        _c("relative_difference", "Float64", "difference over that end"),
        _c("source", "string", "where it was published"),
        _c("url", "string", "address of the source"),
        _c("hardware", "string", "what it was measured on, in the file's words"),
        _c("measured_on", "string", "models of the devices of this run"),
        _c("other_hardware", "boolean", "true unless the file's words name a model of this run's devices"),
    ),
)

IMPROVEMENTS = Table(
    "improvements",
    "one setting that --improve tried, against the cell that it is to improve, paired by block",
    (
        _c("cell_id", "string", "cell that was tried"),
        _c("improved_id", "string", "cell of the run that is to be improved"),
        _c(
            "step",
            "string",
            "screening (one change each) and combination (of those that helped), which make no claim; or confirmation",
        ),
        _c("changes", "string", "its axes and options with other values than those of the cell to improve"),
        *CELL_COLUMNS,
        *paired("improved_throughput_per_s", "improved_id", "throughput over that of the cell to improve"),
        *CHECKED,
        _c(
            "kept",
            "boolean",
            "true if it went on to the next step; of a confirmation, if at least 5 blocks have an interval above 1",
        ),
        _c("reason", "string", "reason without a ratio"),
        _c("wall_s", "Float64", "wall time of its step", "s"),
    ),
)
