"""Schema of the tables that conclude: the fastest settings, the statements of the verdict, and what was tried."""

from __future__ import annotations

from harness.record.schema.derived import CHECKED
from harness.record.schema.table import (
    CELL_COLUMNS,
    INTERVAL,
    UNIT,
    Table,
    ends,
    flag,
    integer,
    paired,
    real,
    string,
    texts,
)

LEADERS = Table(
    "leaders",
    "one setting against the fastest of its group: same model, data, precision, number of devices and global batch",
    string("cell_id", "cell of the setting"),
    string("leader_id", "cell of the fastest setting of the group, by geometric mean over blocks"),
    *CELL_COLUMNS,
    UNIT,
    integer("settings", "number of settings in the group"),
    real("throughput_per_s", "throughput, geometric mean over blocks", "samples/s"),
    *ends("throughput", "samples/s"),
    real("ratio", "throughput over the leader's, geometric mean over the paired blocks"),
    *INTERVAL,
    real("p_value", "two-sided t test of the mean log ratio, adjusted by Holm over the group"),
    flag("tied", "true if p_value is above the level of this look; `<NA>` below three blocks"),
)

VERDICT = Table(
    "verdict",
    "one statement of the verdict, which follows from the other tables by a rule",
    string(
        "topic",
        "incomplete, fastest, fewer, choice, training, scaling, loss, ingest, trust, improved, equivalence, failed or "
        "open",
    ),
    string("code", "which statement of the topic it is, such as faster, leaning or open"),
    string("cell_id", "cell that it is about"),
    texts(
        "others", "further cells: those that cannot be told apart from it, or failed alike; of a choice the other cell"
    ),
    integer("devices", "number of devices"),
    real("value", "its number: throughput, efficiency, ratio, share of the step, seconds"),
    real("low", "lower end of the number's 95 % confidence interval, or its least over seeds"),
    real("high", "upper end of the number's 95 % confidence interval, or its largest over seeds"),
    real("p_value", "of a choice: two-sided t test of the mean log ratio, adjusted by Holm over the choices"),
    integer("n", "number of blocks, seeds, checks, trials or tables; of trust the blocks to add"),
    string("subject", "part of the step, target, outcome, check, or axis with both values"),
    texts(
        "reasons", "reasons, such as doubts, or failed tables; of the fastest the cells with too few blocks in common"
    ),
    string("evidence", "section of the report that shows the numbers"),
)

PUBLISHED = Table(
    "published",
    "one published figure of the experiment file beside what this run measured of the same cell",
    string("cell", "the cell, as the file selects it"),
    string("cell_id", "its id; `<NA>` if it was not measured"),
    *CELL_COLUMNS,
    UNIT,
    string("metric", "column of the table epochs, steps or cells, or running_loss: the mean of the losses so far"),
    integer("epoch", "number of the epoch, from 1; `<NA>` for the last one, and for other metrics"),
    integer("step", "number of the step in its trial, from 1; `<NA>` for other metrics"),
    string("metric_unit", "unit of the numbers; of a throughput as published, else as the workload counts"),
    real("published_low", "published figure, lowest if a range was published"),
    real("published_high", "published figure, highest if a range was published"),
    real("measured", "measured here: mean over seeds, or over blocks; `<NA>` in another unit"),
    real("measured_low", "lowest of the seeds or blocks"),
    real("measured_high", "highest of the seeds or blocks"),
    integer("n", "number of seeds or blocks; without an epoch, of the seeds that did not diverge"),
    real("difference", "measured less the nearer end of what was published, 0 between both"),
    real("relative_difference", "difference over that end"),
    string("source", "where it was published"),
    string("url", "address of the source"),
    string("hardware", "what it was measured on, in the file's words"),
    string("measured_on", "models of the devices of this run"),
    flag("other_hardware", "true unless the file's words name a model of this run's devices"),
)

IMPROVEMENTS = Table(
    "improvements",
    "one setting that --improve tried, against the cell that it is to improve, paired by block",
    string("cell_id", "cell that was tried"),
    string("improved_id", "cell of the run that is to be improved"),
    string(
        "step",
        "screening (one change each) and combination (of those that helped), which make no claim; or confirmation",
    ),
    string("changes", "its axes and options with other values than those of the cell to improve"),
    *CELL_COLUMNS,
    *paired("improved_throughput_per_s", "improved_id", "throughput over that of the cell to improve"),
    *CHECKED,
    flag(
        "kept", "true if it went on to the next step; of a confirmation, if at least 5 blocks have an interval above 1"
    ),
    string("reason", "reason without a ratio"),
    real("wall_s", "wall time of its step", "s"),
)
