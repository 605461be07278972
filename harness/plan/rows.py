"""The types of recorded rows: plain values, sent by the ranks, stored in the run folder and read by the analysis.

A field with a ``Meaning`` is a column of a table: ``harness/record/schema`` takes its name, type, unit and meaning from
here. Optional keys are absent from rows of some devices or kinds of trials.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NotRequired

from typing_extensions import TypedDict

from harness.config.axes import Meaning, TrialAxes

Json = dict[str, Any]
"""A JSON object, or another mapping whose values have no declared type, such as a state dict of torch."""


class ActivationBytes(TypedDict):
    """Tensors that a forward pass keeps for backward, without parameters: a constant part, and one for each sample."""

    fixed: int
    per_sample: int


class ModelBytes(TypedDict):
    """The sizes of a model, in bytes.

    ``unit_bytes``: parameters of the largest unit that fsdp shards; ``root_bytes``: of those in no unit. ``on_meta``:
    the model is built without memory.
    """

    parameter_bytes: int
    trainable_bytes: int
    buffer_bytes: int
    unit_bytes: int
    root_bytes: int
    on_meta: bool


class MemoryFacts(ModelBytes):
    """The sizes from which the peak memory of cells with one model is estimated, in bytes.

    ``activations``: by mode, 'bf16', 'bf16 compiled' or 'bf16 checkpointed'. ``process_bytes``: resident memory of a
    rank without the model. ``device_bytes``, ``host_bytes``: of the smallest device and node.
    """

    activations: dict[str, ActivationBytes]
    process_bytes: int
    device_bytes: int
    host_bytes: int


class TracedPeak(TypedDict):
    """The traced peak of a step on one device, in bytes; ``without_gradients_bytes``: of all but gradients.

    Both may be at different moments of the step.
    """

    peak_bytes: int
    without_gradients_bytes: int


class Examination(TypedDict):
    """What the trace of a cell found. ``process_bytes``: resident memory of the process without the model.

    ``sizes``: None if the model cannot be built; ``peak``: None if it cannot be traced. ``reason``: why one is missing.
    """

    sizes: ModelBytes | None
    process_bytes: int
    peak: TracedPeak | None
    reason: str


Collective = Literal["all_reduce", "all_gather", "reduce_scatter"]
LinkOperation = Literal["copy", "send_receive", Collective]
"""copy: between two GPUs of one process; send_receive: between two processes; the others are of all ranks."""
LinkTier = Literal["inside a node", "between nodes"]
PairTier = LinkTier | Literal["between nodes, same rail"]
"""Of two GPUs; a rail: the network that connects the GPUs of one number of each node."""


class LinkRow(TypedDict):
    """One size of one operation between two devices (copy, send_receive) or of all ranks (the collectives).

    ``source``, ``target``: numbers of the devices in the placement, which are the ranks if each has one device; None
    for a collective.
    """

    operation: LinkOperation
    backend: str
    tier: PairTier
    source: int | None
    target: int | None
    link: str | None
    size_bytes: int
    repetitions: Annotated[int, Meaning("number of timed repetitions")]
    calls: Annotated[int, Meaning("number of calls in each repetition, back to back")]
    time_s: Annotated[
        float, Meaning("time of one transfer or collective on the slowest rank, median over repetitions", "s")
    ]
    min_s: Annotated[float, Meaning("time, shortest repetition", "s")]
    max_s: Annotated[float, Meaning("time, longest repetition", "s")]


class ExchangeRow(TypedDict):
    """One collective of a step on one rank, in the order in which they are called.

    ``ready_s``, ``needed_s``: all waiting for exchanges excluded.
    """

    position: Annotated[int, Meaning("number of the collective in the step, from 0")]
    operation: Annotated[
        Collective,
        Meaning(
            "all_reduce (ddp: a bucket), all_gather or reduce_scatter (fsdp: a unit; ddp: all_gather of sparse rows)"
        ),
    ]
    size_bytes: Annotated[int, Meaning("size of the whole tensor", "bytes")]
    ready_s: Annotated[float, Meaning("computation from the start of the forward pass until it can begin", "s")]
    needed_s: Annotated[
        float, Meaning("computation from the start of the forward pass until what follows needs it", "s")
    ]


Kind = Literal["throughput", "convergence", "diagnostic"]
Purpose = Literal["", "twin", "threads", "explain", "profile", "equivalence", "doctor", "links"]
"""The purpose of a diagnostic trial; PURPOSES in plan/trial.py says what each is."""
Outcome = Literal["ok", "oom", "diverged", "error", "timeout", "lost", "skipped"]
NoSuchCell = Literal["strategy_devices", "strategy_nodes", "excluding"]
NoSuchNumbers = Literal["uneven_nodes", "batch_indivisible", "micro_batch_indivisible"]
ImpossibleCode = Literal[NoSuchCell, NoSuchNumbers]
"""Why no machine can run a cell."""
TooFew = Literal["too_few_devices", "device_ids_on_cpu", "device_ids_uneven", "launcher_nodes", "launcher_cluster"]
NotHere = Literal["no_compiler", "needs_cuda", "shared_device", "gloo_shards", "one_node", "inline"]
NotTheseData = Literal["too_few_samples", "random_evaluation", "random_batches", "evaluation_fails"]
Refused = Literal["doctor", "doctor_memory", "model_too_large", "no_shard_units"]
NotAnyMore = Literal["out_of_memory", "precise", "not_measured", "time_up"]
SkipCode = Literal[ImpossibleCode, TooFew, NotHere, NotTheseData, Refused, NotAnyMore]
"""Why a trial was skipped: its cell cannot run on this machine or data, the doctor found an error, a smaller batch ran
out of memory, the interval is narrow enough, its cell raised each time or the trial that it would profile has no
result, a limit was reached, or --inline runs one rank only. The column ``reason`` has the numbers."""
WindowKind = Literal["warmup", "timed", "phases", "together", "alone", "epochs"]
"""Only timed windows enter a throughput."""
Severity = Literal["error", "warning", "note"]
"""error: the numbers would be wrong or the run would fail; warning: the numbers mislead; note: good to know."""


class PhaseSeconds(TypedDict, total=False):
    """Seconds of a window by phase, by the device's clock and by the host's.

    ``in_turn_s`` and ``late_s``: of windows without exchange; the first, what ranks that are slow in turn lose, is the
    same on every rank.
    """

    wait_s: Annotated[float, Meaning("waiting for data, on a CPU", "s")]
    idle_s: Annotated[float, Meaning("idle time of the GPU's stream before the step's first kernel", "s")]
    copy_s: Annotated[float, Meaning("copy of the batch to the device", "s")]
    forward_s: Annotated[float, Meaning("forward pass and loss, over all micro-batches", "s")]
    backward_s: Annotated[float, Meaning("backward pass, including the communication that it waits for", "s")]
    optimizer_s: Annotated[float, Meaning("gradient clipping and optimizer step", "s")]
    rest_s: Annotated[float, Meaning("clearing of gradients, and the harness's own bookkeeping", "s")]
    host_wait_s: Annotated[float, Meaning("host's time beside a GPU's: waiting for data", "s")]
    host_copy_s: Annotated[float, Meaning("host's time: launch of the copy", "s")]
    host_forward_s: Annotated[float, Meaning("host's time: launch of the forward pass", "s")]
    host_backward_s: Annotated[float, Meaning("host's time: launch of the backward pass", "s")]
    host_optimizer_s: Annotated[float, Meaning("host's time: launch of the optimizer step", "s")]
    host_rest_s: Annotated[float, Meaning("host's time: rest of the step", "s")]
    in_turn_s: Annotated[
        float,
        Meaning("without exchange: sum over steps of the slowest rank's time, less the largest sum of a rank", "s"),
    ]
    late_s: Annotated[
        float,
        Meaning(
            "without exchange: waiting for later ranks in collectives of the user's own code, by steps after it", "s"
        ),
    ]


class WindowRow(PhaseSeconds):
    """One window of one rank."""

    rank: Annotated[int, Meaning("rank in the worker group")]
    window: Annotated[int, Meaning("number of the window in the trial, from 0")]
    window_kind: Annotated[
        WindowKind, Meaning("warmup, timed, phases, epochs, or together and alone: with and without gradient exchange")
    ]
    duration_s: Annotated[float, Meaning("time between the two device synchronizations", "s")]
    steps: Annotated[int, Meaning("number of optimizer steps")]
    weight: Annotated[float, Meaning("number of samples or tokens that this rank trained on")]


STEADY_CHANGE = 0.05
"""The maximum relative difference of two rounds' medians, or of a trend's ends, in a steady state."""
STEADY_NOISE = 0.20
"""The upper limit of that threshold when the noise of single steps raises it."""
POWER_CAP, HELD_BY_POWER = "sw power cap", "held by power"
"""A GPU's power limit as a reason for lower clocks, by NVML's bit and counter: its usual state under load."""


class RankFacts(TypedDict, total=False):
    """The measured columns of one rank: memory, process, load, NVML's readings; None if a value is not known."""

    peak_memory_bytes: Annotated[
        int | None, Meaning("peak in the steps: allocated on the fullest of its GPUs, or resident on a CPU", "bytes")
    ]
    build_peak_bytes: Annotated[
        int | None, Meaning("peak while model and optimizer were built, as peak_memory_bytes", "bytes")
    ]
    peak_reserved_bytes: Annotated[
        int | None, Meaning("peak memory reserved by the allocator on the fullest of its GPUs", "bytes")
    ]
    allocated_by_device: Annotated[
        str | None, Meaning("peak allocated bytes of each of its GPUs, in the order of devices")
    ]
    reserved_by_device: Annotated[
        str | None, Meaning("peak reserved bytes of each of its GPUs, in the order of devices")
    ]
    resident_bytes: Annotated[int | None, Meaning("peak resident set size of the process", "bytes")]
    parameter_bytes: Annotated[int, Meaning("part of the peak: parameters, or this rank's shards", "bytes")]
    gradient_bytes: Annotated[int, Meaning("part of the peak: gradients", "bytes")]
    optimizer_bytes: Annotated[int, Meaning("part of the peak: optimizer state", "bytes")]
    step_p5_s: Annotated[float, Meaning("5th percentile of its timed steps", "s")]
    step_s: Annotated[float, Meaning("median of its timed steps", "s")]
    step_p95_s: Annotated[float, Meaning("95th percentile of its timed steps", "s")]
    settings: Annotated[str, Meaning("settings of its process, beside the file's, that change speed or arithmetic")]
    processors: Annotated[str, Meaning("processors that its training thread is pinned to; empty if none")]
    watched_s: Annotated[
        float, Meaning("observed time: from the start of the timed windows to their end, without other variants", "s")
    ]
    own_cpu_s: Annotated[float, Meaning("CPU time of this rank and its loader workers in the observed time", "s")]
    node_cpu_s: Annotated[float, Meaning("CPU time of the whole node in the observed time", "s")]
    swapped_bytes: Annotated[int, Meaning("memory swapped on the node in the observed time", "bytes")]
    gpu_utilisation: Annotated[
        float | None, Meaning("NVML: fraction of the last sampling period in which a kernel ran, mean of GPUs")
    ]
    power_w: Annotated[
        float | None,
        Meaning(
            "NVML: power of one of its GPUs, energy over the observed time; without energy counters, at the end", "W"
        ),
    ]
    sm_clock_mhz: Annotated[float | None, Meaning("NVML: SM clock at the end, lowest of its GPUs", "MHz")]
    sm_clock_fraction: Annotated[float | None, Meaning("NVML: SM clock over the GPU's maximum, lowest of its GPUs")]
    temperature_c: Annotated[
        float | None, Meaning("NVML: temperature at the end, highest of its GPUs", "degree Celsius")
    ]
    throttled: Annotated[str | None, Meaning("NVML: reasons for throttled clocks; empty if none")]
    energy_j: Annotated[
        float | None, Meaning("NVML: energy in the observed time; `<NA>` under 10 s and on shared GPUs", "J")
    ]
    samples_per_joule: Annotated[float | None, Meaning("samples or tokens of this rank over energy_j", "samples/J")]
    foreign_gpu_processes: Annotated[
        int | None, Meaning("number of processes of others on its GPUs; `<NA>` if unknown")
    ]


