"""Schema of the table of predictions, and of the recorded exchanges that they replay."""

from __future__ import annotations

from harness.plan.rows import ExchangeRow
from harness.record.schema.table import CELL_COLUMNS, CELL_ID, Table, columns_of
from harness.record.schema.table import column as _c

_DESCRIBED = tuple(column for column in CELL_COLUMNS if column.name != "label")

PREDICTION = Table(
    "prediction",
    "one size of the cells that differ in their devices alone, predicted from smaller ones",
    (
        _c("family_id", "string", "hash of what the cells have in common"),
        *_DESCRIBED,
        _c("kind", "string", "measured; held out: predicted from smaller sizes too; asked: predicted alone"),
        _c("fitted", "list", "sizes from which it was predicted"),
        _c("measured_s", "Float64", "measured step time, mean over blocks", "s"),
        _c("measured_low", "Float64", "lower end of its 95 % confidence interval", "s"),
        _c("measured_high", "Float64", "upper end of its 95 % confidence interval", "s"),
        _c("step_s", "Float64", "predicted mean step time of a new run; `<NA>` if it is refused", "s"),
        _c("low", "Float64", "lower end of the 95 % prediction interval", "s"),
        _c("high", "Float64", "upper end of the 95 % prediction interval", "s"),
        _c("error", "Float64", "predicted over measured step time, less 1"),
        _c("throughput_per_s", "Float64", "predicted throughput", "samples/s"),
        _c("own_s", "Float64", "of the predicted step: computation of the slowest rank", "s"),
        _c("exposed_s", "Float64", "of the predicted step: exchange that no computation covers", "s"),
        _c("data_s", "Float64", "of the predicted step: waiting for data", "s"),
        _c("other_s", "Float64", "of the predicted step: the optimizer of sharded parameters, and the rest", "s"),
        _c("ideal_s", "Float64", "step time without any loss", "s"),
        _c("amdahl_s", "Float64", "step time by Amdahl's law, fitted to the same sizes", "s"),
        _c("ring_line_s", "Float64", "step time by a cost as (n-1)/n and one as n-1, fitted to the same sizes", "s"),
        _c("marks", "list", "far: beyond 8 times the largest measured size; emulated, faulty: no claim about speed"),
        _c("refusal", "string", "why it is not predicted, and what to measure; `<NA>` if it is"),
    ),
)

EXCHANGES = Table(
    "exchanges",
    "one collective of a step, in the order of their calls",
    (
        _c("trial_id", "string", "trial after whose timed windows it was recorded"),
        CELL_ID,
        *CELL_COLUMNS,
        *columns_of(ExchangeRow),
    ),
)
