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
    flag,
    integer,
    paired,
    real,
    string,
    texts,
)

CHECKED = (
    string("equivalence", "equivalent to one device, not equivalent, or unknown; `<NA>` without a check"),
    string(
        "excluded",
        "reason if its ratio is no claim: not equivalent to one device; or missing: other hardware or environment",
    ),
)

EQUIVALENCE = Table(
    "equivalence",
    "one equivalence check of a strategy against one device, in fp32 or in the cell's precision: a few steps without "
    "batch statistics and dropout",
    string("cell_id", "cell of the check"),
    string("base_id", "cell of the check on one device"),
    *CELL_COLUMNS,
    string("computed_in", "precision of the steps: fp32, or the cell's if that is bf16 or fp16"),
    real("gradient_difference", "norm of the difference of both gradients over that of one device's"),
    real(
        "first_difference",
        "difference of the first update; in 16 bits, and up to 5 % beside a gradient that differs by 0.01 to 1 %, of "
        "its part along one device's",
    ),
    real("difference", "difference of scaled updates, likewise"),
    real("bound", "largest difference that counts as rounding: 0.01, in 16 bits 0.05"),
    flag("equivalent", "true if each difference is at most the bound; `<NA>` if unknown"),
    string("reason", "reason if not equivalent or unknown"),
)

_CELL = (CELL_ID, *CELL_COLUMNS)

CONVERGENCE = Table(
    "convergence",
    "one training of one cell with one seed",
    *recorded.TRIAL_COLUMNS,
    *_CELL,
    recorded.SEED,
    recorded.EFFECTIVE_LR,
    integer("epochs", "number of epochs trained"),
    integer("training_samples", "number of samples in the training set", "samples"),
    real("train_loss", "mean training loss over the last epoch"),
    real("train_accuracy", "accuracy on the training set after the last epoch, if it was computed"),
    real("val_loss", "mean validation loss after the last epoch"),
    real("val_accuracy", "validation accuracy after the last epoch"),
    real("val_perplexity", "validation perplexity after the last epoch"),
    real("val_psnr", "peak signal-to-noise ratio over the validation images after the last epoch", "dB"),
    real("val_iou", "intersection over union of the foreground of validation, after the last epoch"),
    real("best_val_accuracy", "validation accuracy, best of all epochs"),
    string("target", "target of the experiment file"),
    flag("reached", "true if the target was reached"),
    real("time_to_target_s", "training time until the end of the epoch that reached the target", "s"),
    integer("samples_to_target", "number of samples until then", "samples"),
    integer("epochs_to_target", "number of epochs until then"),
    real("train_s", "training time at the end", "s"),
    *CHECKED,
)


CELLS = Table(
    "cells",
    "the throughput of one cell over its blocks",
    *_CELL,
    recorded.ADDED,
    UNIT,
    real("throughput_per_s", "throughput, geometric mean over blocks", "samples/s"),
    *INTERVAL,
    real("per_device_per_s", "throughput per device", "samples/s"),
    real("step_s", "step time, median over the timed steps of all ranks and blocks", "s"),
    real("step_p5_s", "step time, 5th percentile of the timed steps", "s"),
    real("step_p95_s", "step time, 95th percentile of the timed steps", "s"),
    recorded.WAIT_FRACTION,
    real("compile_s", "time of torch.compile, longest over blocks: later ones find code in its cache", "s"),
    integer("peak_memory_bytes", "peak memory, largest over blocks and ranks", "bytes"),
    integer("estimated_peak_bytes", "the doctor's estimate of it; `<NA>` if the kind was not examined", "bytes"),
    recorded.PARAMETERS,
    real("achieved_flops_per_s", "model FLOPs per second of one device, forward and backward", "FLOP/s"),
    string("flops_reason", "reason if achieved_flops_per_s is `<NA>`"),
    real("mfu", "achieved FLOPs over the published dense peak in this precision; `<NA>` if unknown or oversubscribed"),
    string("peak_source", "source of the published peak"),
    real("of_measured_peak", "achieved FLOPs over the run's fastest matrix product on such a device"),
    texts("doubts", "doubts of its trials, each with its number of blocks"),
)

