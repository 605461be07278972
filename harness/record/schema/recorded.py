"""Schema of the recorded tables, and of columns computed from one trial alone."""

from __future__ import annotations

from harness.config.strategy_traits import BUILTIN_TRAITS
from harness.record.schema.table import Table
from harness.record.schema.table import column as _c

TRIAL_COLUMNS = (
    _c("trial_id", "string", "which trial: cell and block, or cell and seed"),
    _c("attempt", "Int64", "1 at first; a lost trial is tried again"),
)

AXIS_COLUMNS = (
    _c("workload", "string", "built-in name or package.module:ClassName"),
    _c("data", "string", "data set"),
    _c("model", "string", "model, by its size"),
    _c("strategy", "string", "single, dp, ddp or fsdp"),
    _c("device", "string", "cpu or cuda"),
    _c("devices", "Int64", "GPUs, or CPU slots"),
    _c("device_ids", "string", "which GPUs of the node, where the file names them"),
    _c("link", "string", "what joins its GPUs, as nvidia-smi topo -m calls it: NV12, PIX, PXB, PHB, NODE, SYS"),
    _c("nodes", "Int64", "machines"),
    _c("scaling", "string", "weak: per-device batch fixed; strong: global batch fixed"),
    _c("per_device_batch_size", "Int64", "batch of one device", "samples"),
    _c("global_batch_size", "Int64", "batch of all devices", "samples"),
    _c("precision", "string", "fp32 (TF32 off), tf32, or bf16 autocast"),
    _c("compile", "boolean", "torch.compile"),
    _c("launcher", "string", "what started the processes: ray, or torchrun as the control"),
    _c("oversubscribed", "boolean", "several ranks share a device: a rehearsal, never a claim about speed"),
    _c("emulated", "boolean", "DataParallel on CPU slots: a rehearsal, never a claim about speed"),
    _c("options", "string", "strategy, workload, optimizer, schedule, training and loader options, as JSON"),
)

COLLECTIVE_COLUMNS = tuple(
    _c(part.column, "Float64", f"profiled: {part.description}", "s")
    for traits in BUILTIN_TRAITS.values()
    for part in traits.profiled_parts
)

TRIALS = Table(
    "trials",
    "one trial, whatever became of it; a retried trial has one row an attempt",
    (
        *TRIAL_COLUMNS,
        _c("cell_id", "string", "hash of the cell's resolved content"),
        _c("base_id", "string", "cell that its ratios are planned against"),
        _c("check_id", "string", "cell whose check shows that it trains as one device does"),
        _c("alone_id", "string", "cell of the bare model on one device at the same per-device batch"),
        _c("wrapped_id", "string", "cell of the same strategy on one device at the same per-device batch"),
        _c(
            "family_id",
            "string",
            "shared by cells that differ in their devices alone: one stands in for a base that failed",
        ),
        _c("launchers_id", "string", "shared by cells that differ in their launcher alone"),
        _c("strategies_id", "string", "shared by cells on several devices that differ in their strategy alone"),
        _c("kind", "string", "throughput, convergence or diagnostic"),
        _c("purpose", "string", "of a diagnostic trial: twin (noise floor), explain (waterfall), equivalence"),
        _c("block", "Int64", "repetition of the grid that it belongs to"),
        _c("seed", "Int64", "seed of the model and of the order of the data"),
        _c("invocation", "Int64", "0 for the first call, one more at each resume; ratios pair inside an invocation"),
        _c("group_id", "string", "worker group: the processes it shared with other trials"),
        _c("position", "Int64", "place in its worker group's order"),
        _c("added", "boolean", "a base that the planner added"),
        _c("inline", "boolean", "true: ran in the command's own process (--inline), for a debugger; never in a ratio"),
        _c("outcome", "string", "ok, oom, diverged, error, timeout, lost or skipped"),
        _c("reason", "string", "why it is not ok"),
        _c("skip_code", "string", "why it was skipped, as one word; <NA> if it was not"),
        _c("error_type", "string", "type of the exception"),
        _c("error_rank", "Int64", "rank that failed first; the others only miss it"),
        _c("diverged_step", "Int64", "step, from 1 over the whole trial, whose loss was the first that is not finite"),
        _c("freed_s", "Float64", "from what the driver saw first of a failure until its worker group was gone", "s"),
        _c("log", "string", "file under the run folder: traceback or stacks, and the last output of that rank"),
        *AXIS_COLUMNS,
        _c("unit", "string", "what throughput counts: samples or tokens"),
        _c("parameters", "Int64", "parameters of the model"),
        _c("device_model", "string", "what the devices are"),
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
        _c("warmup_steps", "Int64", "steps before them"),
        _c("steady", "boolean", "the warm-up ended steady, not at its limit"),
        _c("effective_lr", "Float64", "learning rate, scaled with the global batch; after warm-up, before a schedule"),
        _c("resumed_epoch", "Int64", "epoch of the checkpoint that it went on from; <NA> where it began anew"),
        _c("flops_per_unit", "Float64", "forward and backward of one sample or token, a multiply-add being 2", "FLOP"),
        _c("flops_reason", "string", "why that is absent"),
        _c("measured_peak_flops_per_s", "Float64", "a matrix product on one device in this precision", "FLOP/s"),
        _c(
            "explain_error",
            "string",
            "why it is not explained in full: what failed after its windows, or cannot be done",
        ),
        *COLLECTIVE_COLUMNS,
        _c("doubts", "string", "what speaks against the number, by name; results/README.md explains them"),
        _c("ddp_communication_s", "Float64", "DDP's own clock: first bucket ready to last reduced, a step", "s"),
        _c("ddp_exposed_s", "Float64", "what of it lies after the end of backward's computing", "s"),
        _c("started_at", "Float64", "start of the trial", "s since 1970"),
        _c("trial_s", "Float64", "whole time inside the worker group", "s"),
        _c(
            "steps_s",
            "Float64",
            "part of it spent in steps, of whatever kind, or in a check or examination",
            "s",
        ),
    ),
)

