"""Schema of the derived tables, which the analysis computes from recorded trials."""

from __future__ import annotations

from harness.record.schema.recorded import (
    AXIS_COLUMNS,
    COLLECTIVE_COLUMNS,
    HOST_PHASE_COLUMNS,
    PHASE_COLUMNS,
    TRIAL_COLUMNS,
)
from harness.record.schema.table import Table
from harness.record.schema.table import column as _c

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
        _c("achieved_flops_per_s", "Float64", "model FLOPs of one device, forward and backward", "FLOP/s"),
        _c("flops_reason", "string", "why that is absent"),
        _c("mfu", "Float64", "of the published dense peak of the device in this precision; <NA> where that is unknown"),
        _c("peak_source", "string", "where that peak was published"),
        _c("of_measured_peak", "Float64", "achieved over what a matrix product reached on one device of it"),
        _c("doubts", "string", "of its trials, with the number of blocks they are in"),
    ),
)

FINDINGS = Table(
    "findings",
    "one finding of the doctor: of an examined cell, of a skipped one, or of the nodes",
    (
        _c("trial_id", "string", "the examination, where there was one"),
        _c("cell_id", "string", "the cell, where it is one cell's"),
        *AXIS_COLUMNS,
        _c("check", "string", "which check speaks"),
        _c("severity", "string", "error (cells that were examined are then not measured), warning or note"),
        _c("seen", "string", "what was seen, with the numbers"),
        _c("means", "string", "what it means"),
        _c("advice", "string", "what to do"),
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
        _c("throughput_low", "Float64", "lower end of the throughput's own 95 % interval", "samples/s"),
        _c("throughput_high", "Float64", "upper end of the throughput's own 95 % interval", "samples/s"),
        _c("excluded", "string", "why it has no ratio: it is not equivalent to one device"),
        _c("doubts", "string", "of the cell or, marked so, of its base"),
        _c(
            "precise",
            "boolean",
            "the interval is as narrow as throughput.blocks asks; <NA> without a rule and for bases",
        ),
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
        _c("doubts", "string", "of the twin and of the base, each marked so"),
    ),
)

PARITY = Table(
    "parity",
    "one cell under Ray against the same cell under torchrun, the control, paired by block",
    (
        _c("cell_id", "string", "the cell under Ray"),
        _c("control_id", "string", "the cell under torchrun"),
        *AXIS_COLUMNS,
        _c("unit", "string", "what throughput counts: samples or tokens"),
        _c("throughput_per_s", "Float64", "geometric mean over the paired blocks", "samples/s"),
        _c("control_throughput_per_s", "Float64", "the same of the control", "samples/s"),
        _c("ratio", "Float64", "throughput under Ray over the control's, geometric mean over blocks"),
        *_INTERVAL,
        _c("excludes_one", "boolean", "the interval leaves out 1"),
        _c("excluded", "string", "why it has no ratio: it is not equivalent to one device"),
        _c("doubts", "string", "of the cell or, marked so, of its control"),
    ),
)

VERSUS = Table(
    "versus",
    "one strategy on several devices against another (ddp to dp, fsdp to ddp), all else equal, paired by block",
    (
        _c("cell_id", "string", "cell of the strategy"),
        _c("other_id", "string", "cell of the other strategy"),
        *AXIS_COLUMNS,
        _c("other_strategy", "string", "what it is compared with"),
        _c("unit", "string", "what throughput counts: samples or tokens"),
        _c("throughput_per_s", "Float64", "geometric mean over the paired blocks", "samples/s"),
        _c("other_throughput_per_s", "Float64", "the same of the other strategy", "samples/s"),
        _c("ratio", "Float64", "throughput over the other strategy's, geometric mean over blocks"),
        *_INTERVAL,
        _c("excludes_one", "boolean", "the interval leaves out 1"),
        _c("excluded", "string", "why it has no ratio: one of the two is not equivalent to one device"),
        _c("doubts", "string", "of the cell or, marked so, of the other strategy's"),
    ),
)

GPUS = Table(
    "gpus",
    "one cell's GPUs, as NVML tells of them right after the timed windows; no rows without GPUs",
    (
        _c("cell_id", "string", "cell"),
        *AXIS_COLUMNS,
        _c("blocks", "Int64", "trials that it is of"),
        _c("gpu_utilisation", "Float64", "part of the last moments in which a kernel ran, mean"),
        _c("power_w", "Float64", "power of one GPU, mean", "W"),
        _c("sm_clock_fraction", "Float64", "clock over the highest that the GPU has, lowest"),
        _c("temperature_c", "Float64", "hottest", "degree Celsius"),
        _c("throttled", "string", "why clocks were held down in any block; empty where they were not"),
        _c("samples_per_joule", "Float64", "all ranks' samples or tokens over all GPUs' energy, geometric mean"),
    ),
)