FINDINGS = Table(
    "findings",
    "one finding, mostly of the doctor, about an examined, skipped or trained cell or the nodes",
    string("trial_id", "trial of the examination, if there was one"),
    string("cell_id", "cell of the finding, if it concerns one cell"),
    *CELL_COLUMNS,
    *columns_of(FindingRow),
)

SCALING = Table(
    "scaling",
    "one cell against its base, paired by block",
    CELL_ID,
    string("base_id", "base cell, the denominator of the ratio"),
    *CELL_COLUMNS,
    UNIT,
    string("base_strategy", "strategy of the base"),
    integer("base_devices", "number of devices of the base"),
    real("base_throughput_per_s", "throughput of the base", "samples/s"),
    PAIRED_THROUGHPUT,
    real("speedup", "throughput over that of the base, geometric mean over blocks"),
    *INTERVAL,
    P_VALUE,
    *ends("throughput", "samples/s"),
    *CHECKED,
    texts("doubts", "doubts of the cell and, marked as such, of its base"),
    texts("unusual", "its own doubts that are not usual in this run, or in clearly more of its trials"),
    PRECISE,
    real("efficiency", "speedup over (devices / base_devices)"),
    *ends("efficiency"),
)

NOISE = Table(
    "noise",
    "the A/A test of one base: its twin, the same cell in other processes, against it",
    string("cell_id", "base cell"),
    *CELL_COLUMNS,
    *paired("twin_throughput_per_s", "the twin", "throughput of the twin over that of the base"),
    texts("doubts", "doubts of the twin and of the base, each marked as such"),
)

PARITY = Table(
    "parity",
    "one cell under Ray against the same cell under torchrun, the control, paired by block",
    string("cell_id", "cell under Ray"),
    string("control_id", "cell under torchrun"),
    *CELL_COLUMNS,
    *paired("control_throughput_per_s", "the control", "throughput under Ray over that of the control"),
    *CHECKED,
    texts("doubts", "doubts of the cell and, marked as such, of its control"),
)

VERSUS = Table(
    "versus",
    "one cell against another that differs in one axis: neighbouring values, and the last against the first; of "
    "device_ids each against the first of the file; a cell on several CPU slots against its base with all threads",
    string("cell_id", "cell"),
    string("other_id", "the other cell"),
    string("other_label", "label of the other cell"),
    string("axis", "the axis or option in which they differ; what follows from it differs too"),
    string("value", "value of the cell on that axis; unset if it has none"),
    string("other_value", "value of the other cell"),
    *CELL_COLUMNS,
    string("other_strategy", "strategy of the other cell"),
    *paired("other_throughput_per_s", "other_id", "throughput over that of the other cell"),
    *CHECKED,
    texts("doubts", "doubts of the cell and, marked as such, of the other cell"),
)

GPUS = Table(
    "gpus",
    "the GPUs of one cell, by NVML readings after the timed windows and by profiles; no rows without GPUs",
    *_CELL,
    integer("blocks", "number of trials (blocks) with readings"),
    real("busy_s", "time of a step in which the least busy GPU runs a kernel or copies, by profiles", "s"),
    real("busy", "busy_s over the mean timed step, at most 1"),
    real("gpu_utilisation", "fraction of NVML's last sampling period in which a kernel ran, mean"),
    real("power_w", "power of one GPU, mean", "W"),
    real("sm_clock_fraction", "SM clock over the GPU's maximum, lowest"),
    real("temperature_c", "temperature, highest", "degree Celsius"),
    string("throttled", "reasons for throttled clocks in any block; empty if none"),
    real("samples_per_joule", "samples or tokens over the energy of all GPUs, geometric mean over blocks"),
)

DEVICE_MEMORY = Table(
    "device_memory",
    "the peak memory of one GPU of one cell, largest over its blocks; no rows without GPUs",
    *_CELL,
    recorded.RANK,
    integer("gpu", "number of the GPU among those of the cell, from 0: by rank, then in the rank's order"),
    string("name", "name of the device on its rank"),
    integer("allocated_bytes", "peak memory allocated in the steps", "bytes"),
    integer("reserved_bytes", "peak memory reserved by the allocator", "bytes"),
)

