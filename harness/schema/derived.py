"""The tables that follow from what was recorded, over blocks and cells."""

from __future__ import annotations

from harness.schema.recorded import AXIS_COLUMNS, TRIAL_COLUMNS
from harness.schema.table import Table
from harness.schema.table import column as _c

_INTERVAL = (
    _c("blocks", "Int64", "trials that the figure rests on (n)"),
    _c("low", "Float64", "lower end of the 95 % interval over blocks; <NA> with one block"),
    _c("high", "Float64", "upper end of the 95 % interval over blocks; <NA> with one block"),
)

CELLS = Table(
    "cells",
    "one cell's speed over its blocks",
    (
        _c("cell_id", "string", "hash of the cell's resolved content"),
        *AXIS_COLUMNS,
        _c("added", "boolean", "a base that the planner added"),
        _c("unit", "string", "what throughput counts: samples or tokens"),
        _c("throughput_per_s", "Float64", "geometric mean over blocks", "samples/s"),
        *_INTERVAL,
        _c("per_device_per_s", "Float64", "throughput of one device", "samples/s"),
        _c("step_s", "Float64", "median of the timed steps of all ranks and blocks", "s"),
        _c("step_p5_s", "Float64", "5th percentile of the timed steps", "s"),
        _c("step_p95_s", "Float64", "95th percentile of the timed steps", "s"),
        _c("wait_fraction", "Float64", "part of the timed steps spent waiting for data; <NA> on CUDA"),
        _c("peak_memory_bytes", "Int64", "largest over blocks and ranks", "bytes"),
        _c("parameters", "Int64", "parameters of the model"),
    ),
)

SCALING = Table(
    "scaling",
    "one cell against its base, paired by block",
    (
        _c("cell_id", "string", "hash of the cell's resolved content"),
        _c("base_id", "string", "cell that it is compared with"),
        *AXIS_COLUMNS,
        _c("unit", "string", "what throughput counts: samples or tokens"),
        _c("base_strategy", "string", "strategy of the base"),
        _c("base_devices", "Int64", "devices of the base"),
        _c("base_throughput_per_s", "Float64", "the base in absolute numbers", "samples/s"),
        _c("throughput_per_s", "Float64", "geometric mean over the paired blocks", "samples/s"),
        _c("speedup", "Float64", "throughput over the base's, geometric mean over blocks"),
        *_INTERVAL,
        _c("precise", "boolean", "the interval is as narrow as throughput.blocks asks; <NA> without a rule"),
        _c("efficiency", "Float64", "speedup over (devices / devices of the base)"),
        _c("efficiency_low", "Float64", "lower end of its 95 % interval"),
        _c("efficiency_high", "Float64", "upper end of its 95 % interval"),
    ),
)

NOISE = Table(
    "noise",
    "one base against its twin, the same cell in a worker group of its own: the noise floor",
    (
        _c("cell_id", "string", "the base"),
        *AXIS_COLUMNS,
        _c("unit", "string", "what throughput counts: samples or tokens"),
        _c("throughput_per_s", "Float64", "geometric mean over the paired blocks", "samples/s"),
        _c("twin_throughput_per_s", "Float64", "the same of the twin", "samples/s"),
        _c("ratio", "Float64", "the twin's throughput over the base's, geometric mean over blocks"),
        *_INTERVAL,
        _c("excludes_one", "boolean", "the interval leaves out 1, as it does by chance in one study of twenty"),
    ),
)

CONVERGENCE = Table(
    "convergence",
    "one training of a cell with one seed",
    (
        *TRIAL_COLUMNS,
        _c("cell_id", "string", "hash of the cell's resolved content"),
        *AXIS_COLUMNS,
        _c("seed", "Int64", "seed of the model and of the order of the data"),
        _c("epochs", "Int64", "epochs trained"),
        _c("train_loss", "Float64", "after the last epoch"),
        _c("val_loss", "Float64", "after the last epoch"),
        _c("val_accuracy", "Float64", "after the last epoch"),
        _c("best_val_accuracy", "Float64", "best over the epochs"),
        _c("target", "string", "what it was to reach"),
        _c("reached", "boolean", "whether it did"),
        _c("time_to_target_s", "Float64", "training clock at the end of the epoch that reached it", "s"),
        _c("samples_to_target", "Int64", "samples until then", "samples"),
        _c("epochs_to_target", "Int64", "epochs until then"),
        _c("train_s", "Float64", "training clock at the end", "s"),
    ),
)

OUTCOMES = Table(
    "outcomes",
    "how many trials of a kind came to an outcome, and why",
    (
        _c("kind", "string", "throughput, convergence or diagnostic"),
        _c("outcome", "string", "ok, oom, diverged, error, timeout, lost or skipped"),
        _c("reason", "string", "why they are not ok"),
        _c("trials", "Int64", "how many"),
    ),
)