EQUIVALENCE = Table(
    "equivalence",
    "the check of one strategy against one device: the same few steps, fp32, without batch statistics and dropout",
    (
        _c("cell_id", "string", "cell of the check"),
        _c("base_id", "string", "one device's check"),
        *AXIS_COLUMNS,
        _c("difference", "Float64", "norm of the difference of both updates over that of one device's"),
        _c("equivalent", "boolean", "at most 1 %; <NA> where it could not be checked"),
        _c("reason", "string", "why not, or why it is unknown"),
    ),
)

PHASES = Table(
    "phases",
    "one cell's step by phase, in seconds a step; the phases add up, what was profiled lies inside them",
    (
        _c("cell_id", "string", "hash of the cell's resolved content"),
        *AXIS_COLUMNS,
        _c("step_s", "Float64", "mean over ranks and blocks", "s"),
        *PHASE_COLUMNS,
        *COLLECTIVE_COLUMNS,
    ),
)

HOST_PHASES = Table(
    "host_phases",
    "what the host did meanwhile, where a GPU computes; not to be added to the GPU's phases",
    (
        _c("cell_id", "string", "hash of the cell's resolved content"),
        *AXIS_COLUMNS,
        _c("step_s", "Float64", "mean over ranks and blocks", "s"),
        *HOST_PHASE_COLUMNS,
    ),
)

WATERFALL = Table(
    "waterfall",
    "one part of the step of one cell on several devices; the shares of a cell add up to 1",
    (
        _c("cell_id", "string", "hash of the cell's resolved content"),
        _c("base_id", "string", "cell whose step is the ideal"),
        *AXIS_COLUMNS,
        _c("position", "Int64", "place in the order in which parts are taken from the ideal"),
        _c("part", "string", "ideal (the efficiency that is left), or what was lost"),
        _c("part_s", "Float64", "seconds of a step, mean over blocks", "s"),
        _c("share", "Float64", "part of the measured step, mean over blocks"),
        _c("blocks", "Int64", "blocks that it rests on (n)"),
        _c("low", "Float64", "lower end of the share's 95 % interval over blocks"),
        _c("high", "Float64", "upper end of the share's 95 % interval over blocks"),
    ),
)

LEDGER = Table(
    "ledger",
    "seconds of one part of a trial, of a worker group beside its trials, or of an invocation beside its groups",
    (
        _c("level", "string", "trial, group or run"),
        _c("invocation", "Int64", "which call of the command"),
        _c("group_id", "string", "worker group"),
        _c("trial_id", "string", "trial"),
        _c("part", "string", "what the time went to"),
        _c("seconds", "Float64", "how long", "s"),
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
        _c("effective_lr", "Float64", "learning rate, scaled with the global batch; after warm-up, before a schedule"),
        _c("epochs", "Int64", "epochs trained"),
        _c("train_loss", "Float64", "after the last epoch"),
        _c("val_loss", "Float64", "after the last epoch"),
        _c("val_accuracy", "Float64", "after the last epoch"),
        _c("val_perplexity", "Float64", "after the last epoch"),
        _c("val_psnr", "Float64", "after the last epoch", "dB"),
        _c("best_val_accuracy", "Float64", "best over the epochs"),
        _c("target", "string", "what it was to reach"),
        _c("reached", "boolean", "whether it did"),
        _c("time_to_target_s", "Float64", "training clock at the end of the epoch that reached it", "s"),
        _c("samples_to_target", "Int64", "samples until then", "samples"),
        _c("epochs_to_target", "Int64", "epochs until then"),
        _c("train_s", "Float64", "training clock at the end", "s"),
        _c("excluded", "string", "why it is not compared with the others: it is not equivalent to one device"),
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

MISSING = Table(
    "missing",
    "one planned trial that has no result",
    (
        _c("trial_id", "string", "which trial: cell and block, or cell and seed"),
        _c("cell_id", "string", "hash of the cell's resolved content"),
        _c("label", "string", "the cell in words"),
        _c("block", "Int64", "repetition of the grid that it belongs to"),
        _c("reason", "string", "why: cut short, or not started"),
    ),
)