PHASES = Table(
    "phases",
    "the step of one cell by phase, in seconds per step; phases add up to the step",
    *_CELL,
    real("step_s", "step time, mean over ranks and blocks", "s"),
    *recorded.PHASE_COLUMNS,
    real("waits", "fraction of the step spent waiting for data, mean over blocks: idle_s, else wait_s"),
    integer("blocks", "number of blocks in that estimate (n)"),
    *ends("waits"),
)

HOST_PHASES = Table(
    "host_phases",
    "the host's part in the step of one cell on GPUs, by phase; not to be added to the GPU's phases",
    *_CELL,
    real("step_s", "step time, mean over ranks and blocks", "s"),
    *recorded.HOST_PHASE_COLUMNS,
)

WATERFALL = Table(
    "waterfall",
    "one part of the step of one cell on several devices; the shares of a cell add up to 1",
    CELL_ID,
    string("base_id", "base cell, whose step time is the ideal"),
    *CELL_COLUMNS,
    integer("position", "position in the order of parts, starting at the ideal"),
    string("part", "ideal, whose share is the efficiency, or the name of a loss"),
    real("part_s", "time per step, mean over blocks", "s"),
    real(
        "share", "fraction of the measured step: the efficiency in scaling for the ideal, else in proportion to part_s"
    ),
    *INTERVAL,
    string(
        "reason",
        "of the rest: what contradicts a part that is in it, or why no other part is shown; of exposed "
        "communication: DDP's own timers, if they contradict it",
    ),
)

STALLS = Table(
    "stalls",
    "one timed window with stalled steps, over 10 times the trial's median and over 2 s; the trial counts with it",
    *recorded.TRIAL_COLUMNS,
    *_CELL,
    recorded.BLOCK,
    UNIT,
    recorded.WINDOW,
    real("stalled_s", "time of the stalled steps, each on the rank that took longest", "s"),
    real("step_median_s", "step time, median over the trial's timed steps of all ranks", "s"),
    string("waiting_ranks", "ranks whose steps were stalled"),
    string("cause", "cause that a counter shows: wait for data, swapped memory, clocks; `<NA>` if none does"),
    real("throughput_per_s", "throughput of the trial over all its timed windows", "samples/s"),
    real(
        "unstalled_throughput_per_s",
        "the same without windows with stalled steps; `<NA>` if no other is left",
        "samples/s",
    ),
)

LEDGER = Table(
    "ledger",
    "the time of one part of a trial, of a worker group outside its trials, or of an invocation outside its groups",
    string("level", "owner of the time: trial, group or run"),
    integer("invocation", "number of the invocation, from 0"),
    string("group_id", "worker group"),
    string("trial_id", "trial"),
    string("part", "name of the part"),
    real("seconds", "duration", "s"),
)

OUTCOMES = Table(
    "outcomes",
    "the number of trials of one kind with one outcome and reason",
    recorded.KIND,
    recorded.OUTCOME,
    recorded.REASON,
    integer("trials", "number of trials"),
)

MISSING = Table(
    "missing",
    "one planned trial without a result",
    string("trial_id", "id of the trial: its cell, and its block or seed"),
    CELL_ID,
    string("label", "readable label of the cell"),
    recorded.BLOCK,
    string("reason", "reason: cut short, or not started"),
)


_DESCRIBED = tuple(column for column in CELL_COLUMNS if column.name != "label")

PREDICTION = Table(
    "prediction",
    "one size of the cells that differ in their devices alone, predicted from smaller ones",
    string("family_id", "hash of what the cells have in common"),
    *_DESCRIBED,
    string("kind", "measured; held out: predicted from smaller sizes too; asked: predicted alone"),
    texts("fitted", "sizes from which it was predicted"),
    real("measured_s", "measured step time, mean over blocks", "s"),
    real("measured_low", "lower end of its 95 % confidence interval", "s"),
    real("measured_high", "upper end of its 95 % confidence interval", "s"),
    real("step_s", "predicted mean step time of a new run; `<NA>` if it is refused", "s"),
    real("low", "lower end of the 95 % prediction interval; `<NA>` below 3 blocks of the largest size", "s"),
    real("high", "upper end of the 95 % prediction interval", "s"),
    real("error", "predicted over measured step time, less 1"),
    real("throughput_per_s", "predicted throughput", "samples/s"),
    real("efficiency", "a device's part of it over that of the base, as in the table scaling"),
    real("own_s", "of the predicted step: computation of the slowest rank", "s"),
    real("exposed_s", "of the predicted step: exchange that no computation covers", "s"),
    real("data_s", "of the predicted step: waiting for data", "s"),
    real("other_s", "of the predicted step: the optimizer of sharded parameters, and the rest", "s"),
    real("ideal_s", "step time without any loss", "s"),
    real("amdahl_s", "step time by Amdahl's law, fitted to the same sizes", "s"),
    real("ring_line_s", "step time by a cost as (n-1)/n and one as n-1, fitted to the same sizes", "s"),
    texts("marks", "far: beyond 8 times the largest measured size; emulated, faulty: no claim about speed"),
    string("refusal", "why it is not predicted, and what to measure; `<NA>` if it is"),
)

