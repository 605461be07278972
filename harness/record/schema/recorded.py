"""Schema of the recorded tables, and of columns computed from one trial alone."""

from __future__ import annotations

from harness.config.strategy_traits import BUILTIN_TRAITS
from harness.record.schema.table import CELL_COLUMNS, CELL_ID, UNIT, Table
from harness.record.schema.table import column as _c

TRIAL_COLUMNS = (
    _c("trial_id", "string", "id of the trial: its cell, and its block or seed"),
    _c("attempt", "Int64", "number of the attempt, from 1; a lost trial is retried"),
)

SEED = _c("seed", "Int64", "random seed of the model and of the data order")
PARAMETERS = _c("parameters", "Int64", "number of parameters of the model")
CODE = _c("code", "string", "hash of the Python files of the variant")
ADDED = _c("added", "boolean", "true for a base cell that the planner added")
EFFECTIVE_LR = _c(
    "effective_lr", "Float64", "learning rate scaled with the global batch, after warm-up, before any schedule"
)
WAIT_FRACTION = _c("wait_fraction", "Float64", "fraction of the steps spent waiting for data, on CUDA by an idle GPU")
KIND = _c("kind", "string", "throughput, convergence or diagnostic")
OUTCOME = _c("outcome", "string", "outcome: ok, oom, diverged, error, timeout, lost or skipped")
REASON = _c("reason", "string", "reason for an outcome other than ok")
BLOCK = _c("block", "Int64", "number of the block, a repetition of the grid")
THREADS = _c("threads", "Int64", "number of torch's intra-op threads of a rank")
RANK = _c("rank", "Int64", "rank in the worker group")
WINDOW = _c("window", "Int64", "number of the window in the trial, from 0")
"""Columns of several tables."""

COLLECTIVE_COLUMNS = tuple(
    _c(part.column, "Float64", f"profiled: {part.description}, overlapped by computation or not", "s")
    for traits in BUILTIN_TRAITS.values()
    for part in traits.profiled_parts
)
EXPOSED_COLUMNS = tuple(
    _c(part.exposed_column, "Float64", f"profiled: {part.description}, while nothing is computed", "s")
    for traits in BUILTIN_TRAITS.values()
    for part in traits.profiled_parts
)

