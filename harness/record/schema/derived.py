"""Schema of the derived tables, which the analysis computes from recorded trials."""

from __future__ import annotations

from harness.plan.rows import ExchangeRow, FindingRow, LinkRow
from harness.record.schema import recorded
from harness.record.schema.table import (
    CELL_COLUMNS,
    CELL_ID,
    INTERVAL,
    P_VALUE,
    PAIRED_THROUGHPUT,
    PRECISE,
    UNIT,
    Table,
    columns_of,
    ends,
    paired,
)
from harness.record.schema.table import column as _c

CHECKED = (
    _c("equivalence", "string", "equivalent to one device, not equivalent, or unknown; `<NA>` without a check"),
    _c(
        "excluded",
        "string",
        "reason if its ratio is no claim: not equivalent to one device; or missing: other hardware or environment",
    ),
)

EQUIVALENCE = Table(
    "equivalence",
    "one equivalence check of a strategy against one device, in fp32 or in the cell's precision: a few steps without "
    "batch statistics and dropout",
    (
        _c("cell_id", "string", "cell of the check"),
        _c("base_id", "string", "cell of the check on one device"),
        *CELL_COLUMNS,
        _c("computed_in", "string", "precision of the steps: fp32, or the cell's if that is bf16 or fp16"),
        _c("gradient_difference", "Float64", "norm of the difference of both gradients over that of one device's"),
        _c("first_difference", "Float64", "difference of the first update; in 16 bits: of its part along one device's"),
        _c("difference", "Float64", "difference of scaled updates"),
        _c("bound", "Float64", "largest difference that counts as rounding: 0.01, in 16 bits 0.05"),
        _c("equivalent", "boolean", "true if each difference is at most the bound; `<NA>` if unknown"),
        _c("reason", "string", "reason if not equivalent or unknown"),
    ),
)

CONVERGENCE = Table(
    "convergence",
    "one training of one cell with one seed",
    (
        *recorded.TRIAL_COLUMNS,
        CELL_ID,
        *CELL_COLUMNS,
        recorded.SEED,
        recorded.EFFECTIVE_LR,
        _c("epochs", "Int64", "number of epochs trained"),
        _c("training_samples", "Int64", "number of samples in the training set", "samples"),
        _c("train_loss", "Float64", "mean training loss over the last epoch"),
        _c("train_accuracy", "Float64", "accuracy on the training set after the last epoch, if it was computed"),
        _c("val_loss", "Float64", "mean validation loss after the last epoch"),
        _c("val_accuracy", "Float64", "validation accuracy after the last epoch"),
        _c("val_perplexity", "Float64", "validation perplexity after the last epoch"),
        _c("val_psnr", "Float64", "peak signal-to-noise ratio over the validation images after the last epoch", "dB"),
        _c("val_iou", "Float64", "intersection over union of the foreground of validation, after the last epoch"),
        _c("best_val_accuracy", "Float64", "validation accuracy, best of all epochs"),
        _c("target", "string", "target of the experiment file"),
        _c("reached", "boolean", "true if the target was reached"),
        _c("time_to_target_s", "Float64", "training time until the end of the epoch that reached the target", "s"),
        _c("samples_to_target", "Int64", "number of samples until then", "samples"),
        _c("epochs_to_target", "Int64", "number of epochs until then"),
        _c("train_s", "Float64", "training time at the end", "s"),
        *CHECKED,
    ),
)


_CELL = (CELL_ID, *CELL_COLUMNS)


