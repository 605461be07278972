"""The types of recorded rows: plain values, sent by the ranks, stored in the run folder and read by the analysis.

``harness/record/schema`` gives each column its unit and meaning. Optional keys are absent from rows of some
devices or kinds of trials.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NotRequired

from typing_extensions import TypedDict

from harness.config.values import PlainValue


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

    ``activations``: by precision, 'bf16', or 'bf16 compiled'. ``process_bytes``: resident memory of a rank without the
    model. ``device_bytes``, ``host_bytes``: of the smallest device and node.
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

    ``sizes``: None if the model cannot be built; ``peak``: None if it cannot be traced. ``alone``: the peak is that of
    one device, for the cell's strategy cannot be traced. ``reason``: why something is missing.
    """

    sizes: ModelBytes | None
    process_bytes: int
    peak: TracedPeak | None
    alone: bool
    reason: str


LinkOperation = Literal["copy", "send_receive", "all_reduce", "all_gather", "reduce_scatter"]
"""copy: between two GPUs of one process; send_receive: between two processes; the others are of all ranks."""
LinkTier = Literal["inside a node", "between nodes"]


class LinkRow(TypedDict):
    """One size of one operation between two devices (copy, send_receive) or of all ranks (the collectives).

    ``source``, ``target``: numbers of the devices in the placement, which are the ranks if each has one device; None
    for a collective.
    """

    operation: LinkOperation
    backend: str
    tier: LinkTier
    source: int | None
    target: int | None
    link: str | None
    size_bytes: int
    repetitions: int
    calls: int
    time_s: float
    min_s: float
    max_s: float


Collective = Literal["all_reduce", "all_gather", "reduce_scatter"]


class ExchangeRow(TypedDict):
    """One collective of a step on one rank, in the order in which they are called.

    ``size_bytes``: of the whole tensor, as in LinkRow. ``ready_s``, ``needed_s``: seconds of computation from the start
    of the forward pass, all waiting for exchanges excluded, until it can begin, and until what follows needs it.
    """

    position: int
    operation: Collective
    size_bytes: int
    ready_s: float
    needed_s: float


class ExchangeSeconds(TypedDict, total=False):
    """Seconds a step of the parts of an exchange, each known for one strategy; None if a profile did not show it."""

    dp_replicate_s: float | None
    dp_scatter_s: float | None
    dp_gather_s: float | None
    dp_reduce_s: float | None
    fsdp_all_gather_s: float | None
    fsdp_reduce_scatter_s: float | None
    fsdp_shard_copy_s: float | None
    dp_replicate_exposed_s: float | None
    dp_scatter_exposed_s: float | None
    dp_gather_exposed_s: float | None
    dp_reduce_exposed_s: float | None
    fsdp_all_gather_exposed_s: float | None
    fsdp_reduce_scatter_exposed_s: float | None
    fsdp_shard_copy_exposed_s: float | None
    dp_threads_s: float
    dp_side_by_side_s: float
    ddp_communication_s: float
    ddp_exposed_s: float


Kind = Literal["throughput", "convergence", "diagnostic"]
Purpose = Literal["", "twin", "explain", "profile", "equivalence", "doctor", "links"]
"""The purpose of a diagnostic trial: A/A test of the base, part of the waterfall, profile of collectives, equivalence
check, examination, measurement of links and collectives."""
Outcome = Literal["ok", "oom", "diverged", "error", "timeout", "lost", "skipped"]
SkipCode = Literal[
    "strategy_devices",
    "strategy_nodes",
    "launcher_nodes",
    "launcher_cluster",
    "uneven_nodes",
    "device_ids_on_cpu",
    "device_ids_uneven",
    "too_few_devices",
    "batch_indivisible",
    "micro_batch_indivisible",
    "static_graph",
    "strategy_compile",
    "no_compiler",
    "needs_cuda",
    "shared_device",
    "one_node",
    "model_too_large",
    "too_few_samples",
    "random_evaluation",
    "random_batches",
    "evaluation_fails",
    "doctor",
    "doctor_memory",
    "out_of_memory",
    "precise",
    "not_measured",
    "time_up",
    "inline",
]
"""Why a trial was skipped: its cell cannot run on this machine or data, the doctor found an error, a smaller batch ran
out of memory, the interval is narrow enough, the trial that it would profile has no result, a limit was reached,
or --inline runs one rank only. The column ``reason`` has the numbers."""
WindowKind = Literal["warmup", "timed", "phases", "together", "alone", "epochs"]
"""Only timed windows enter a throughput."""
Severity = Literal["error", "warning", "note"]
"""error: the numbers would be wrong or the run would fail; warning: the numbers mislead; note: good to know."""


