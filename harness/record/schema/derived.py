"""Schema of the derived tables, which the analysis computes from recorded trials."""

from __future__ import annotations

from harness.plan.rows import FindingRow
from harness.record.schema.recorded import (
    ADDED,
    BLOCK,
    HOST_PHASE_COLUMNS,
    KIND,
    OUTCOME,
    PARAMETERS,
    PHASE_COLUMNS,
    RANK,
    REASON,
    TRIAL_COLUMNS,
    WAIT_FRACTION,
    WINDOW,
)
from harness.record.schema.table import (
    CELL_COLUMNS,
    CELL_ID,
    INTERVAL,
    PAIRED_THROUGHPUT,
    PRECISE,
    UNIT,
    Table,
    columns_of,
    ends,
    paired,
)
from harness.record.schema.table import column as _c
from harness.record.schema.training import CHECKED

_CELL = (CELL_ID, *CELL_COLUMNS)


CELLS = Table(
    "cells",
    "the throughput of one cell over its blocks",
    (
        *_CELL,
        ADDED,
        UNIT,
        _c("throughput_per_s", "Float64", "throughput, geometric mean over blocks", "samples/s"),
        *INTERVAL,
        _c("per_device_per_s", "Float64", "throughput per device", "samples/s"),
        _c("step_s", "Float64", "step time, median over the timed steps of all ranks and blocks", "s"),
        _c("step_p5_s", "Float64", "step time, 5th percentile of the timed steps", "s"),
        _c("step_p95_s", "Float64", "step time, 95th percentile of the timed steps", "s"),
        WAIT_FRACTION,
        _c("peak_memory_bytes", "Int64", "peak memory, largest over blocks and ranks", "bytes"),
        _c(
            "estimated_peak_bytes", "Int64", "the doctor's estimate of it; `<NA>` if the kind was not examined", "bytes"
        ),
        PARAMETERS,
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
    "one finding of the doctor, about an examined cell, a skipped cell or the nodes",
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
    "the A/A test of one base: against its twin, the same cell in a separate worker group (noise floor)",
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
    "the GPUs of one cell, by NVML readings after the timed windows; no rows without GPUs",
    (
        *_CELL,
        _c("blocks", "Int64", "number of trials (blocks) with readings"),
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
        RANK,
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
        *PHASE_COLUMNS,
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
        *HOST_PHASE_COLUMNS,
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
        _c("reason", "string", "of the rest: what contradicts a part that is in it, or why no other part is shown"),
    ),
)

STALLS = Table(
    "stalls",
    "one timed window with stalled steps, over 10 times the trial's median and over 2 s; the trial counts with it",
    (
        *TRIAL_COLUMNS,
        *_CELL,
        BLOCK,
        UNIT,
        WINDOW,
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
        KIND,
        OUTCOME,
        REASON,
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
        BLOCK,
        _c("reason", "string", "reason: cut short, or not started"),
    ),
)