class RankPlace(TypedDict):
    """The place of one rank: node, address, machine."""

    rank: Annotated[int, Meaning("rank in the worker group")]
    local_rank: Annotated[int, Meaning("rank on its node")]
    node_rank: Annotated[int, Meaning("number of its node in the worker group")]
    node_id: Annotated[str, Meaning("Ray's node id")]
    address: Annotated[str, Meaning("network address of the node")]
    host: Annotated[str, Meaning("host name of the machine")]


class RankRow(RankPlace, RankFacts):
    """One rank of one trial. ``devices`` is text, 'cuda:0, cuda:1'."""

    devices: Annotated[str, Meaning("devices of this rank")]
    device_model: NotRequired[Annotated[str, Meaning("product name of its devices")]]
    threads: Annotated[int, Meaning("number of torch's intra-op threads of a rank")]


class FindingRow(TypedDict):
    """One finding of the doctor."""

    check: Annotated[str, Meaning("name of the check")]
    severity: Annotated[
        Severity, Meaning("error (such cells are skipped, or measured and marked as faulty), warning or note")
    ]
    seen: Annotated[str, Meaning("observation, with the numbers")]
    means: Annotated[str, Meaning("consequence")]
    advice: Annotated[str, Meaning("recommended action")]
    place: NotRequired[Annotated[str, Meaning("place in the user's code to look at first")]]
    stops: NotRequired[Annotated[bool, Meaning("true if cells with the error are skipped; `<NA>` of warnings")]]