CELLS = Table(
    "cells",
    "the throughput of one cell over its blocks",
    (
        *_CELL,
        recorded.ADDED,
        UNIT,
        _c("throughput_per_s", "Float64", "throughput, geometric mean over blocks", "samples/s"),
        *INTERVAL,
        _c("per_device_per_s", "Float64", "throughput per device", "samples/s"),
        _c("step_s", "Float64", "step time, median over the timed steps of all ranks and blocks", "s"),
        _c("step_p5_s", "Float64", "step time, 5th percentile of the timed steps", "s"),
        _c("step_p95_s", "Float64", "step time, 95th percentile of the timed steps", "s"),
        recorded.WAIT_FRACTION,
        _c(
            "compile_s", "Float64", "time of torch.compile, longest over blocks: later ones find code in its cache", "s"
        ),
        _c("peak_memory_bytes", "Int64", "peak memory, largest over blocks and ranks", "bytes"),
        _c(
            "estimated_peak_bytes", "Int64", "the doctor's estimate of it; `<NA>` if the kind was not examined", "bytes"
        ),
        recorded.PARAMETERS,
        _c("achieved_flops_per_s", "Float64", "model FLOPs per second of one device, forward and backward", "FLOP/s"),
        _c("flops_reason", "string", "reason if achieved_flops_per_s is `<NA>`"),
        _c(
            "mfu",
            "Float64",
            "achieved FLOPs over the published dense peak in this precision; `<NA>` if unknown or oversubscribed",
        ),
        _c("peak_source", "string", "source of the published peak"),
        _c("of_measured_peak", "Float64", "achieved FLOPs over the run's fastest matrix product on such a device"),
        _c("doubts", "list", "doubts of its trials, each with its number of blocks"),
    ),
)

FINDINGS = Table(
    "findings",
    "one finding, mostly of the doctor, about an examined, skipped or trained cell or the nodes",
    (
        _c("trial_id", "string", "trial of the examination, if there was one"),
        _c("cell_id", "string", "cell of the finding, if it concerns one cell"),
        *CELL_COLUMNS,
        *columns_of(FindingRow),
    ),
)

SCALING = Table(
    "scaling",
    "one cell against its base, paired by block",
    (
        CELL_ID,
        _c("base_id", "string", "base cell, the denominator of the ratio"),
        *CELL_COLUMNS,
        UNIT,
        _c("base_strategy", "string", "strategy of the base"),
        _c("base_devices", "Int64", "number of devices of the base"),
        _c("base_throughput_per_s", "Float64", "throughput of the base", "samples/s"),
        PAIRED_THROUGHPUT,
        _c("speedup", "Float64", "throughput over that of the base, geometric mean over blocks"),
        *INTERVAL,
        P_VALUE,
        *ends("throughput", "samples/s"),
        *CHECKED,
        _c("doubts", "list", "doubts of the cell and, marked as such, of its base"),
        _c("unusual", "list", "its own doubts that are not usual in this run, or in clearly more of its trials"),
        PRECISE,
        _c("efficiency", "Float64", "speedup over (devices / base_devices)"),
        *ends("efficiency"),
    ),
)

NOISE = Table(
    "noise",
    "the A/A test of one base: its twin, the same cell in other processes, against it",
    (
        _c("cell_id", "string", "base cell"),
        *CELL_COLUMNS,
        *paired("twin_throughput_per_s", "the twin", "throughput of the twin over that of the base"),
        _c("doubts", "list", "doubts of the twin and of the base, each marked as such"),
    ),
)

PARITY = Table(
    "parity",
    "one cell under Ray against the same cell under torchrun, the control, paired by block",
    (
        _c("cell_id", "string", "cell under Ray"),
        _c("control_id", "string", "cell under torchrun"),
        *CELL_COLUMNS,
        *paired("control_throughput_per_s", "the control", "throughput under Ray over that of the control"),
        *CHECKED,
        _c("doubts", "list", "doubts of the cell and, marked as such, of its control"),
    ),
)

VERSUS = Table(
    "versus",
    "one cell against another that differs in one axis: neighbouring values, and the last against the first; of "
    "device_ids each against the first of the file",
    (
        _c("cell_id", "string", "cell"),
        _c("other_id", "string", "the other cell"),
        _c("other_label", "string", "label of the other cell"),
        _c("axis", "string", "the axis or option in which they differ; what follows from it differs too"),
        _c("value", "string", "value of the cell on that axis; unset if it has none"),
        _c("other_value", "string", "value of the other cell"),
        *CELL_COLUMNS,
        _c("other_strategy", "string", "strategy of the other cell"),
        *paired("other_throughput_per_s", "other_id", "throughput over that of the other cell"),
        *CHECKED,
        _c("doubts", "list", "doubts of the cell and, marked as such, of the other cell"),
    ),
)

