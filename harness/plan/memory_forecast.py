"""The peak memory of a cell, against the memory of a device and of a node: for the doctor, and before a run.

A peak is what a device keeps from step to step, from the model's sizes, and activations. The doctor measures these in
each precision on real tensors, so that one examination of a model judges all of its cells. Before a run they are what
the peak of a traced step is above the rest. Sizes are in bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from harness.config.values import GIB, MIB
from harness.plan.cell import Cell, Options
from harness.plan.checks import Finding
from harness.plan.comparison import REDUCED_PRECISIONS, single_device_cell
from harness.plan.inventory import Inventory
from harness.plan.rows import ActivationBytes, Examination, MemoryFacts, ModelBytes, Severity

NAME = "memory"
WARN, REFUSE = 0.9, 1.5
"""Fractions of the available memory: an estimate beyond the first is a warning, beyond the second an error."""


@dataclass(frozen=True)
class Need:
    """An estimated peak, and the memory that is there for it. ``place``: its name in messages."""

    place: str
    needed: int
    available: int

    @property
    def ratio(self) -> float:
        return self.needed / self.available


@dataclass(frozen=True)
class State:
    """What a device keeps from step to step, in bytes; ``parameters``: with the model's buffers.

    ``buckets``: DDP's, of the gradients that it exchanges; with gradient_as_bucket_view they are the gradients.
    """

    parameters: int
    gradients: int
    optimizer: int
    buckets: int = 0

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.buckets


class Mode(NamedTuple):
    """What the activations of a model depend on; as text, the key of MemoryFacts.activations: 'bf16 compiled'."""

    precision: str
    compiled: bool = False
    checkpointed: bool = False

    @classmethod
    def of(cls, cell: Cell) -> Mode:
        return cls(cell.precision, cell.compile, cell.activation_checkpointing == "full")

    def __str__(self) -> str:
        return f"{self.precision}{' compiled' * self.compiled}{' checkpointed' * self.checkpointed}"


def estimate(model: MemoryFacts, cell: Cell, samples: int | None = None) -> int | None:
    """Return the estimated peak of the fullest device, or of a rank's process on a CPU.

    None if the activations in the cell's mode are not known. ``samples``: samples of a micro-batch
    of one device, if not the cell's own.
    """
    kept = _kept(model, cell)
    if kept is None:
        return None
    activations = kept["fixed"] + (micro_batch(cell) if samples is None else samples) * kept["per_sample"]
    return estimate_with(model, cell, activations, kept["fixed"])


def estimate_with(model: MemoryFacts, cell: Cell, activations: int = 0, fixed: int = 0) -> int:
    """Return the estimated peak with given activations, by default without any; see ``tensor_peak``."""
    return tensor_peak(model, cell, activations, fixed) + (model["process_bytes"] if cell.device == "cpu" else 0)


def _kept(model: MemoryFacts, cell: Cell) -> ActivationBytes | None:
    """Return the activations in the cell's mode; None if unknown."""
    return None if _records_graphs(cell) else model["activations"].get(str(Mode.of(cell)))


def _records_graphs(cell: Cell) -> bool:
    """Return whether a cell's steps are CUDA graphs, whose memory pools no trace or step without them shows."""
    return cell.device == "cuda" and cell.compile_mode != "default"


