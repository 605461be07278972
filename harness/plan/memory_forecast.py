"""Whether cells will fit: peaks of traced steps, or counted ones, against the memory of a device or of a node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from harness.config.values import MIB, PlainValue
from harness.plan.cell import Cell
from harness.plan.checks.memory import REFUSE, WARN, State, counted, micro_batch, ranks_of_node, state
from harness.plan.comparison import single_device_cell
from harness.plan.inventory import Inventory, Node, device_of_driver
from harness.plan.rows import Examination, MemoryFacts

Verdict = Literal["fits", "may not fit", "will not fit", "unknown"]
How = Literal["traced", "counted", "unknown"]
CUDA_ALLOWANCE = 1536 * MIB
"""CUDA's context, the kernels and workspaces of cuBLAS and cuDNN, NCCL's buffers.

Not measured here: the middle of the 1 to 2 GB that Hugging Face's documentation states for the kernels alone ("Model
training anatomy"), of older versions that load all of them.
"""


@dataclass(frozen=True)
class Forecast:
    """The peak memory of one device of a cell, by parts, in bytes, and the memory that is there for it.

    ``activations``: with temporary tensors; what the peak is above the state. ``allowance``: what is in no tensor of a
    step. ``sharers``: processes that share the memory that is there: on a CPU those of a node, of a GPU those that an
    oversubscribed cell puts on it. None: not known.
    """

    state: State | None
    activations: int | None
    allowance: int
    available: int | None
    sharers: int = 1
    how: How = "traced"
    reason: str = ""

    @property
    def peak(self) -> int | None:
        """The sum of all parts; None if one is not known."""
        if self.state is None or self.activations is None:
            return None
        return self.state.total + self.activations + self.allowance

    @property
    def verdict(self) -> Verdict:
        """Whether the peak fits; of a peak that is not known, whether the parts that are known do not."""
        known = self.allowance + (self.state.total if self.state else 0) + (self.activations or 0)
        if self.available is None:
            return "unknown"
        if self.sharers * known > REFUSE * self.available:
            return "will not fit"
        if self.sharers * known > WARN * self.available:
            return "may not fit"
        return "unknown" if self.peak is None else "fits"


def traced_cell(cell: Cell) -> Cell:
    """Return the cell whose trace gives the peak of this one; equal ones share a trace.

    fsdp is traced at its number of devices, up to MOST_DEVICES; all else as one device at the same per-device batch.
    Both are traced without compilation, and fp16 as bf16, which has the same width.
    """
    share = micro_batch(cell) * cell.micro_batches
    sharded = traces_shards(cell)
    hybrid = sharded and cell.strategy_options.get("mesh") == "hybrid"
    one = cell if sharded else replace(single_device_cell(cell), strategy_options={})
    one = one if hybrid else replace(one, devices=min(one.devices, MOST_DEVICES))
    return replace(
        one,
        nodes=cell.nodes if hybrid else 1,
        scaling="weak",
        per_device_batch_size=share,
        global_batch_size=share * one.devices,
        precision={"tf32": "fp32", "fp16": "bf16"}.get(cell.precision, cell.precision),
        compile=False,
        oversubscribed=False,
        launcher="ray",
        device_ids=(),
        strategy_options=_without(one.strategy_options, "backend", "sync_batch_norm"),
        workload_options=_offline(cell.workload_options),
        optimizer=_without(cell.optimizer, "lr"),
        schedule={},
        training={name: value for name, value in cell.training.items() if name in IN_MEMORY},
        loader={},
        uneven=None,
    )


MOST_DEVICES = 8
"""The largest fsdp that is traced, whose operators grow with devices; a larger one has smaller shards beside the same
activations and gathered units."""
IN_MEMORY = ("accumulation", "clip_grad_norm", "clip_grad_value")
"""The options of a training that its memory depends on."""


def _without(options: Mapping[str, PlainValue], *names: str) -> dict[str, PlainValue]:
    return {name: value for name, value in options.items() if name not in names}


def _offline(options: Mapping[str, PlainValue]) -> dict[str, PlainValue]:
    return {name: False if name == "download" else value for name, value in options.items()}


def forecast(cell: Cell, examined: Examination, inventory: Inventory) -> Forecast:
    """Return the forecast of a cell from the examination of its ``traced_cell``."""
    on_cpu, peak = cell.device == "cpu", examined["peak"]
    allowance, room = examined["process_bytes"] if on_cpu else CUDA_ALLOWANCE, available(cell, inventory)
    made = Forecast(None, None, allowance, room, _sharers(cell, inventory), "unknown", examined["reason"])
    if examined["sizes"] is None:
        return made
    sizes: MemoryFacts = {
        **examined["sizes"],
        "activations": {},
        "process_bytes": 0,  # the allowance
        "device_bytes": 0,
        "host_bytes": 0,
    }
    own = state(sizes, cell)
    made = replace(made, state=own)
    if peak is None:
        return made
    if examined["alone"] or not traces(cell):
        alone = state(sizes, single_device_cell(cell))
        kept = peak["without_gradients_bytes"] - alone.parameters - alone.optimizer
        return replace(made, activations=counted(sizes, cell, max(0, kept)) - own.total, how="counted")
    traced = replace(cell, devices=traced_cell(cell).devices) if traces_shards(cell) else cell
    # DDP's buckets are there all the time; if gradients are views of them, those are too
    views = own.buckets and not own.gradients
    total = (peak["without_gradients_bytes"] if views else peak["peak_bytes"]) + own.buckets
    return replace(made, activations=max(0, total - state(sizes, traced).total), how="traced")


def traces(cell: Cell) -> bool:
    """Return whether the peak is traced, or counted: copies for several devices and the user's own strategies are."""
    return cell.own_traits is None and not (cell.traits.replicates and cell.devices > 1)


def traces_shards(cell: Cell) -> bool:
    """Return whether the trace is of one rank's shards; the user's own strategies are counted from one device."""
    return cell.own_traits is None and cell.traits.shards_parameters


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
        sizes = [_gpu_bytes(node) for node in inventory.nodes if node.gpus]
    known = [size for size in sizes if size is not None]
    return min(known) if known and len(known) == len(sizes) else None


def _gpu_bytes(node: Node) -> int | None:
    known = device_of_driver(node.gpu_model) if node.gpu_model else None
    return node.gpu_memory_bytes or (known.memory_bytes if known else None)
