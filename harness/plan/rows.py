"""The types of recorded rows: plain values, sent by the ranks, stored in the run folder and read by the analysis.

``harness/record/schema`` gives each column its unit and meaning. Optional keys are absent from rows of older schema
versions, of some devices, or of some kinds of trials.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NotRequired

from typing_extensions import TypedDict

from harness.config.values import PlainValue
from harness.plan.exchange_rows import ExchangeRow, ExchangeSeconds
from harness.plan.link_rows import LinkRow
from harness.plan.memory_rows import MemoryFacts

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
    """Whether an error stops its cells; absent from warnings, and from older rows, in which each error did."""


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

    ``environment``: of its worker group, as a hash; absent from lines of older versions.
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