def micro_batch(cell: Cell) -> int:
    """Return the samples of one device in one micro-batch."""
    share = cell.per_device_batch_size or -(-cell.global_batch_size // cell.devices)
    return -(-share // cell.micro_batches)


def needs(model: MemoryFacts, cell: Cell, samples: int | None = None) -> list[Need]:
    """Return what a cell needs: of a device and of a node's host memory; on a CPU, the node's for all its ranks."""
    ranks = ranks_of_node(cell)
    peak = estimate(model, cell, samples)
    if cell.device == "cpu":
        return [] if peak is None else [Need("a node", ranks * peak, model["host_bytes"])]
    stays_on_meta = model["on_meta"] and cell.traits.shards_parameters  # else it is initialised on the host
    built = 0 if stays_on_meta else ranks * (model["parameter_bytes"] + model["buffer_bytes"])
    on_host = [Need("the host memory of a node", built, model["host_bytes"])]
    return on_host if peak is None else [Need("a device", peak, model["device_bytes"]), *on_host]


def ranks_of_node(cell: Cell) -> int:
    """Return the processes of a cell on one node."""
    return 1 if cell.traits.one_process else -(-cell.devices // cell.nodes)


def judge(model: MemoryFacts, cell: Cell) -> list[Finding]:
    """Judge the tightest of a cell's needs. A strategy of the user's own may need less than is assumed: no error."""
    tightest = max(needs(model, cell), key=lambda need: need.ratio, default=None)
    if tightest is None or tightest.ratio <= WARN:
        return []
    refused = tightest.ratio > REFUSE and cell.own_traits is None
    severity: Severity = "error" if refused else "warning"
    means = "not enough memory: such cells are skipped" if refused else "out of memory is likely, or close"
    if cell.own_traits is not None:
        means += ", unless the strategy needs less memory than one with its traits"
    return [Finding(NAME, severity, _seen(model, cell, tightest), means, _advice(model, cell, tightest), stops=True)]


def affordable(model: MemoryFacts, cell: Cell) -> bool:
    """Return whether no need of a cell that is known exceeds its memory."""
    return all(need.ratio <= WARN for need in needs(model, cell))


def affordable_divisor(model: MemoryFacts, cell: Cell) -> int | None:
    """Return the divisor of the batch, a power of two, at which a cell has enough memory; None if it never has."""
    divisor = 1
    while not affordable(model, at_smaller_batch(cell, divisor)):
        if divisor >= micro_batch(cell):
            return None
        divisor *= 2
    return divisor


def at_smaller_batch(cell: Cell, divisor: int) -> Cell:
    """Return the cell with the batch divided, rounded down, at least 1 per device, at the same learning rate."""
    recipe = dict(cell.training)
    share = max(1, cell.per_device_batch_size // divisor) if cell.per_device_batch_size else None
    batch = share * cell.devices if share else max(1, cell.global_batch_size // divisor)
    if isinstance(base := cell.training.get("lr_base_batch_size"), int | float):
        recipe["lr_base_batch_size"] = base * batch / cell.global_batch_size
    return replace(cell, training=recipe, per_device_batch_size=share, global_batch_size=batch)


def _seen(model: MemoryFacts, cell: Cell, need: Need) -> str:
    kind = "micro-batch" if cell.micro_batches > 1 else "batch"
    kept = _kept(model, cell)
    per_sample = kept["per_sample"] / MIB if kept else 0
    return (
        f"estimated peak for {need.place}: {need.needed / GIB:.1f} GiB at a {kind} of {micro_batch(cell)} per device "
        f"({per_sample:.2f} MiB of activations a sample); available: {need.available / GIB:.1f} GiB"
    )


def _advice(model: MemoryFacts, cell: Cell, need: Need) -> str:
    if cell.device == "cuda" and need.place != "a device":
        return "build the model on the meta device and give the workload init_weights(model), or use fewer ranks a node"
    size = micro_batch(cell)
    at = {n: next(other.needed for other in needs(model, cell, n) if other.place == need.place) for n in (0, size)}
    per_sample = (at[size] - at[0]) / size
    most = int((WARN * need.available - at[0]) / per_sample) if per_sample else 0
    if most < 1:
        return "use a smaller model, or fsdp on more devices"
    recomputed = "activation_checkpointing: full, " * (cell.activation_checkpointing == "none")
    return f"use a batch of {most * cell.micro_batches}, gradient accumulation, {recomputed}bf16, or fsdp"


def state(model: ModelBytes, cell: Cell) -> State:
    """Return what one device keeps from step to step: of a sharding strategy its shards, of dp's the first device."""
    trainable, shards = model["trainable_bytes"], shards_of(cell)
    parameters = model["buffer_bytes"] + model["parameter_bytes"] // shards
    optimizer = optimizer_copies(cell.optimizer) * trainable // shards
    if cell.traits.buckets_gradients:
        views = bool(cell.strategy_options.get("gradient_as_bucket_view"))
        return State(parameters, 0 if views else trainable, optimizer, trainable)
    return State(parameters, trainable // shards, optimizer)


def shards_of(cell: Cell) -> int:
    """Return the number of devices over which a model's parameters are sharded: 1 if they are whole."""
    if not cell.traits.shards_parameters:
        return 1
    return cell.devices // cell.nodes if cell.strategy_options.get("mesh") == "hybrid" else cell.devices


def tensor_peak(model: ModelBytes, cell: Cell, activations: int, fixed: int = 0) -> int:
    """Return the peak of the tensors on the fullest device, which is the first of dp.

    ``activations``: of one device's micro-batch; ``fixed``: the part of them that does not grow with the batch.

    dp's first device also has the gradients of its replica, not yet added up. The emulation on a CPU has the copies,
    gradients and activations of all replicas in one process. A rank of fsdp has two gathered units (one ahead) and one
    unit's gradients beside its shards. The parameters in no unit stay gathered; so do all without
    reshard_after_forward. Gradients that accumulate over micro-batches are not sharded before the last one.
    """
    trainable, in_step = model["trainable_bytes"], activations
    if cell.traits.shards_parameters and cell.devices > 1:
        options, unit = cell.strategy_options, model["unit_bytes"]
        by_policy = cell.precision in REDUCED_PRECISIONS and options.get("mixed_precision") != "autocast"
        width = 0.5 if by_policy else 1.0
        gathered = model["parameter_bytes"]
        if options.get("reshard_after_forward") is not False:
            gathered = min(model["root_bytes"] + 2 * unit, gathered)
        of_unit = (1 + width) * min(unit, trainable)  # as computed, and to be reduced
        gradients = of_unit + (trainable if cell.micro_batches > 1 else 0)
        # what is fixed is nearly all low-precision copies of weights, which the policy does not keep
        in_step += int(width * gathered + gradients) - (fixed if by_policy else 0)
    elif cell.traits.replicates and cell.devices > 1:
        in_step += trainable
        if cell.device == "cpu":
            in_step = cell.devices * (model["parameter_bytes"] + in_step)
    return state(model, cell).total + max(in_step, _of_update(trainable // shards_of(cell), cell))


def optimizer_copies(optimizer: Options) -> int:
    """Return the number of tensors of a parameter's size that the optimizer keeps; 2 for one that is not known."""
    name = optimizer.get("name")
    if name == "SGD":
        return int(bool(optimizer.get("momentum")))
    if name == "RMSprop":
        return 1 + bool(optimizer.get("momentum")) + bool(optimizer.get("centered"))
    if name == "Adagrad":
        return 1
    return 2 + bool(optimizer.get("amsgrad"))


def _of_update(trainable: int, cell: Cell) -> int:
    """Return the temporary memory of the update: one tensor a parameter in torch's multi-tensor Adam, as on CUDA."""
    by_tensor = cell.optimizer.get("fused") or cell.optimizer.get("foreach") is False
    adam = str(cell.optimizer.get("name")).endswith(("Adam", "AdamW"))
    return trainable if adam and cell.device == "cuda" and not by_tensor else 0


Verdict = Literal["fits", "may not fit", "will not fit", "unknown"]
CUDA_ALLOWANCE = 1536 * MIB
"""CUDA's context, the kernels and workspaces of cuBLAS and cuDNN, NCCL's buffers.

Not measured here: the middle of the 1 to 2 GB that Hugging Face's documentation states for the kernels alone ("Model
training anatomy"), of older versions that load all of them.
"""


@dataclass(frozen=True)
class Forecast:
    """The peak memory of one device of a cell, by parts, in bytes, and the memory that is there for it.

    ``activations``: with temporary tensors; what the peak is above the state. ``allowance``: what is in no tensor of a
    step. ``sharers``: processes that share this memory: on a CPU those of a node, on a GPU those of an oversubscribed
    cell. ``counted``: with the activations of one device, for the strategy is not traced. ``reason``: why the step was
    not traced. None: not known.
    """

    state: State | None
    activations: int | None
    allowance: int
    available: int | None
    sharers: int = 1
    counted: bool = False
    reason: str = ""

    @property
    def peak(self) -> int | None:
        """The sum of all parts; None if one is not known."""
        if self.state is None or self.activations is None:
            return None
        return self.state.total + self.activations + self.allowance

    @property
    def verdict(self) -> Verdict:
        """Whether the peak fits; if only partly known, whether the known part alone is too large."""
        known = self.allowance + (self.state.total if self.state else 0) + (self.activations or 0)
        if self.available is None:
            return "unknown"
        if self.sharers * known > REFUSE * self.available:
            return "will not fit"
        if self.sharers * known > WARN * self.available:
            return "may not fit"
        return "unknown" if self.peak is None else "fits"


OF_GRAPHS = "CUDA graphs keep memory pools of their own, which are not in a trace"
MOST_DEVICES = 8
"""The largest fsdp that is traced, whose operators grow with devices; a larger one has smaller shards beside the same
activations and gathered units."""
IN_MEMORY = ("accumulation", "clip_grad_norm", "clip_grad_value")
"""The options of a training that its memory depends on."""
NOT_IN_MEMORY = ("backend", "sync_batch_norm", "lr")
"""Options of a strategy or an optimizer that it does not depend on."""


def traced_cell(cell: Cell) -> Cell:
    """Return the cell whose trace gives the peak of this one; equal ones share a trace.

    fsdp is traced at its number of devices, up to MOST_DEVICES; all else as one device at the same per-device batch.
    Both are traced without compilation, and fp16 as bf16, which has the same width. Each batch is traced: where a
    workload pads its batches, or the peak is that of the update, it is on no line through two others.
    """
    share = micro_batch(cell) * cell.micro_batches
    sharded = cell.own_traits is None and cell.traits.shards_parameters
    hybrid = sharded and cell.strategy_options.get("mesh") == "hybrid"
    one = cell if sharded else single_device_cell(cell)
    devices = one.devices if hybrid else min(one.devices, MOST_DEVICES)
    return replace(
        one.eager,
        devices=devices,
        nodes=cell.nodes if hybrid else 1,
        scaling="weak",
        per_device_batch_size=share,
        global_batch_size=share * devices,
        precision={"tf32": "fp32", "fp16": "bf16"}.get(cell.precision, cell.precision),
        oversubscribed=False,
        launcher="ray",
        device_ids=(),
        strategy_options={name: value for name, value in one.strategy_options.items() if name not in NOT_IN_MEMORY},
        workload_options={n: False if n == "download" else value for n, value in cell.workload_options.items()},
        optimizer={name: value for name, value in cell.optimizer.items() if name not in NOT_IN_MEMORY},
        schedule={},
        training={name: value for name, value in cell.training.items() if name in IN_MEMORY},
        loader={},
        env={},
        uneven=None,
    )


def forecast(cell: Cell, examined: Examination, inventory: Inventory) -> Forecast:
    """Return the forecast of a cell from the examination of its ``traced_cell``."""
    sizes, peak = examined["sizes"], examined["peak"]
    on_cpu, copied = cell.device == "cpu", cell.traits.replicates and cell.devices > 1
    found = Forecast(
        state=state(sizes, cell) if sizes else None,
        activations=None,
        allowance=examined["process_bytes"] if on_cpu else CUDA_ALLOWANCE,
        available=available(cell, inventory),
        sharers=_sharers(cell, inventory),
        reason=examined["reason"],
    )
    if _records_graphs(cell):
        return replace(found, reason=found.reason or f"compile_mode {cell.compile_mode}: {OF_GRAPHS}")
    if sizes is None or found.state is None or peak is None:
        return found
    if cell.own_traits or copied:
        alone = state(sizes, single_device_cell(cell))
        kept = max(0, peak["without_gradients_bytes"] - alone.parameters - alone.optimizer)  # of a micro-batch
        return replace(found, activations=tensor_peak(sizes, cell, kept) - found.state.total, counted=True)
    # DDP's buckets are there all the time; if gradients are views of them, those are too
    views = found.state.buckets and not found.state.gradients
    total = (peak["without_gradients_bytes"] if views else peak["peak_bytes"]) + found.state.buckets
    traced = replace(cell, devices=traced_cell(cell).devices)
    return replace(found, activations=max(0, total - state(sizes, traced).total))


def _sharers(cell: Cell, inventory: Inventory) -> int:
    """Return the most processes of a cell that share the memory of one node, or of one GPU."""
    if cell.device == "cpu":
        return ranks_of_node(cell)
    gpus = min((node.gpus for node in inventory.nodes if node.gpus), default=1)
    return -(-ranks_of_node(cell) // gpus) if cell.oversubscribed else 1


def available(cell: Cell, inventory: Inventory) -> int | None:
    """Return the memory of the smallest GPU, on a CPU of the smallest node, in bytes; None if one is not known."""
    if cell.device == "cpu":
        sizes = [node.memory_bytes for node in inventory.nodes]
    else:
        sizes = [node.gpu_memory_bytes for node in inventory.nodes if node.gpus]
    known = [size for size in sizes if size is not None]
    return min(known) if known and len(known) == len(sizes) else None