PHASE_COLUMNS = (
    _c("wait_s", "Float64", "waiting for data, on a CPU", "s"),
    _c("idle_s", "Float64", "a GPU's stream idle before the step's first kernel", "s"),
    _c("copy_s", "Float64", "copying the batch to the device", "s"),
    _c("forward_s", "Float64", "forward passes and loss; of all micro-batches", "s"),
    _c("backward_s", "Float64", "backward pass, with the communication that it waits for", "s"),
    _c("optimizer_s", "Float64", "clipping and optimizer step", "s"),
    _c("rest_s", "Float64", "clearing gradients and the harness's own bookkeeping", "s"),
)
HOST_PHASE_COLUMNS = (
    _c("host_wait_s", "Float64", "host's clock beside a GPU's: waiting for data", "s"),
    _c("host_copy_s", "Float64", "starting the copy", "s"),
    _c("host_forward_s", "Float64", "starting the forward pass", "s"),
    _c("host_backward_s", "Float64", "starting the backward pass", "s"),
    _c("host_optimizer_s", "Float64", "starting the optimizer step", "s"),
    _c("host_rest_s", "Float64", "the rest of the host's step", "s"),
)

WINDOWS = Table(
    "windows",
    "one window of one rank; phases are sums over its steps",
    (
        *TRIAL_COLUMNS,
        _c("rank", "Int64", "rank in the worker group"),
        _c("window", "Int64", "number of the window"),
        _c(
            "window_kind",
            "string",
            "warmup, timed, phases, ddp's exchange: together (on), alone (off); epochs: all of a training",
        ),
        _c("duration_s", "Float64", "between the two device syncs", "s"),
        _c("steps", "Int64", "optimizer steps"),
        _c("weight", "Float64", "samples or tokens that this rank trained on"),
        *PHASE_COLUMNS,
        *HOST_PHASE_COLUMNS,
    ),
)