class PhaseSeconds(TypedDict, total=False):
    """Seconds of a window by phase, by the device's clock and by the host's.

    ``in_turn_s``: of windows without exchange, what ranks that are slow in turn lose; the same on every rank.
    """

    wait_s: float
    idle_s: float
    copy_s: float
    forward_s: float
    backward_s: float
    optimizer_s: float
    rest_s: float
    host_wait_s: float
    host_copy_s: float
    host_forward_s: float
    host_backward_s: float
    host_optimizer_s: float
    host_rest_s: float
    in_turn_s: float


class WindowRow(PhaseSeconds):
    """One window of one rank."""

    rank: int
    window: int
    window_kind: WindowKind
    duration_s: float
    steps: int
    weight: float


class RankFacts(TypedDict, total=False):
    """The measured columns of one rank: memory, process, load, NVML's readings; None if a value is not known."""

    peak_memory_bytes: int | None
    build_peak_bytes: int | None
    peak_reserved_bytes: int | None
    allocated_by_device: str | None
    reserved_by_device: str | None
    resident_bytes: int | None
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    settings: str
    processors: str
    watched_s: float
    own_cpu_s: float
    node_cpu_s: float
    swapped_bytes: int
    gpu_utilisation: float | None
    power_w: float | None
    sm_clock_mhz: float | None
    sm_clock_fraction: float | None
    temperature_c: float | None
    throttled: str | None
    energy_j: float | None
    samples_per_joule: float | None
    foreign_gpu_processes: int | None


class RankPlace(TypedDict):
    """The place of one rank: node, address, machine."""

    rank: int
    local_rank: int
    node_rank: int
    node_id: str
    address: str
    host: str


class RankRow(RankPlace, RankFacts):
    """One rank of one trial. ``devices`` is text, 'cuda:0, cuda:1'."""

    devices: str
    device_model: NotRequired[str]
    threads: int


class FindingRow(TypedDict):
    """One finding of the doctor."""

    check: str
    severity: Severity
    seen: str
    means: str
    advice: str
    place: NotRequired[str]
    """A place in the user's code; absent if there is none."""
    stops: NotRequired[bool]
    """Whether an error stops its cells; absent from warnings."""


class TrialFacts(ExchangeSeconds, total=False):
    """Further columns of a trial's row, each known for some kinds of trials only."""

    link: str | None
    inline: bool
    steady: bool
    effective_lr: float
    dtypes: str
    shard_units: int
    loss_scale: float
    skipped_updates: int
    resumed_epoch: int | None
    training_samples: int
    distinct_samples: int
    diverged_step: int | None
    freed_s: float
    flops_per_unit: float | None
    flops_reason: str | None
    measured_peak_flops_per_s: float | None
    explain_error: str
    links_error: str
    findings: list[FindingRow]
    figures: dict[str, str]
    memory: MemoryFacts
    estimates: dict[str, int]


class TrialAxes(TypedDict):
    """A cell's value on each axis of the tables; the link of its GPUs is a fact of the trial."""

    workload: str
    data: str | None
    model: str | None
    strategy: str
    device: str
    devices: int
    device_ids: str | None
    nodes: int
    scaling: str
    per_device_batch_size: int | None
    global_batch_size: int
    precision: str
    compile: bool
    launcher: str
    oversubscribed: bool
    emulated: bool
    emulated_compute: NotRequired[bool]
    faulty: NotRequired[bool]
    options: Mapping[str, PlainValue]
    variant: NotRequired[str | None]


class PartnerIds(TypedDict):
    """The cells that a cell is compared with; None if it has no such partner."""

    base_id: str | None
    alone_id: str | None
    wrapped_id: str | None


class SetIds(TypedDict):
    """The sets of cells in which a cell is compared; None if it is compared in no such set."""

    family_id: str | None
    launchers_id: str | None
    strategies_id: str | None


class TrialColumns(TrialAxes, PartnerIds, SetIds):
    """A trial's identity and axes."""

    trial_id: str
    cell_id: str
    check_id: str | None
    kind: Kind
    purpose: Purpose
    block: int
    seed: int
    added: bool
    code: NotRequired[str | None]


class Circumstances(TypedDict):
    """The circumstances of one attempt at a trial; a trial that was not started has no group.

    ``environment``: of its worker group, as a hash.
    """

    attempt: int
    invocation: int
    group_id: str | None
    environment: NotRequired[str | None]
    position: int | None


class RecordedTrial(TrialColumns, Circumstances):
    """One line of trials.jsonl."""

    outcome: Outcome
    reason: str
    skip_code: SkipCode | None
    error_type: str | None
    error_rank: int | None
    started_at: float | None
    trial_s: float | None
    steps_s: float | None
    unit: str | None
    parameters: int | None
    facts: TrialFacts
    parts: dict[str, float]
    ranks: list[RankRow]
    windows: list[WindowRow]
    links: list[LinkRow] | None
    exchanges: NotRequired[list[ExchangeRow] | None]
    log: str | None