class TrialFacts(TypedDict, total=False):
    """Facts of a trial, each known for some kinds of trials only.

    Those without a ``Meaning`` are in its line, and no column unless they are axes too: ``shard_units``, fsdp's groups
    of parameters that are gathered together; ``dtypes`` of weights, gradients, forward pass and loss; ``loss_scale``
    after fp16's timed steps; ``busy_s``: seconds of a profiled step in which the least busy GPU runs a kernel, copies
    or fills; ``distinct_samples`` that an epoch reads, of the doctor; ``diverged_step``, from 1; ``freed_s`` from a
    failure's first sign on the driver to the end of its worker group; ``loader_workers`` of a device that keep up with
    the examined cell, of the doctor if the file leaves their number open.
    """

    exchange_s: Annotated[
        Mapping[str, float],
        Meaning(
            "time per step by part of the exchange: collectives by a profile, overlapped or not; all-reduce by DDP's "
            "timer, first bucket ready to last reduced, of the rank that waits least; ddp's broadcast of buffers, and "
            "its sums of sparse gradients, each by itself; CPU time that ddp's exchange adds; collectives of the "
            "user's own code, without their wait for later ranks; "
            "dp's threads, and side by side: contention of its replicas",
            "s",
        ),
    ]
    exchange_bytes: Annotated[
        Mapping[str, float],
        Meaning(
            "what a rank gives in a step to ddp's broadcast of buffers and sums of sparse gradients, and by operation "
            "to collectives of the user's own code",
            "bytes",
        ),
    ]
    exposed_s: Annotated[
        Mapping[str, float], Meaning("part of exchange_s in which nothing is computed, by the same clocks", "s")
    ]

    link: str | None
    ingest: bool
    inline: Annotated[bool, Meaning("true if run in the command's own process (--inline), for a debugger; in no ratio")]
    steady: Annotated[bool, Meaning("true if the warm-up ended in a steady state, false if at its limit")]
    effective_lr: Annotated[
        float, Meaning("learning rate scaled with the global batch, after warm-up, before any schedule")
    ]
    dtypes: str
    shard_units: int
    loss_scale: float
    busy_s: float
    skipped_updates: Annotated[int, Meaning("timed steps whose update the loss scale skipped, at least")]
    resumed_epoch: Annotated[
        int | None, Meaning("epoch of the checkpoint that training resumed from; `<NA>` if from scratch")
    ]
    training_samples: Annotated[int, Meaning("number of samples in the training set; `<NA>` of throughput", "samples")]
    distinct_samples: int
    loader_workers: int
    diverged_step: int | None
    freed_s: float
    flops_per_unit: Annotated[
        float | None, Meaning("forward and backward of one sample or token; a multiply-add counts as 2", "FLOP")
    ]
    flops_reason: Annotated[str | None, Meaning("reason if flops_per_unit is `<NA>`")]
    measured_peak_flops_per_s: Annotated[
        float | None, Meaning("matrix product on one device in this precision", "FLOP/s")
    ]
    explain_error: Annotated[
        str, Meaning("reason if the waterfall is incomplete: a failure after the timed windows, or a limit")
    ]
    links_error: Annotated[str, Meaning("reason if the measurement of links or collectives is incomplete")]
    optimizers: Annotated[str, Meaning("of a script: its optimizers, by their first step; one is counted")]
    connected_ranks: Annotated[
        int, Meaning("of a script: ranks in one process group with equal parameters, if these can be compared")
    ]
    ended_early: Annotated[bool, Meaning("true if a script ended by itself before its last window")]
    evaluations: Annotated[int, Meaning("of a script: evaluations between the steps of its windows, on rank 0")]
    findings: list[FindingRow]
    figures: dict[str, str]
    memory: MemoryFacts
    estimates: dict[str, int]