RANKS = Table(
    "ranks",
    "one rank of one trial: where it ran",
    (
        *TRIAL_COLUMNS,
        _c("rank", "Int64", "rank in the worker group"),
        _c("local_rank", "Int64", "rank on its node"),
        _c("node_rank", "Int64", "number of its node in the worker group"),
        _c("node_id", "string", "Ray's id of the node"),
        _c("address", "string", "the node's network address"),
        _c("host", "string", "name of the machine"),
        _c("devices", "string", "devices this rank drives"),
        _c("device_model", "string", "their model"),
        _c("threads", "Int64", "torch's intra-op threads"),
        _c("peak_memory_bytes", "Int64", "allocated on its fullest GPU, or resident on a CPU", "bytes"),
        _c("peak_reserved_bytes", "Int64", "held by the GPU's allocator", "bytes"),
        _c("allocated_by_device", "string", "peak of each of its GPUs, in the order of devices, in bytes"),
        _c("reserved_by_device", "string", "the same of what each one's allocator held"),
        _c("resident_bytes", "Int64", "largest resident size of the process", "bytes"),
        _c("parameter_bytes", "Int64", "of the peak: parameters, or this rank's shards", "bytes"),
        _c("gradient_bytes", "Int64", "of the peak: gradients", "bytes"),
        _c("optimizer_bytes", "Int64", "of the peak: optimizer state", "bytes"),
        _c("watched_s", "Float64", "the timed stretch that the load was watched over", "s"),
        _c("own_cpu_s", "Float64", "processor time of this rank and its loader workers in it", "s"),
        _c("node_cpu_s", "Float64", "processor time of the whole node in it", "s"),
        _c("gpu_utilisation", "Float64", "NVML: part of the last moments in which a kernel ran"),
        _c("power_w", "Float64", "NVML: power of its GPUs at the end", "W"),
        _c("sm_clock_mhz", "Float64", "NVML: lowest of its GPUs at the end", "MHz"),
        _c("sm_clock_fraction", "Float64", "NVML: clock over the highest the GPU has, lowest of its GPUs"),
        _c("temperature_c", "Float64", "NVML: hottest of its GPUs", "degree Celsius"),
        _c("throttled", "string", "NVML: why clocks are lowered; empty where they are not"),
        _c("energy_j", "Float64", "NVML's counter over the timed stretch; <NA> under 10 s and on shared GPUs", "J"),
        _c("samples_per_joule", "Float64", "samples or tokens of this rank for it", "samples/J"),
        _c("foreign_gpu_processes", "Int64", "processes of others on its GPUs; <NA> where they cannot be told"),
        _c("swapped_bytes", "Int64", "memory swapped on the node in it", "bytes"),
    ),
)

STEPS = Table(
    "steps",
    "one optimizer step of one rank in a throughput trial",
    (
        *TRIAL_COLUMNS,
        _c("rank", "Int64", "rank in the worker group"),
        _c("window", "Int64", "number of the window; 0 is the warm-up"),
        _c("step", "Int64", "number of the step in its window"),
        _c("warmup", "boolean", "not counted"),
        _c("step_s", "Float64", "whole step, data included", "s"),
        _c("wait_s", "Float64", "part of it that waited for data", "s"),
        _c("loss", "Float64", "mean loss over this rank's part of the batch"),
    ),
)

CHECKS = Table(
    "checks",
    "one of the sums that a check's update is folded into",
    (
        *TRIAL_COLUMNS,
        _c("bucket", "Int64", "which sum"),
        _c("update", "Float64", "signed sum of the changes of the parameters in it"),
    ),
)

EPOCHS = Table(
    "epochs",
    "one epoch of a convergence trial",
    (
        *TRIAL_COLUMNS,
        _c("epoch", "Int64", "number of the epoch, from 1"),
        _c("samples", "Int64", "samples trained on so far", "samples"),
        _c("train_s", "Float64", "training clock so far: the slowest rank's, evaluation excluded", "s"),
        _c("evaluation_s", "Float64", "evaluation after this epoch", "s"),
        _c("train_loss", "Float64", "mean training loss over the epoch"),
        _c("learning_rate", "Float64", "of the epoch's last step, warm-up and schedule included"),
        _c("val_loss", "Float64", "mean validation loss, each sample exactly once"),
        _c("val_accuracy", "Float64", "part of the validation samples or tokens that is classified rightly"),
        _c("val_perplexity", "Float64", "exp of the mean validation loss of a language model"),
        _c("val_psnr", "Float64", "peak signal-to-noise ratio over the validation images", "dB"),
    ),
)