TRIALS = Table(
    "trials",
    "one attempt at a trial, with any outcome",
    (
        *TRIAL_COLUMNS,
        CELL_ID,
        _c("base_id", "string", "planned base cell, the denominator of its ratios"),
        _c("check_id", "string", "cell of its equivalence check"),
        _c("alone_id", "string", "cell of the unwrapped model on one device at the same per-device batch"),
        _c("wrapped_id", "string", "cell of the same strategy on one device at the same per-device batch"),
        _c("family_id", "string", "set of cells that differ only in their devices: one replaces a base that failed"),
        _c("launchers_id", "string", "set of cells that differ only in their launcher"),
        _c("strategies_id", "string", "set of cells on several devices that differ only in their strategy"),
        KIND,
        _c(
            "purpose",
            "string",
            "of a diagnostic trial: twin (noise floor), explain (waterfall), profile, equivalence, doctor or links",
        ),
        BLOCK,
        SEED,
        _c("invocation", "Int64", "number of the invocation, from 0, plus 1 per resume; pairs of one come first"),
        _c("group_id", "string", "worker group, whose processes ran this trial and others"),
        _c(
            "environment",
            "string",
            "hash of its worker group's code, versions, settings and hardware; equal in pairs of two invocations",
        ),
        _c("position", "Int64", "position in the order of its worker group"),
        ADDED,
        _c("inline", "boolean", "true if run in the command's own process (--inline), for a debugger; in no ratio"),
        OUTCOME,
        REASON,
        _c("skip_code", "string", "reason for a skip, as one word; `<NA>` if it was not skipped"),
        _c("error_type", "string", "class name of the exception"),
        _c("error_rank", "Int64", "rank that failed first; the others fail because of it"),
        _c("diverged_step", "Int64", "first step with a loss that is not finite, counted from 1 over the whole trial"),
        _c("freed_s", "Float64", "time from a failure's first sign on the driver to the end of its worker group", "s"),
        _c("log", "string", "path in the run folder: traceback or stacks, and the last output of the failed rank"),
        *CELL_COLUMNS,
        CODE,
        UNIT,
        PARAMETERS,
        _c("device_model", "string", "product name of the devices"),
        THREADS,
        _c("throughput_per_s", "Float64", "samples of all ranks over the time of the slowest rank", "samples/s"),
        _c("step_s", "Float64", "step time, median over the timed steps of all ranks", "s"),
        WAIT_FRACTION,
        _c(
            "peak_memory_bytes",
            "Int64",
            "peak in the steps, largest over ranks: allocated on the GPU, or resident on a CPU",
            "bytes",
        ),
        _c("build_peak_bytes", "Int64", "peak while model and optimizer were built, largest over ranks", "bytes"),
        _c("timed_steps", "Int64", "number of steps in timed windows"),
        _c("warmup_steps", "Int64", "number of warm-up steps"),
        _c("steady", "boolean", "true if the warm-up ended in a steady state, false if at its limit"),
        EFFECTIVE_LR,
        _c("dtypes", "string", "dtypes of weights, gradients, forward pass and loss"),
        _c("shard_units", "Int64", "number of groups of parameters that fsdp gathers together, the root included"),
        _c("loss_scale", "Float64", "loss scale of fp16 after the timed steps"),
        _c("skipped_updates", "Int64", "timed steps whose update the loss scale skipped, at least"),
        _c("training_samples", "Int64", "number of samples in the training set; `<NA>` of throughput", "samples"),
        _c("distinct_samples", "Int64", "distinct samples that an epoch reads, of the doctor's trials", "samples"),
        _c("resumed_epoch", "Int64", "epoch of the checkpoint that training resumed from; `<NA>` if from scratch"),
        _c(
            "flops_per_unit",
            "Float64",
            "forward and backward of one sample or token; a multiply-add counts as 2",
            "FLOP",
        ),
        _c("flops_reason", "string", "reason if flops_per_unit is `<NA>`"),
        _c("measured_peak_flops_per_s", "Float64", "matrix product on one device in this precision", "FLOP/s"),
        _c(
            "explain_error",
            "string",
            "reason if the waterfall is incomplete: a failure after the timed windows, or a limit",
        ),
        _c("links_error", "string", "reason if the measurement of links or collectives is incomplete"),
        *COLLECTIVE_COLUMNS,
        *EXPOSED_COLUMNS,
        _c("dp_threads_s", "Float64", "threads: one replica's step in a thread, minus the same without a thread", "s"),
        _c(
            "dp_side_by_side_s",
            "Float64",
            "contention: the step of all replicas at once, nothing copied, minus that of one alone",
            "s",
        ),
        _c("doubts", "list", "names of the doubts about its figures, explained at the end of results/README.md"),
        _c("ddp_communication_s", "Float64", "DDP's timer: first bucket ready to last bucket reduced, per step", "s"),
        _c("ddp_exposed_s", "Float64", "DDP's timer: part of that span after the end of backward's computation", "s"),
        _c("started_at", "Float64", "start of the trial, as Unix time", "s since 1970"),
        _c("trial_s", "Float64", "time inside the worker group, on rank 0", "s"),
        _c("steps_s", "Float64", "part of trial_s spent in steps of any kind, or in a check or examination", "s"),
    ),
)

