"""Every table's columns, once: name, type, unit, meaning. Frames, axis labels and results/README.md follow it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import pandas as pd

DType = Literal["string", "Int64", "Float64", "boolean"]


@dataclass(frozen=True)
class Column:
    """One column of a table. ``unit`` is empty for names, counts and flags."""

    name: str
    dtype: DType
    unit: str
    meaning: str

    @property
    def label(self) -> str:
        """For axes and headings: 'throughput (samples/s)'."""
        words = self.name.removesuffix("_per_s").removesuffix("_s").removesuffix("_bytes").replace("_", " ")
        return f"{words} ({self.unit})" if self.unit else words


@dataclass(frozen=True)
class Table:
    """A table's name, what one row is, and its columns in order."""

    name: str
    row: str
    columns: tuple[Column, ...]

    @property
    def names(self) -> list[str]:
        return [column.name for column in self.columns]

    def column(self, name: str) -> Column:
        return next(column for column in self.columns if column.name == name)

    def frame(self, rows: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
        """A typed frame of these rows; what a row lacks is <NA>. Columns the table does not know come last."""
        return self.typed(pd.DataFrame(list(rows)))

    def typed(self, frame: pd.DataFrame) -> pd.DataFrame:
        """The frame with every column of the table, in its order and type; further columns come last."""
        extra = [name for name in frame.columns if name not in self.names]
        columns = {
            column.name: (
                frame[column.name] if column.name in frame else pd.Series(pd.NA, index=frame.index, dtype=object)
            ).astype(column.dtype)
            for column in self.columns
        }
        return pd.DataFrame({**columns, **{name: frame[name] for name in extra}}, index=frame.index)


def _c(name: str, dtype: DType, meaning: str, unit: str = "") -> Column:
    return Column(name, dtype, unit, meaning)


_TRIAL = (
    _c("trial_id", "string", "which trial: cell and block, or cell and seed"),
    _c("attempt", "Int64", "1 at first; a lost trial is tried again"),
)

_AXES = (
    _c("workload", "string", "built-in name or package.module:ClassName"),
    _c("data", "string", "data set"),
    _c("model", "string", "model, by its size"),
    _c("strategy", "string", "single, dp, ddp or fsdp"),
    _c("device", "string", "cpu or cuda"),
    _c("devices", "Int64", "GPUs, or CPU slots"),
    _c("nodes", "Int64", "machines"),
    _c("scaling", "string", "weak: per-device batch fixed; strong: global batch fixed"),
    _c("per_device_batch_size", "Int64", "batch of one device", "samples"),
    _c("global_batch_size", "Int64", "batch of all devices", "samples"),
    _c("precision", "string", "fp32 (TF32 off), tf32, or bf16 autocast"),
    _c("compile", "boolean", "torch.compile"),
    _c("oversubscribed", "boolean", "several ranks share a device: a rehearsal, never a claim about speed"),
    _c("emulated", "boolean", "DataParallel on CPU slots: a rehearsal, never a claim about speed"),
    _c("options", "string", "strategy, workload, optimizer, schedule and loader options, as JSON"),
)

TRIALS = Table(
    "trials",
    "one trial, whatever became of it; a retried trial has one row an attempt",
    (
        *_TRIAL,
        _c("cell_id", "string", "hash of the cell's resolved content"),
        _c("base_id", "string", "cell that its ratios are planned against"),
        _c("kind", "string", "throughput or convergence"),
        _c("block", "Int64", "repetition of the grid that it belongs to"),
        _c("seed", "Int64", "seed of the model and of the order of the data"),
        _c("sitting", "Int64", "0 for the first call, one more at each resume; ratios pair inside a sitting"),
        _c("group_id", "string", "worker group: the processes it shared with other trials"),
        _c("position", "Int64", "place in its worker group's order"),
        _c("added", "boolean", "a base that the planner added"),
        _c("outcome", "string", "ok, oom, diverged, error, timeout, lost or skipped"),
        _c("reason", "string", "why it is not ok"),
        _c("error_type", "string", "type of the exception"),
        _c("error_rank", "Int64", "rank that raised first"),
        _c("log", "string", "file under the run folder with the whole traceback"),
        *_AXES,
        _c("unit", "string", "what throughput counts: samples or tokens"),
        _c("parameters", "Int64", "parameters of the model"),
        _c("throughput_per_s", "Float64", "all ranks' samples over the slowest rank's time", "samples/s"),
        _c("step_s", "Float64", "median step time over the timed steps of all ranks", "s"),
        _c("wait_fraction", "Float64", "part of the timed steps spent waiting for data; <NA> on CUDA"),
        _c(
            "peak_memory_bytes",
            "Int64",
            "largest over ranks: allocated on the GPU, or resident on a CPU",
            "bytes",
        ),
        _c("timed_steps", "Int64", "steps in timed windows"),
        _c("started_at", "Float64", "start of the trial", "s since 1970"),
        _c("trial_s", "Float64", "whole time inside the worker group", "s"),
        _c("steps_s", "Float64", "part of it spent in warm-up, windows or training epochs", "s"),
    ),
)

WINDOWS = Table(
    "windows",
    "one window of one rank; window 0 is the warm-up",
    (
        *_TRIAL,
        _c("rank", "Int64", "rank in the worker group"),
        _c("window", "Int64", "number of the window"),
        _c("warmup", "boolean", "not counted"),
        _c("duration_s", "Float64", "between the two device syncs", "s"),
        _c("steps", "Int64", "optimizer steps"),
        _c("weight", "Float64", "samples or tokens that this rank trained on"),
    ),
)

RANKS = Table(
    "ranks",
    "one rank of one trial: where it ran",
    (
        *_TRIAL,
        _c("rank", "Int64", "rank in the worker group"),
        _c("local_rank", "Int64", "rank on its node"),
        _c("node_rank", "Int64", "number of its node in the worker group"),
        _c("node_id", "string", "Ray's id of the node"),
        _c("address", "string", "the node's network address"),
        _c("host", "string", "name of the machine"),
        _c("devices", "string", "devices this rank drives"),
        _c("threads", "Int64", "torch's intra-op threads"),
        _c("peak_memory_bytes", "Int64", "allocated on the GPU, or resident on a CPU", "bytes"),
        _c("peak_reserved_bytes", "Int64", "held by the GPU's allocator", "bytes"),
    ),
)

STEPS = Table(
    "steps",
    "one optimizer step of one rank in a throughput trial",
    (
        *_TRIAL,
        _c("rank", "Int64", "rank in the worker group"),
        _c("window", "Int64", "number of the window; 0 is the warm-up"),
        _c("step", "Int64", "number of the step in its window"),
        _c("warmup", "boolean", "not counted"),
        _c("step_s", "Float64", "whole step, data included", "s"),
        _c("wait_s", "Float64", "part of it that waited for data", "s"),
        _c("loss", "Float64", "mean loss over this rank's part of the batch"),
    ),
)

EPOCHS = Table(
    "epochs",
    "one epoch of a convergence trial",
    (
        *_TRIAL,
        _c("epoch", "Int64", "number of the epoch, from 1"),
        _c("samples", "Int64", "samples trained on so far", "samples"),
        _c("train_s", "Float64", "training clock so far: the slowest rank's, evaluation excluded", "s"),
        _c("evaluation_s", "Float64", "evaluation after this epoch", "s"),
        _c("train_loss", "Float64", "mean training loss over the epoch"),
        _c("val_loss", "Float64", "mean validation loss, each sample exactly once"),
        _c("val_accuracy", "Float64", "part of the validation samples that is classified rightly"),
    ),
)

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
        *_AXES,
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
        *_AXES,
        _c("unit", "string", "what throughput counts: samples or tokens"),
        _c("base_strategy", "string", "strategy of the base"),
        _c("base_devices", "Int64", "devices of the base"),
        _c("base_throughput_per_s", "Float64", "the base in absolute numbers", "samples/s"),
        _c("throughput_per_s", "Float64", "geometric mean over the paired blocks", "samples/s"),
        _c("speedup", "Float64", "throughput over the base's, geometric mean over blocks"),
        *_INTERVAL,
        _c("efficiency", "Float64", "speedup over (devices / devices of the base)"),
        _c("efficiency_low", "Float64", "lower end of its 95 % interval"),
        _c("efficiency_high", "Float64", "upper end of its 95 % interval"),
    ),
)

CONVERGENCE = Table(
    "convergence",
    "one training of a cell with one seed",
    (
        *_TRIAL,
        _c("cell_id", "string", "hash of the cell's resolved content"),
        *_AXES,
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
        _c("kind", "string", "throughput or convergence"),
        _c("outcome", "string", "ok, oom, diverged, error, timeout, lost or skipped"),
        _c("reason", "string", "why they are not ok"),
        _c("trials", "Int64", "how many"),
    ),
)

RECORDED = (TRIALS, WINDOWS, RANKS, STEPS, EPOCHS)
DERIVED = (CELLS, SCALING, CONVERGENCE, OUTCOMES)
AXES = tuple(column.name for column in _AXES)