class PartnerIds(TypedDict):
    """The cells that a cell is compared with; None if it has no such partner."""

    base_id: Annotated[str | None, Meaning("planned base cell, the denominator of its ratios")]
    alone_id: Annotated[str | None, Meaning("cell of the unwrapped model on one device at the same per-device batch")]
    wrapped_id: Annotated[str | None, Meaning("cell of the same strategy on one device at the same per-device batch")]


class SetIds(TypedDict):
    """The sets of cells in which a cell is compared; None if it is compared in no such set."""

    family_id: Annotated[
        str | None, Meaning("set of cells that differ only in their devices: one replaces a base that failed")
    ]
    launchers_id: Annotated[str | None, Meaning("set of cells that differ only in their launcher")]


class TrialColumns(TrialAxes, PartnerIds, SetIds):
    """A trial's identity and axes."""

    trial_id: Annotated[str, Meaning("id of the trial: its cell, and its block or seed")]
    cell_id: Annotated[str, Meaning("hash of the cell's resolved content")]
    check_id: Annotated[str | None, Meaning("cell of its equivalence check")]
    kind: Annotated[Kind, Meaning("throughput, convergence or diagnostic")]
    purpose: Annotated[
        Purpose,
        Meaning(
            "of a diagnostic trial: twin (A/A test), threads (all of a CPU's in one process), explain (waterfall), "
            "profile, equivalence, doctor or links"
        ),
    ]
    block: Annotated[int, Meaning("number of the block, a repetition of the grid")]
    seed: Annotated[int, Meaning("random seed of the model and of the data order")]
    added: Annotated[bool, Meaning("true for a trial that the planner added: of a base, or diagnostic")]
    code: NotRequired[str | None]


