"""Memory: the need of the cell, estimated from the tensors that two small batches keep for backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import psutil
import torch
from torch import Tensor

from harness.doctor.check import Case, Check
from harness.doctor.subject import Subject
from harness.plan.cell import Cell
from harness.plan.checks.finding import Finding
from harness.system.units import GIB, MIB

NAME = "memory"
FEW, MORE = 2, 4
STATES = {"SGD": 1, "Adam": 2, "AdamW": 2, "RMSprop": 1, "Adagrad": 1}
"""Most tensors of a parameter's size that an optimizer keeps; two for any other optimizer."""


@dataclass(frozen=True)
class Needs:
    """The memory that one rank needs and has, in bytes, and its node."""

    parameters: int
    fixed: int
    """Activations that do not grow with the batch."""
    per_sample: int
    has: int
    node: int
    micro_batches: int


def observe(subject: Subject) -> Needs:
    """Measure parameters and activations per sample, and read the memory of the device."""
    model = subject.bare_model()
    kept = [_kept(subject, model, count) for count in (FEW, MORE)]
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    return Needs(
        parameters,
        fixed=max(0, 2 * kept[0] - kept[1]),
        per_sample=max(0, kept[1] - kept[0]) // (MORE - FEW),
        has=_memory(subject.device),
        node=subject.ranks.node_rank,
        micro_batches=subject.micro_batches,
    )


def judge(seen: Sequence[Needs], case: Case) -> list[Finding]:
    cell = case.cell
    shared = cell.device == "cpu"  # ranks on one node share its memory; each GPU has its own
    needs: dict[int, int] = {}
    there: dict[int, int] = {}
    for number, rank in enumerate(seen):
        place = rank.node if shared else number
        needs[place] = needs.get(place, 0) + estimate(rank, cell)
        there[place] = rank.has
    tightest = max(needs, key=lambda place: needs[place] / there[place])
    together, has = needs[tightest], there[tightest]
    if together <= has:
        return []
    most = int(cell.per_device_batch_size * has / together) if cell.per_device_batch_size else 0
    where = "the node" if shared else "a device"
    parts = seen[0].micro_batches
    kind = "micro-batch" if parts > 1 else "batch"
    return [
        Finding(
            NAME,
            "error",
            f"a {kind} of {cell.per_device_batch_size} per device needs about {together / GIB:.1f} GiB "
            f"({seen[0].per_sample / MIB:.2f} MiB of activations a sample); {where} has {has / GIB:.1f} GiB",
            "it will run out of memory",
            f"a batch of {most * parts} may fit; or accumulate gradients, use bf16, or shard with fsdp"
            if most
            else "a smaller model, or fsdp over more devices",
        )
    ]


def estimate(rank: Needs, cell: Cell) -> int:
    """Return the bytes of one rank: parameters, gradients, optimizer state, activations of its part of the batch."""
    copies = 2 + STATES.get(str(cell.optimizer.get("name")), 2)
    on_one_device = cell.traits.replicates and cell.device == "cpu"
    samples = cell.global_batch_size if on_one_device else -(-cell.global_batch_size // cell.devices)
    state = copies * rank.parameters // (cell.devices if cell.traits.shards_parameters else 1)
    return int(state + rank.fixed + samples * rank.per_sample)


def _kept(subject: Subject, model: torch.nn.Module, samples: int) -> int:
    """Return the bytes that the graph of one batch keeps without parameters, each storage once."""
    own = {p.untyped_storage().data_ptr() for p in [*model.parameters(), *model.buffers()]}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss, _ = subject.workload.loss(model, subject.first_samples(samples))
        total = sum(kept.values())
        del loss
    return total


def _memory(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return int(psutil.virtual_memory().total)


CHECK = Check(NAME, observe, judge, stops=True)
