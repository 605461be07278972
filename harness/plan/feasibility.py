"""Why trials are left out: rules on their cell, for any machine or for one, and the limits that end a run.

A device-hour is one device of the machine for an hour, whether it works or waits: so a cluster is billed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from harness.config.experiment import Experiment
from harness.plan.cell import Cell, place
from harness.plan.inventory import Machine
from harness.plan.rows import SkipCode
from harness.plan.trial import Impossible, SkipReason

Rule = Callable[[Cell], SkipReason | None]
MachineRule = Callable[[Cell, Machine], SkipReason | None]
IMPOSSIBLE: frozenset[SkipCode | None] = frozenset(
    {
        "strategy_devices",
        "strategy_nodes",
        "uneven_nodes",
        "batch_indivisible",
        "micro_batch_indivisible",
        "static_graph",
        "strategy_compile",
    }
)
"""The reasons for which no machine can run a cell."""


def reason_of_impossibility(cell: Cell) -> SkipReason | None:
    """Return the reason of the first rule that forbids the cell on every machine; None if some machine can run it."""
    return next((reason for rule in RULES if (reason := rule(cell))), None)


def impossible_cells(cells: Iterable[Cell]) -> tuple[Impossible, ...]:
    """Return those of the cells that no machine can run, each once, with the reason."""
    reasons = ((cell, reason_of_impossibility(cell)) for cell in dict.fromkeys(cells))
    return tuple(Impossible(cell, reason.text, reason.code) for cell, reason in reasons if reason)


def reason_to_skip(cell: Cell, machine: Machine) -> SkipReason | None:
    """Return the reason of the first rule that forbids the cell on a machine; None if the cell can run."""
    forbidden = reason_of_impossibility(cell)
    return forbidden or next((reason for rule in MACHINE_RULES if (reason := rule(cell, machine))), None)


def _strategy_applies(cell: Cell) -> SkipReason | None:
    most = cell.traits.most_devices
    if most is not None and max(cell.devices, cell.nodes) > most:
        limit = "one device" if most == 1 else f"{most} devices"
        return SkipReason("strategy_devices", f"{cell.strategy} runs on at most {limit}")
    if cell.nodes > 1 and not cell.traits.spans_nodes:
        return SkipReason("strategy_nodes", f"{cell.strategy} runs on one node only: one process uses all its devices")
    return None


def _launcher_applies(cell: Cell, machine: Machine) -> SkipReason | None:
    """Forbid torchrun beside a cluster: it takes the driver's devices without the knowledge of Ray's scheduler."""
    if cell.launcher == "torchrun" and cell.nodes > 1:
        return SkipReason("launcher_nodes", f"launcher torchrun runs on one node only, not on {cell.nodes}")
    if cell.launcher == "torchrun" and not machine.single_machine:
        return SkipReason("launcher_cluster", "launcher torchrun runs on this machine only, not in a cluster")
    return None


def _splits_evenly(cell: Cell) -> SkipReason | None:
    if cell.devices % cell.nodes:
        return SkipReason("uneven_nodes", f"{cell.devices} devices do not split evenly over {cell.nodes} nodes")
    return None


def _named_devices(cell: Cell, machine: Machine) -> SkipReason | None:
    """Check named GPUs; their group takes its whole node, so that no other group works on the other GPUs."""
    if not cell.device_ids:
        return None
    if machine.device != "cuda":
        return SkipReason("device_ids_on_cpu", "device_ids applies to GPUs; CPU slots have no numbers")
    gpus = next((gpus for gpus in machine.devices_per_node if gpus > max(cell.device_ids)), None)
    if gpus is None:
        have = " + ".join(str(n) for n in machine.devices_per_node)
        return SkipReason(
            "too_few_devices",
            f"too few devices: needs GPU {max(cell.device_ids)} of one node, counted from 0, has {have} GPUs"
            f"{_waited(machine)}",
        )
    workers = place(cell).workers
    if cell.launcher == "ray" and gpus % workers:
        return SkipReason(
            "device_ids_uneven",
            f"a worker group with device_ids takes every GPU of its node, and {gpus} GPUs do not split evenly "
            f"over {workers} workers",
        )
    return None


def _enough_devices(cell: Cell, machine: Machine) -> SkipReason | None:
    per_node = place(cell).devices_per_node
    if cell.oversubscribed or machine.holds(cell.nodes, per_node):
        return None
    kind = "GPUs" if machine.device == "cuda" else "CPU slots"
    have = " + ".join(str(n) for n in machine.devices_per_node) or "0"
    where = f"{per_node} devices on each of {cell.nodes} nodes" if cell.nodes > 1 else f"{per_node} on one node"
    return SkipReason("too_few_devices", f"too few devices: needs {where}, has {have} {kind}{_waited(machine)}")


def _waited(machine: Machine) -> str:
    """Return what a reason says of nodes that did not come."""
    return f"; no more came in {machine.waited_s:.0f} s (cluster.wait_for)" if machine.waited_s else ""


def _batch_divides(cell: Cell) -> SkipReason | None:
    if cell.per_device_batch_size is None and not cell.uneven:
        return SkipReason(
            "batch_indivisible", f"global batch {cell.global_batch_size} does not divide by {cell.devices} devices"
        )
    return None


def _micro_batches_divide(cell: Cell) -> SkipReason | None:
    batch, parts = cell.per_device_batch_size, cell.micro_batches
    if batch is not None and batch % parts:
        return SkipReason(
            "micro_batch_indivisible",
            f"per-device batch {batch} does not divide into {parts} micro-batches (training.accumulation)",
        )
    if parts > 1 and cell.strategy_options.get("static_graph"):
        return SkipReason(
            "static_graph",
            "static_graph is incompatible with training.accumulation: DDP fails in a backward pass without gradient "
            "synchronisation",
        )
    return None


def _strategy_compiles(cell: Cell) -> SkipReason | None:
    if cell.compile and not cell.traits.compiles:
        why = ": its replicas are rebuilt at every step" if cell.traits.replicates else ""
        return SkipReason("strategy_compile", f"compile does not apply to {cell.strategy}{why}")
    return None


def _has_compiler(cell: Cell, machine: Machine) -> SkipReason | None:
    if cell.compile and not machine.compiler:
        return SkipReason("no_compiler", "compile needs a C++ compiler on every node")
    return None


def _needs_cuda(cell: Cell, machine: Machine) -> SkipReason | None:
    if machine.device == "cuda":
        return None
    if cell.precision == "tf32":
        return SkipReason("needs_cuda", "tf32 is a mode of CUDA devices")
    if cell.strategy_options.get("sync_batch_norm"):
        return SkipReason("needs_cuda", "sync_batch_norm is a CUDA operator")
    return None


def _collectives_work(cell: Cell, machine: Machine) -> SkipReason | None:
    """Forbid backends that cannot connect the processes, and a mesh of nodes on one node."""
    if cell.backend == "nccl" and machine.device != "cuda":
        return SkipReason("needs_cuda", f"{cell.strategy}.backend nccl connects GPUs; CPU slots use gloo")
    if cell.backend == "nccl" and cell.oversubscribed:
        return SkipReason("shared_device", f"{cell.strategy}.backend nccl rejects ranks that share a GPU")
    if cell.strategy_options.get("mesh") == "hybrid" and cell.nodes == 1 and cell.devices > 1:
        return SkipReason("one_node", "fsdp.mesh hybrid shards inside nodes and replicates between them: one is flat")
    return None


RULES: tuple[Rule, ...] = (
    _strategy_applies,
    _splits_evenly,
    _batch_divides,
    _micro_batches_divide,
    _strategy_compiles,
)
MACHINE_RULES: tuple[MachineRule, ...] = (
    _launcher_applies,
    _named_devices,
    _enough_devices,
    _has_compiler,
    _needs_cuda,
    _collectives_work,
)

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


def end_of(experiment: Experiment, devices: int, spent_device_s: float = 0.0) -> End | None:
    """Return the limit that ends a run first, from now on; None without a limit.

    ``devices``: of the machine; ``spent_device_s``: the device-seconds of the run so far, earlier invocations included.
    The wall time is that of one invocation. Device-hours and cost are those of the whole run: a resume adds none.
    """
    limits, cost = experiment.limits, experiment.cost
    ends = [End("limits.wall", "", limits.wall)] if limits.wall else []
    hours: dict[str, tuple[float, str]] = {}
    if limits.device_hours:
        hours["limits.device_hours"] = limits.device_hours, f"{limits.device_hours:g}"
    if limits.cost and cost:
        hours["limits.cost"] = limits.cost / cost.per_device_hour, f"{limits.cost:g} {cost.currency}"
    ends += [
        End(name, f" ({text} of the whole run; raise it to go on)", (most * HOUR_S - spent_device_s) / max(1, devices))
        for name, (most, text) in hours.items()
    ]
    return min(ends, key=lambda end: end.seconds, default=None)
