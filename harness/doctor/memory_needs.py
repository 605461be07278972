"""Memory: sizes of the model, tensors kept for backward, and what the steps keep, step by step."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import product

import psutil
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from harness.config.experiment import Experiment
from harness.config.values import GIB, MIB
from harness.doctor.facts import LEAST, Steps, least_growth
from harness.doctor.subject import Case, Check, Subject
from harness.errors import WorkloadError
from harness.measure.peak_memory import of_model
from harness.plan import memory_forecast as memory
from harness.plan.cell import Cell
from harness.plan.checks import Finding
from harness.plan.comparison import base_cell, single_device_cell
from harness.plan.rows import ActivationBytes, MemoryFacts, ModelBytes, Severity
from harness.train.activation_checkpointing import NO_UNITS
from harness.train.model import device_bytes
from harness.train.precision import REDUCED, Precision, without_autocast
from harness.train.strategies.base import default_units

FEW, MORE = 2, 4
"""Samples of the two batches."""
META = torch.device("meta")
OF_MODE = ("precision", "compile", "activation_checkpointing")
"""The axes of a grid that make the modes of its cells."""
LIKE_COMPILED = "aot_eager_decomp_partition"
"""The backend of torch.compile that selects saved tensors as the default one does, and generates no code."""
Activations = Mapping[str, ActivationBytes]
MEMORY_GROWTH = "memory growth"
SMALLER_MODEL = "for these checks, examine a smaller model of the same code"


def survey(subject: Subject) -> MemoryFacts | None:
    """Return the sizes of the model, without activations, and the least memory of any rank; nothing is on a device.

    Every rank calls it. None if the model cannot be built.
    """
    resident, host = psutil.Process().memory_info().rss, psutil.virtual_memory().total
    try:
        fresh = subject.fresh()
        own: ModelBytes | None = of_model(fresh.built_model(), fresh.workload)
    except Exception:  # the checks, which build it too, report the error
        own = None
    ranks = subject.ranks.gather((own, resident, device_bytes(subject.device) or host, host))
    models, resident_of, device_of, host_of = zip(*ranks, strict=True)
    if None in models:
        return None
    model: ModelBytes = models[0]
    return {
        **model,
        "activations": {},
        "process_bytes": max(resident_of),
        "device_bytes": min(device_of),
        "host_bytes": min(host_of),
    }


def fits_on_one_device(facts: MemoryFacts | None, cell: Cell) -> bool:
    """Return whether one device has the memory to train the whole model on one device's part of the batch.

    On a CPU, all ranks of a node train it at the same time. Activations count if they are known.
    """
    if facts is None:
        return True
    sharers = memory.ranks_of_node(cell) if cell.device == "cpu" else 1  # device_bytes of a CPU are the node's
    return sharers * _on_one_device(facts, cell) <= memory.WARN * facts["device_bytes"]


def _on_one_device(facts: MemoryFacts, cell: Cell) -> int:
    alone = single_device_cell(cell)
    return memory.estimate(facts, alone) or memory.estimate_with(facts, alone)


def global_batch_fits(facts: MemoryFacts | None, cell: Cell) -> bool:
    """Return whether one device has the memory to train a global batch; ``facts``: with activations."""
    return facts is None or memory.affordable(facts, base_cell(cell).at_global_batch_size(cell.global_batch_size))


def without_reference(facts: MemoryFacts, cell: Cell, left_out: Sequence[str]) -> Finding:
    """Return the note that the model is too large for the checks that have it whole on one device."""
    peak = f"{_on_one_device(facts, cell) / GIB:.1f} GiB, more than is there for it"
    text = f"estimated peak of the whole model on one device: {peak}"
    means = f"no reference on one device, and no result of these checks: {', '.join(left_out)}"
    return Finding("single-device reference", "note", text, means, SMALLER_MODEL)


def without_steps(facts: MemoryFacts, cell: Cell, left_out: Sequence[str]) -> Finding:
    """Return the note that no batch is small enough for real steps."""
    smallest = memory.at_smaller_batch(cell, cell.global_batch_size)
    need = max(memory.needs(facts, smallest), key=lambda need: need.ratio)
    memory_of_both = f"{need.needed / GIB:.1f} GiB; available: {need.available / GIB:.1f} GiB"
    text = f"estimated peak for {need.place}, with one sample per device: {memory_of_both}"
    means = f"no real steps are taken, and no result of these checks: {', '.join(left_out)}"
    return Finding("real steps", "note", text, means, SMALLER_MODEL)


def modes_of(cell: Cell, experiment: Experiment) -> list[memory.Mode]:
    """Return the modes of the experiment's cells, without repetitions; the cell's own, eager, is first.

    What a compiled model keeps beside the inputs of its units is not measured.
    """
    grids = [grid for grid in (experiment.grid, *experiment.cells) if grid]
    known = [
        memory.Mode(precision, compiled, checkpointed == "full")
        for grid in grids
        for precision, compiled, checkpointed in product(*(getattr(grid, axis) for axis in OF_MODE))
    ]
    modes = dict.fromkeys([memory.Mode(cell.precision), memory.Mode.of(cell), *known])
    return [mode for mode in modes if not mode.compiled or (cell.traits.compiles and not mode.checkpointed)]


def at_affordable_batch(subject: Subject, facts: MemoryFacts | None) -> Subject | None:
    """Return the subject for real steps, at a smaller batch if its own may not fit; None if no batch may fit."""
    if facts is None:
        return subject
    divisor = memory.affordable_divisor(facts, subject.cell)
    if divisor is None:
        return None
    cell = memory.at_smaller_batch(subject.cell, divisor) if divisor > 1 else subject.cell
    fits = subject.whole_model_fits and fits_on_one_device(facts, cell)
    return replace(subject, memory=facts, cell=cell, whole_model_fits=fits)


def observe(subject: Subject) -> Activations:
    """Measure the activations in each precision of the experiment; raise if the cell's own cannot be measured.

    A model that does not fit on one device is measured on the meta device, if its operators can run there.
    """
    model = subject.bare_model() if subject.whole_model_fits else subject.built_model().to(META)
    found: dict[str, ActivationBytes] = {}
    own = memory.Mode(subject.cell.precision)
    for mode in sorted(subject.modes or [own], key=lambda mode: mode[1:]):  # these change the model
        try:
            few, more = (_kept(subject, model, count, mode) for count in (FEW, MORE))
        except Exception:
            if subject.whole_model_fits and mode == own:
                raise
            continue
        found[str(mode)] = {
            "fixed": max(0, 2 * few - more),
            "per_sample": max(0, more - few) // (MORE - FEW),
        }
    return found


def with_activations(facts: MemoryFacts, seen: Sequence[Activations]) -> MemoryFacts:
    """Return the facts with the activations that every rank knows, the largest of any rank."""
    modes = [mode for mode in seen[0] if all(mode in rank for rank in seen)]
    largest = {mode: max((rank[mode] for rank in seen), key=lambda kept: kept["per_sample"]) for mode in modes}
    return {**facts, "activations": largest}


def judge(seen: Sequence[Activations], case: Case) -> list[Finding]:
    return memory.judge(with_activations(case.memory, seen), case.planned or case.cell) if case.memory else []


def _kept(subject: Subject, model: nn.Module, samples: int, mode: memory.Mode) -> int:
    """Return the bytes that the graph of one batch keeps, each storage once, without parameters and buffers.

    With activation checkpointing: inputs of units, what is kept outside of units, and what the largest unit keeps.
    """
    batch = subject.first_samples(samples, None if subject.whole_model_fits else META)
    if subject.whole_model_fits:
        wrapped = Precision(mode.precision, subject.device.type).around(model)
    elif low := REDUCED.get(mode.precision):  # the meta device has no autocast: model and batch are cast as a whole
        wrapped = copy.deepcopy(model).to(low)
        batch = tree_map_only(Tensor, lambda leaf: leaf.to(low) if leaf.is_floating_point() else leaf, batch)
    else:
        wrapped = model
    if mode.compiled:
        torch.compiler.reset()
        wrapped.compile(backend=LIKE_COMPILED, dynamic=False)
    units: Sequence[nn.Module] = []
    if mode.checkpointed:
        units = getattr(subject.workload, "shard_units", default_units)(without_autocast(wrapped))
        if not units:
            raise WorkloadError(NO_UNITS)
    noted = _Kept([*wrapped.parameters(), *wrapped.buffers()])
    with ExitStack() as hooks:
        for unit in units:
            hooks.enter_context(unit.register_forward_pre_hook(noted.enter, with_kwargs=True))
            hooks.enter_context(unit.register_forward_hook(noted.leave))
        hooks.enter_context(torch.autograd.graph.saved_tensors_hooks(noted.note, lambda tensor: tensor))
        loss, _ = subject.loss(wrapped, batch)
        total = noted.total
        del loss
    return total


class _Kept:
    """What a graph keeps beside some tensors; of units, which backward computes again, the inputs and the largest.

    ``enter`` and ``leave`` are hooks of a unit, ``note`` one of saved tensors.
    """

    def __init__(self, own: Sequence[Tensor]) -> None:
        self._own = {_storage(part) for tensor in own for part in _strided(tensor)}
        self._kept: dict[nn.Module | None, dict[int, int]] = {None: {}}
        self._inside: list[nn.Module] = []
        self._inputs: list[Tensor] = []

    def note(self, tensor: Tensor) -> Tensor:
        """Note a tensor that is saved for backward."""
        of_unit = self._kept.setdefault(self._inside[0] if self._inside else None, {})
        for part in _strided(tensor):
            if _storage(part) not in self._own:
                of_unit[_storage(part)] = part.untyped_storage().nbytes()
        return tensor.detach()  # a node that holds its own output is in a cycle that no garbage collection finds

    @property
    def total(self) -> int:
        """The bytes that are kept, each storage once."""
        always = self._kept[None] | {_storage(each): each.untyped_storage().nbytes() for each in self._inputs}
        units = [kept for unit, kept in self._kept.items() if unit is not None]
        rest = (sum(size for key, size in kept.items() if key not in always) for kept in units)
        return sum(always.values()) + max(rest, default=0)

    def enter(self, unit: nn.Module, *inputs: object) -> None:
        self._inside.append(unit)
        self._inputs += [part for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) for part in _strided(leaf)]

    def leave(self, *_: object) -> None:
        self._inside.pop()


def _strided(tensor: Tensor) -> Sequence[Tensor]:
    """Return the tensors with a storage that a tensor is made of: of a sparse one indices and values."""
    if tensor.layout is torch.strided:
        return [tensor]
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout is torch.sparse_csr:
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    return []


def _storage(tensor: Tensor) -> int:
    """Return the identity of a tensor's storage; on the meta device every address is 0."""
    return int(tensor.untyped_storage()._cdata)


CHECK = Check(observe, judge, stops=True, about=("forward",))


def judge_memory_growth(seen: Sequence[Steps], case: Case) -> Iterator[Finding]:
    growth, rank = max((least_growth(steps.kept_bytes), -rank) for rank, steps in enumerate(seen))
    if growth < LEAST:
        return
    more = f"{growth / MIB:.3g} MiB more after each one, a graph counted as 1 MiB"
    severity: Severity = "warning"
    means = "memory grows until none is left; each graph keeps the activations of its step"
    advice = "keep numbers, not tensors with their graphs: loss.detach(), or .item() once in a while"
    if growth < MIB:  # without a graph
        means, severity = "memory grows until none is left, unless what is kept has a bound", "note"
        advice = "nothing to do if it has one, as a buffer of samples; else keep numbers: .item()"
    yield Finding(MEMORY_GROWTH, severity, f"tensors that steps keep on rank {-rank}: {more}", means, advice)


MEMORY_GROWTH_CHECK = Check(None, judge_memory_growth, about=("loss", "forward"), clue=r"\.append\(|\+= |\.extend\(")