class Circumstances(TypedDict):
    """The circumstances of one attempt at a trial; a trial that was not started has no group.

    ``environment``: of its worker group, as a hash.
    """

    attempt: Annotated[int, Meaning("number of the attempt, from 1; a lost trial is retried")]
    invocation: Annotated[int, Meaning("number of the invocation, from 0, plus 1 per resume; pairs of one come first")]
    group_id: Annotated[str | None, Meaning("worker group, whose processes ran this trial and others")]
    environment: NotRequired[
        Annotated[
            str | None,
            Meaning(
                "hash of its worker group's code, versions, settings and hardware; equal in pairs of two invocations"
            ),
        ]
    ]
    position: int | None


class TrialLine(TrialColumns, Circumstances):
    """One line of trials.jsonl, which also counts the trial's ranks and windows.

    ``error_type``, ``error_rank``: the exception's class, and the rank that failed first; others fail because of it.
    ``trial_s``: seconds inside the worker group, on rank 0, without other variants; ``steps_s``: those in steps, a
    check or an examination.
    """

    outcome: Annotated[Outcome, Meaning("outcome: ok, oom, diverged, error, timeout, lost or skipped")]
    reason: Annotated[str, Meaning("reason for an outcome other than ok")]
    skip_code: Annotated[SkipCode | None, Meaning("reason for a skip, as one word; `<NA>` if it was not skipped")]
    error_type: str | None
    error_rank: int | None
    started_at: Annotated[float | None, Meaning("start of the trial, as Unix time", "s since 1970")]
    trial_s: float | None
    steps_s: float | None
    unit: Annotated[str | None, Meaning("unit of throughput: samples or tokens")]
    parameters: Annotated[int | None, Meaning("number of parameters of the model")]
    facts: TrialFacts
    parts: dict[str, float]
    links: list[LinkRow] | None
    exchanges: NotRequired[list[ExchangeRow] | None]
    log: Annotated[
        str | None, Meaning("path in the run folder: traceback or stacks, and the last output of the failed rank")
    ]


class RecordedTrial(TrialLine):
    """One attempt at a trial, with the rows of its ranks and of their windows."""

    ranks: Sequence[RankRow]
    windows: Sequence[WindowRow]
