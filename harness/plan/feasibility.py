"""Why trials are left out: rules on their cell, for any machine or for one, and the limits that end a run.

A device-hour is one device of the machine for an hour, whether it works or waits: so a cluster is billed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import get_args

from harness.config.experiment import Experiment
from harness.plan.cell import Cell, place
from harness.plan.inventory import Machine
from harness.plan.rows import ImpossibleCode, SkipCode
from harness.plan.trial import SkipReason

IMPOSSIBLE: frozenset[SkipCode | None] = frozenset(get_args(ImpossibleCode))
"""The reasons for which no machine can run a cell."""


def reason_of_impossibility(cell: Cell) -> SkipReason | None:
    """Return the first reason for which no machine can run the cell; None if some machine can."""
    return next(_on_any_machine(cell), None)


def reason_to_skip(cell: Cell, machine: Machine) -> SkipReason | None:
    """Return the first reason for which the cell cannot run on a machine; None if it can."""
    return reason_of_impossibility(cell) or next(_on_this_machine(cell, machine), None)


def _on_any_machine(cell: Cell) -> Iterator[SkipReason]:
    """Yield the reasons for which no machine can run the cell."""
    traits, devices, nodes = cell.traits, cell.devices, cell.nodes
    batch, parts = cell.per_device_batch_size, cell.micro_batches
    if traits.most_devices is not None and max(devices, nodes) > traits.most_devices:
        limit = "one device" if traits.most_devices == 1 else f"{traits.most_devices} devices"
        yield SkipReason("strategy_devices", f"{cell.strategy} runs on at most {limit}")
    if nodes > 1 and traits.one_process:
        yield SkipReason("strategy_nodes", f"{cell.strategy} runs on one node only: one process uses all its devices")
    if devices % nodes:
        yield SkipReason("uneven_nodes", f"{devices} devices do not split evenly over {nodes} nodes")
    if batch is None and not cell.uneven:
        text = f"global batch {cell.global_batch_size} does not divide by {devices} devices"
        yield SkipReason("batch_indivisible", text)
    if batch is not None and batch % parts:
        text = f"per-device batch {batch} does not divide into {parts} micro-batches (training.accumulation)"
        yield SkipReason("micro_batch_indivisible", text)
    if parts > 1 and cell.strategy_options.get("static_graph"):
        yield SkipReason(
            "excluding",
            "static_graph is incompatible with training.accumulation: DDP fails in a backward pass without gradient "
            "synchronisation",
        )
    if cell.compile and not traits.compiles:
        why = ": its replicas are rebuilt at every step" if traits.replicates else ""
        yield SkipReason("excluding", f"compile does not apply to {cell.strategy}{why}")
    if cell.compile_mode != "default" and not cell.compile:
        yield SkipReason("excluding", f"compile_mode {cell.compile_mode} applies to compiled cells (compile: true)")


def _on_this_machine(cell: Cell, machine: Machine) -> Iterator[SkipReason]:
    """Yield the reasons for which the machine cannot run the cell."""
    # torchrun takes the driver's devices without the knowledge of a cluster's scheduler
    if cell.launcher == "torchrun" and cell.nodes > 1:
        yield SkipReason("launcher_nodes", f"launcher torchrun runs on one node only, not on {cell.nodes}")
    if cell.launcher == "torchrun" and not machine.single_machine:
        yield SkipReason("launcher_cluster", "launcher torchrun runs on this machine only, not in a cluster")
    yield from _too_few_devices(cell, machine)
    if cell.compile and not machine.compiler:
        yield SkipReason("no_compiler", "compile needs a C++ compiler on every node")
    if machine.device != "cuda":
        yield from _needs_cuda(cell)
    if cell.backend == "nccl" and cell.oversubscribed:
        yield SkipReason("shared_device", f"{cell.strategy}.backend nccl rejects ranks that share a GPU")
    # seen with torch 2.11: github.com/pytorch/pytorch/issues/152645
    on_gpus = machine.device == "cuda" and cell.traits.shards_parameters and cell.devices > 1
    if on_gpus and (cell.oversubscribed or cell.backend == "gloo"):
        yield SkipReason("gloo_shards", f"{cell.strategy} needs NCCL: gloo crashes if it gathers shards of a GPU whole")
    if cell.strategy_options.get("mesh") == "hybrid" and cell.nodes == 1 and cell.devices > 1:
        yield SkipReason("one_node", "fsdp.mesh hybrid shards inside nodes and replicates between them: one is flat")


def _too_few_devices(cell: Cell, machine: Machine) -> Iterator[SkipReason]:
    """Check devices. A group with named GPUs takes its whole node, so that no other group works on the other GPUs."""
    have = " + ".join(map(str, machine.devices_per_node)) or "0"
    waited = f"; no more came in {machine.waited_s:.0f} s (cluster.wait_for)" if machine.waited_s else ""
    if cell.device_ids and machine.device != "cuda":
        yield SkipReason("device_ids_on_cpu", "device_ids applies to GPUs; CPU slots have no numbers")
    elif cell.device_ids:
        last, workers = max(cell.device_ids), place(cell).workers
        gpus = next((gpus for gpus in machine.devices_per_node if gpus > last), None)
        if gpus is None:
            needs = f"needs GPU {last} of one node, counted from 0, has {have} GPUs"
            yield SkipReason("too_few_devices", f"too few devices: {needs}{waited}")
        elif cell.launcher == "ray" and gpus % workers:
            yield SkipReason(
                "device_ids_uneven",
                f"a worker group with device_ids takes every GPU of its node, and {gpus} GPUs do not split evenly "
                f"over {workers} workers",
            )
    per_node = place(cell).devices_per_node
    if not cell.oversubscribed and not machine.holds(cell.nodes, per_node):
        kind = "GPUs" if machine.device == "cuda" else "CPU slots"
        where = f"{per_node} devices on each of {cell.nodes} nodes" if cell.nodes > 1 else f"{per_node} on one node"
        yield SkipReason("too_few_devices", f"too few devices: needs {where}, has {have} {kind}{waited}")


def _needs_cuda(cell: Cell) -> Iterator[SkipReason]:
    """Yield the reasons for which CPU slots cannot run the cell."""
    if cell.precision == "tf32":
        yield SkipReason("needs_cuda", "tf32 is a mode of CUDA devices")
    if cell.strategy_options.get("sync_batch_norm"):
        yield SkipReason("needs_cuda", "sync_batch_norm is a CUDA operator")
    if cell.backend == "nccl":
        yield SkipReason("needs_cuda", f"{cell.strategy}.backend nccl connects GPUs; CPU slots use gloo")


HOUR_S = 3600.0


@dataclass(frozen=True)
class End:
    """A limit by its name in the experiment file, its value, and the seconds until it ends the run."""

    name: str
    limit: str
    seconds: float

    @property
    def reason(self) -> str:
        """The reason of the trials that it leaves out."""
        return f"time is up: {self.name} was reached{self.limit}"


def end_of(experiment: Experiment, devices: int, spent_device_s: float = 0.0, spent_s: float = 0.0) -> End | None:
    """Return the limit that ends a run first, from now on; None without a limit.

    ``devices``: of the machine; ``spent_device_s``: the device-seconds of the run so far, earlier invocations included;
    ``spent_s``: the seconds of this invocation so far.
    The wall time is that of one invocation. Device-hours and cost are those of the whole run: a resume adds none.
    """
    limits, cost = experiment.limits, experiment.cost
    ends = [End("limits.wall", "", limits.wall - spent_s)] if limits.wall else []

    def add(name: str, hours: float, text: str) -> None:
        seconds = (hours * HOUR_S - spent_device_s) / max(1, devices)
        ends.append(End(f"limits.{name}", f" ({text} of the whole run; raise it to go on)", seconds))

    if limits.device_hours:
        add("device_hours", limits.device_hours, f"{limits.device_hours:g}")
    if limits.cost and cost:
        add("cost", limits.cost / cost.per_device_hour, f"{limits.cost:g} {cost.currency}")
    return min(ends, key=lambda end: end.seconds, default=None)