EXCHANGES = Table(
    "exchanges",
    "one collective of a step, in the order of their calls",
    string("trial_id", "trial after whose timed windows it was recorded"),
    *_CELL,
    *columns_of(ExchangeRow),
)


PREVIEW = Table(
    "preview",
    "one part of a run: a cell, its convergence, diagnostic trials of a kind, what is outside of trials, their sums",
    string(
        "part",
        "cell, for its throughput; convergence; twin, threads, explain, profile, equivalence, doctor or links; worker "
        "groups (outside of trials); command (outside of groups); measurement (their sum); report; total",
    ),
    CELL_ID,
    string("label", "readable label of the cell, or name of the part"),
    integer("planned_trials", "number of planned trials; of worker groups that of the groups"),
    integer("measured_trials", "number of those that were started"),
    real("estimated_s", "wall time, estimated before the run", "s"),
    real("actual_s", "wall time; `<NA>` before the run", "s"),
    real("error", "estimated over actual time, less 1; `<NA>` of a lower bound, and if trials are missing"),
    real("device_hours", "wall time times the machine's devices, working or not; before the run estimated", "h"),
    real("busy_device_hours", "device-hours of the devices that trials occupied", "h"),
    real("energy_kwh", "power in the timed windows times occupied device-hours; none without readings", "kWh"),
    string("basis", "source of the estimate: earlier run, lower bound, unknown"),
)


_PLACEMENT = (
    string("trial_id", "trial that measured the placement"),
    string("device", "cpu or cuda"),
    string("device_model", "product name of the devices"),
    string("device_ids", "GPU ids on the node, if the experiment file names them"),
    integer("devices", "number of devices of the placement (n)"),
    integer("nodes", "number of nodes (machines) of the placement"),
    string("backend", "gloo or nccl between processes; cuda for copies inside a process"),
)
_TIMES = (
    *columns_of(LinkRow),
    real("algorithm_bytes_per_s", "size_bytes over time_s", "bytes/s"),
    real(
        "bus_bytes_per_s",
        "bus bandwidth of nccl-tests: algorithm bandwidth, times 2(n-1)/n for all_reduce, (n-1)/n for all_gather and "
        "reduce_scatter",
        "bytes/s",
    ),
)

LINKS = Table(
    "links",
    "one message size between two devices of one placement; the smallest size shows the latency",
    *_PLACEMENT,
    string("operation", "send_receive: half of a message's return trip between two ranks; copy: one process"),
    integer("source", "number of the sending device in the placement: its rank, if each rank has one device"),
    integer("target", "number of the receiving device in the placement"),
    string("tier", "inside a node; between nodes; or between nodes, same rail (GPUs of one number)"),
    string("link", "link between the two GPUs, as in nvidia-smi topo -m: NV12, PIX, PXB, PHB, NODE, SYS"),
    integer("size_bytes", "size of the message", "bytes"),
    *_TIMES,
)

COLLECTIVES = Table(
    "collectives",
    "one size of one collective of all ranks of one placement; the smallest size shows the latency",
    *_PLACEMENT,
    string("operation", "all_reduce (ddp), all_gather or reduce_scatter (fsdp)"),
    string("tier", "between nodes if its ranks are on several nodes, else inside a node"),
    integer(
        "size_bytes", "size of the whole tensor, of which ranks hold parts in all_gather and reduce_scatter", "bytes"
    ),
    *_TIMES,
)