PHASE_COLUMNS = (
    _c("wait_s", "Float64", "waiting for data, on a CPU", "s"),
    _c("idle_s", "Float64", "idle time of the GPU's stream before the step's first kernel", "s"),
    _c("copy_s", "Float64", "copy of the batch to the device", "s"),
    _c("forward_s", "Float64", "forward pass and loss, over all micro-batches", "s"),
    _c("backward_s", "Float64", "backward pass, including the communication that it waits for", "s"),
    _c("optimizer_s", "Float64", "gradient clipping and optimizer step", "s"),
    _c("rest_s", "Float64", "clearing of gradients, and the harness's own bookkeeping", "s"),
)
HOST_PHASE_COLUMNS = (
    _c("host_wait_s", "Float64", "host's time beside a GPU's: waiting for data", "s"),
    _c("host_copy_s", "Float64", "host's time: launch of the copy", "s"),
    _c("host_forward_s", "Float64", "host's time: launch of the forward pass", "s"),
    _c("host_backward_s", "Float64", "host's time: launch of the backward pass", "s"),
    _c("host_optimizer_s", "Float64", "host's time: launch of the optimizer step", "s"),
    _c("host_rest_s", "Float64", "host's time: rest of the step", "s"),
)

WINDOWS = Table(
    "windows",
    "one window of one rank; phases are sums over the steps of the window",
    (
        *TRIAL_COLUMNS,
        RANK,
        WINDOW,
        _c(
            "window_kind",
            "string",
            "warmup, timed, phases, epochs, or together and alone: with and without gradient exchange",
        ),
        _c("duration_s", "Float64", "time between the two device synchronizations", "s"),
        _c("steps", "Int64", "number of optimizer steps"),
        _c("weight", "Float64", "number of samples or tokens that this rank trained on"),
        _c(
            "in_turn_s",
            "Float64",
            "without exchange: sum over steps of the slowest rank's time, less the largest sum of a rank",
            "s",
        ),
        *PHASE_COLUMNS,
        *HOST_PHASE_COLUMNS,
    ),
)

RANKS = Table(
    "ranks",
    "one rank of one trial: its place, memory and load",
    (
        *TRIAL_COLUMNS,
        RANK,
        _c("local_rank", "Int64", "rank on its node"),
        _c("node_rank", "Int64", "number of its node in the worker group"),
        _c("node_id", "string", "Ray's node id"),
        _c("address", "string", "network address of the node"),
        _c("host", "string", "host name of the machine"),
        _c("devices", "string", "devices of this rank"),
        _c("device_model", "string", "product name of its devices"),
        THREADS,
        _c(
            "peak_memory_bytes",
            "Int64",
            "peak in the steps: allocated on the fullest of its GPUs, or resident on a CPU",
            "bytes",
        ),
        _c("peak_reserved_bytes", "Int64", "peak memory reserved by the allocator on the fullest of its GPUs", "bytes"),
        _c("allocated_by_device", "string", "peak allocated bytes of each of its GPUs, in the order of devices"),
        _c("reserved_by_device", "string", "peak reserved bytes of each of its GPUs, in the order of devices"),
        _c("resident_bytes", "Int64", "peak resident set size of the process", "bytes"),
        _c("build_peak_bytes", "Int64", "peak while model and optimizer were built, as peak_memory_bytes", "bytes"),
        _c("parameter_bytes", "Int64", "part of the peak: parameters, or this rank's shards", "bytes"),
        _c("gradient_bytes", "Int64", "part of the peak: gradients", "bytes"),
        _c("optimizer_bytes", "Int64", "part of the peak: optimizer state", "bytes"),
        _c("settings", "string", "settings of its process, beside the file's, that change speed or arithmetic"),
        _c("processors", "string", "processors that its training thread is pinned to; empty if none"),
        _c("watched_s", "Float64", "observed time: from the start of the timed windows to their end", "s"),
        _c("own_cpu_s", "Float64", "CPU time of this rank and its loader workers in the observed time", "s"),
        _c("node_cpu_s", "Float64", "CPU time of the whole node in the observed time", "s"),
        _c(
            "gpu_utilisation",
            "Float64",
            "NVML: fraction of the last sampling period in which a kernel ran, mean of GPUs",
        ),
        _c(
            "power_w",
            "Float64",
            "NVML: power of one of its GPUs, energy over the observed time; without energy counters, at the end",
            "W",
        ),
        _c("sm_clock_mhz", "Float64", "NVML: SM clock at the end, lowest of its GPUs", "MHz"),
        _c("sm_clock_fraction", "Float64", "NVML: SM clock over the GPU's maximum, lowest of its GPUs"),
        _c("temperature_c", "Float64", "NVML: temperature at the end, highest of its GPUs", "degree Celsius"),
        _c("throttled", "string", "NVML: reasons for throttled clocks; empty if none"),
        _c("energy_j", "Float64", "NVML: energy in the observed time; `<NA>` under 10 s and on shared GPUs", "J"),
        _c("samples_per_joule", "Float64", "samples or tokens of this rank over energy_j", "samples/J"),
        _c("foreign_gpu_processes", "Int64", "number of processes of others on its GPUs; `<NA>` if unknown"),
        _c("swapped_bytes", "Int64", "memory swapped on the node in the observed time", "bytes"),
    ),
)