GPUS = Table(
    "gpus",
    "the GPUs of one cell, by NVML readings after the timed windows and by profiles; no rows without GPUs",
    (
        *_CELL,
        _c("blocks", "Int64", "number of trials (blocks) with readings"),
        _c("busy_s", "Float64", "time of a step in which the least busy GPU runs a kernel or copies, by profiles", "s"),
        _c("busy", "Float64", "busy_s over the mean timed step, at most 1"),
        _c("gpu_utilisation", "Float64", "fraction of NVML's last sampling period in which a kernel ran, mean"),
        _c("power_w", "Float64", "power of one GPU, mean", "W"),
        _c("sm_clock_fraction", "Float64", "SM clock over the GPU's maximum, lowest"),
        _c("temperature_c", "Float64", "temperature, highest", "degree Celsius"),
        _c("throttled", "string", "reasons for throttled clocks in any block; empty if none"),
        _c("samples_per_joule", "Float64", "samples or tokens over the energy of all GPUs, geometric mean over blocks"),
    ),
)

DEVICE_MEMORY = Table(
    "device_memory",
    "the peak memory of one GPU of one cell, largest over its blocks; no rows without GPUs",
    (
        *_CELL,
        recorded.RANK,
        _c("gpu", "Int64", "number of the GPU among those of the cell, from 0: by rank, then in the rank's order"),
        _c("name", "string", "name of the device on its rank"),
        _c("allocated_bytes", "Int64", "peak memory allocated in the steps", "bytes"),
        _c("reserved_bytes", "Int64", "peak memory reserved by the allocator", "bytes"),
    ),
)

PHASES = Table(
    "phases",
    "the step of one cell by phase, in seconds per step; phases add up to the step",
    (
        *_CELL,
        _c("step_s", "Float64", "step time, mean over ranks and blocks", "s"),
        *recorded.PHASE_COLUMNS,
        _c("waits", "Float64", "fraction of the step spent waiting for data, mean over blocks: idle_s, else wait_s"),
        _c("blocks", "Int64", "number of blocks in that estimate (n)"),
        *ends("waits"),
    ),
)

HOST_PHASES = Table(
    "host_phases",
    "the host's part in the step of one cell on GPUs, by phase; not to be added to the GPU's phases",
    (
        *_CELL,
        _c("step_s", "Float64", "step time, mean over ranks and blocks", "s"),
        *recorded.HOST_PHASE_COLUMNS,
    ),
)

WATERFALL = Table(
    "waterfall",
    "one part of the step of one cell on several devices; the shares of a cell add up to 1",
    (
        CELL_ID,
        _c("base_id", "string", "base cell, whose step time is the ideal"),
        *CELL_COLUMNS,
        _c("position", "Int64", "position in the order of parts, starting at the ideal"),
        _c("part", "string", "ideal, whose share is the efficiency, or the name of a loss"),
        _c("part_s", "Float64", "time per step, mean over blocks", "s"),
        _c(
            "share",
            "Float64",
            "fraction of the measured step: the efficiency in scaling for the ideal, else in proportion to part_s",
        ),
        *INTERVAL,
        _c(
            "reason",
            "string",
            "of the rest: what contradicts a part that is in it, or why no other part is shown; of exposed "
            "communication: DDP's own timers, if they contradict it",
        ),
    ),
)

STALLS = Table(
    "stalls",
    "one timed window with stalled steps, over 10 times the trial's median and over 2 s; the trial counts with it",
    (
        *recorded.TRIAL_COLUMNS,
        *_CELL,
        recorded.BLOCK,
        UNIT,
        recorded.WINDOW,
        _c("stalled_s", "Float64", "time of the stalled steps, each on the rank that took longest", "s"),
        _c("step_median_s", "Float64", "step time, median over the trial's timed steps of all ranks", "s"),
        _c("waiting_ranks", "string", "ranks whose steps were stalled"),
        _c("cause", "string", "cause that a counter shows: wait for data, swapped memory, clocks; `<NA>` if none does"),
        _c("throughput_per_s", "Float64", "throughput of the trial over all its timed windows", "samples/s"),
        _c(
            "unstalled_throughput_per_s",
            "Float64",
            "the same without windows with stalled steps; `<NA>` if no other is left",
            "samples/s",
        ),
    ),
)

LEDGER = Table(
    "ledger",
    "the time of one part of a trial, of a worker group outside its trials, or of an invocation outside its groups",
    (
        _c("level", "string", "owner of the time: trial, group or run"),
        _c("invocation", "Int64", "number of the invocation, from 0"),
        _c("group_id", "string", "worker group"),
        _c("trial_id", "string", "trial"),
        _c("part", "string", "name of the part"),
        _c("seconds", "Float64", "duration", "s"),
    ),
)

OUTCOMES = Table(
    "outcomes",
    "the number of trials of one kind with one outcome and reason",
    (
        recorded.KIND,
        recorded.OUTCOME,
        recorded.REASON,
        _c("trials", "Int64", "number of trials"),
    ),
)

MISSING = Table(
    "missing",
    "one planned trial without a result",
    (
        _c("trial_id", "string", "id of the trial: its cell, and its block or seed"),
        CELL_ID,
        _c("label", "string", "readable label of the cell"),
        recorded.BLOCK,
        _c("reason", "string", "reason: cut short, or not started"),
    ),
)


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


PREVIEW = Table(
    "preview",
    "one part of a run: a cell, its convergence, diagnostic trials of a kind, what is outside of trials, their sums",
    (
        _c(
            "part",
            "string",
            "cell, for its throughput; convergence; twin, explain, profile, equivalence, doctor or links; worker "
            "groups (outside of trials); command (outside of groups); measurement (their sum); report; total",
        ),
        CELL_ID,
        _c("label", "string", "readable label of the cell, or name of the part"),
        _c("planned_trials", "Int64", "number of planned trials; of worker groups that of the groups"),
        _c("measured_trials", "Int64", "number of those that were started"),
        _c("estimated_s", "Float64", "wall time, estimated before the run", "s"),
        _c("actual_s", "Float64", "wall time; `<NA>` before the run", "s"),
        _c(
            "error", "Float64", "estimated over actual time, less 1; `<NA>` of a lower bound, and if trials are missing"
        ),
        _c(
            "device_hours",
            "Float64",
            "wall time times the machine's devices, working or not; before the run estimated",
            "h",
        ),
        _c("busy_device_hours", "Float64", "device-hours of the devices that trials occupied", "h"),
        _c(
            "energy_kwh",
            "Float64",
            "power in the timed windows times occupied device-hours; none without readings",
            "kWh",
        ),
        _c("basis", "string", "source of the estimate: earlier run, lower bound, unknown"),
    ),
)


_PLACEMENT = (
    _c("trial_id", "string", "trial that measured the placement"),
    _c("device", "string", "cpu or cuda"),
    _c("device_model", "string", "product name of the devices"),
    _c("device_ids", "string", "GPU ids on the node, if the experiment file names them"),
    _c("devices", "Int64", "number of devices of the placement (n)"),
    _c("nodes", "Int64", "number of nodes (machines) of the placement"),
    _c("backend", "string", "gloo or nccl between processes; cuda for copies inside a process"),
)
_TIMES = (
    *columns_of(LinkRow),
    _c("algorithm_bytes_per_s", "Float64", "size_bytes over time_s", "bytes/s"),
    _c(
        "bus_bytes_per_s",
        "Float64",
        "bus bandwidth of nccl-tests: algorithm bandwidth, times 2(n-1)/n for all_reduce, (n-1)/n for all_gather and "
        "reduce_scatter",
        "bytes/s",
    ),
)

LINKS = Table(
    "links",
    "one message size between two devices of one placement; the smallest size shows the latency",
    (
        *_PLACEMENT,
        _c("operation", "string", "send_receive: half of a message's return trip between two ranks; copy: one process"),
        _c("source", "Int64", "number of the sending device in the placement: its rank, if each rank has one device"),
        _c("target", "Int64", "number of the receiving device in the placement"),
        _c("tier", "string", "inside a node; between nodes; or between nodes, same rail (GPUs of one number)"),
        _c("link", "string", "link between the two GPUs, as in nvidia-smi topo -m: NV12, PIX, PXB, PHB, NODE, SYS"),
        _c("size_bytes", "Int64", "size of the message", "bytes"),
        *_TIMES,
    ),
)

COLLECTIVES = Table(
    "collectives",
    "one size of one collective of all ranks of one placement; the smallest size shows the latency",
    (
        *_PLACEMENT,
        _c("operation", "string", "all_reduce (ddp), all_gather or reduce_scatter (fsdp)"),
        _c("tier", "string", "between nodes if its ranks are on several nodes, else inside a node"),
        _c(
            "size_bytes",
            "Int64",
            "size of the whole tensor, of which ranks hold parts in all_gather and reduce_scatter",
            "bytes",
        ),
        *_TIMES,
    ),
)