STEPS = Table(
    "steps",
    "one optimizer step of one rank in a throughput trial",
    (
        *TRIAL_COLUMNS,
        RANK,
        WINDOW,
        _c("step", "Int64", "number of the step in its window"),
        _c("warmup", "boolean", "true for warm-up steps, which enter no figure"),
        _c("step_s", "Float64", "step time with the wait for data; on CUDA by the clock of the device's stream", "s"),
        _c("wait_s", "Float64", "wait for data by the host's clock: part of step_s on a CPU, beside it on CUDA", "s"),
        _c("loss", "Float64", "mean loss over this rank's share of the batch"),
    ),
)

CHECKS = Table(
    "checks",
    "one bucket of a gradient or an update in an equivalence check, a count sketch",
    (
        *TRIAL_COLUMNS,
        _c("bucket", "Int64", "number of the bucket"),
        _c("update", "Float64", "sum of the bucket's values of the quantity, each with a random sign"),
        _c(
            "quantity",
            "string",
            "gradient, first_update (a step at the recipe's rate) or scaled_update (steps scaled to the parameters' "
            "norm); `<NA>` in older runs: the update of three steps at the recipe's rate",
        ),
        _c("computed_in", "string", "precision of the steps: fp32, or the cell's; `<NA>` in older runs: fp32"),
    ),
)

TRAINING_STEPS = Table(
    "training_steps",
    "one optimizer step of a convergence trial; of trainings of over 10,000 steps every second, third ...",
    (
        *TRIAL_COLUMNS,
        _c("epoch", "Int64", "number of the epoch, from 1"),
        _c("step", "Int64", "number of the step, from 1, from the start of the training"),
        _c("loss", "Float64", "mean loss over the global batch"),
        _c("learning_rate", "Float64", "learning rate of the step, with warm-up and schedule"),
    ),
)

EPOCHS = Table(
    "epochs",
    "one epoch of a convergence trial",
    (
        *TRIAL_COLUMNS,
        _c("epoch", "Int64", "number of the epoch, from 1"),
        _c("samples", "Int64", "number of samples trained on, from the start of the training", "samples"),
        _c(
            "train_s",
            "Float64",
            "training time from the start, with the first steps' warm-up: of the slowest rank, without evaluation",
            "s",
        ),
        _c("evaluation_s", "Float64", "time of the evaluation after this epoch", "s"),
        _c("train_loss", "Float64", "mean training loss over the epoch"),
        _c("learning_rate", "Float64", "learning rate of the epoch's last step, with warm-up and schedule"),
        _c("train_accuracy", "Float64", "the same as val_accuracy on the training set, with convergence.train_metrics"),
        _c("val_loss", "Float64", "mean validation loss, over each sample exactly once"),
        _c("val_accuracy", "Float64", "fraction of the validation samples or tokens classified correctly"),
        _c("val_perplexity", "Float64", "exp of the mean validation loss of a language model"),
        _c("val_psnr", "Float64", "peak signal-to-noise ratio over the validation images", "dB"),
        _c("val_iou", "Float64", "intersection over union of the foreground, over all validation pixels"),
    ),
)
