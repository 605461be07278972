"""The peak memory of a training step, traced on fake tensors: nothing is computed, and no memory is allocated.

The tensors are those of a CPU. On a GPU, the allocator rounds sizes up, and kernels have workspaces.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from harness.measure.peak_memory import of_model
from harness.plan.cell import Cell
from harness.plan.rows import Examination, TracedPeak
from harness.train import workloads
from harness.train.loader import Batches, Share, endless_shares
from harness.train.model import faked
from harness.train.optimizers import find_class
from harness.train.precision import Precision
from harness.train.ranks import Ranks
from harness.train.strategies.base import Single, WrapContext, default_units
from harness.train.strategies.fsdp import Fsdp
from harness.train.training import Training
from harness.train.workloads import SizedDataset, Workload, Wrapper, as_datasets, collate_of

TOTAL = "Total"
"""The key of a snapshot's sum; the other keys are kinds of tensors."""
GRADIENTS = ("Gradient", "Sharded Grad", "Unsharded Grad")
FIRST_BATCHES = 8
"""Batches of which the largest is traced if the workload collates them itself, as to pad sequences."""
SEED = 0
VALUES_READ = ("DataDependentOutputException", "GuardOnDataDependentSymNode", "DynamicOutputShapeException")
"""The errors of fake tensors whose values, or shapes that depend on values, are asked for."""


@contextmanager
def fake_group(size: int) -> Iterator[None]:
    """Make this process the first rank of a group of this size, whose collectives exchange nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


class AfterEachOperator(TorchDispatchMode):
    """Calls a function after each operator inside; of a DTensor's after those on its local tensor, as the tracker."""

    def __init__(self, look: Callable[[], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._look = look

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> object:
        if DTensor in types:
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        self._look()
        return result


class Unmoved(Single):
    """The model itself. It is not moved to its device: torch cannot replace fake parameters."""

    def wrap(self, model: nn.Module, context: WrapContext) -> nn.Module:
        return model


class WithMesh(Fsdp):
    """fsdp over a mesh that is made before: it cannot be made of fake tensors."""

    def __init__(self, made: DeviceMesh) -> None:
        self._made = made

    def mesh(self, context: WrapContext) -> DeviceMesh:
        return self._made


class _Loss(nn.Module):
    """A call of the loss as a module. Inside, the tracker lets the model be called again, as for a micro-batch."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self._workload = workload

    def forward(self, model: nn.Module, batch: object) -> tuple[Tensor, Tensor]:
        return self._workload.loss(model, batch)


class Built(Wrapper):
    """A workload whose model is there already; the rest is its own."""

    def __init__(self, inner: Workload, model: nn.Module) -> None:
        super().__init__(inner)
        self._model = model
        self._losses: list[nn.Module] = []  # kept: the tracker looks for them in the backward pass

    def build_model(self) -> nn.Module:
        return self._model

    def loss(self, model: nn.Module, batch: object) -> tuple[Tensor, Tensor]:
        self._losses.append(_Loss(self.inner))
        returned: tuple[Tensor, Tensor] = self._losses[-1](model, batch)
        return returned


@dataclass(frozen=True)
class Load:
    """A rank's part of a step: its batch, or the micro-batches of it, on the host."""

    share: Share
    micro_batches: tuple[object, ...]

    @property
    def bytes(self) -> int:
        """The size of its tensors."""
        return sum(tensor.untyped_storage().nbytes() for tensor in _tensors(self.micro_batches))


def _tensors(batch: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]


def largest_load(cell: Cell, workload: Workload, data: SizedDataset) -> Load:
    """Return the largest of the first steps' loads of the first rank; raises what the data or the workload raise."""
    collate, parts = collate_of(workload), cell.micro_batches
    loader = Batches(
        data, seed=SEED, ranks=_first_rank(cell), options={"pin_memory": False}, collate=collate, micro_batches=parts
    )
    shares = endless_shares(len(data), cell.global_batch_size, SEED, 0, cell.devices)
    first = list(islice(shares, FIRST_BATCHES if collate else 1))
    batches = loader.of(first)
    return max((Load(share, tuple(islice(batches, parts))) for share in first), key=lambda load: load.bytes)


def examine(cell: Cell) -> Examination:
    """Return the sizes of the cell's model and the traced peak, or why they are missing; raises nothing.

    The model is built on the meta device, without memory; if that or the trace fails, once more on the host.
    ``cell``: a ``traced_cell``.
    """
    found: Examination = {"sizes": None, "process_bytes": 0, "peak": None, "reason": ""}
    try:
        workload = workloads.build(cell)
        data, _ = as_datasets(workload.datasets())
        load = largest_load(cell, workload, data)
    except (Exception, SystemExit) as error:
        return {**found, "reason": reason_of(error)}
    found["process_bytes"] = psutil.Process().memory_info().rss
    for device in ("meta", "cpu"):
        sizes = found["sizes"]
        needed = sizes["parameter_bytes"] + sizes["buffer_bytes"] if sizes else 0
        if device == "cpu" and needed and needed >= psutil.virtual_memory().available / 2:
            break
        own = copy.copy(workload)
        try:
            torch.manual_seed(SEED)
            with torch.device(device):
                model = own.build_model()
            found["sizes"] = of_model(model, own)
            return {**found, "peak": trace(cell, own, model, load), "reason": ""}
        except (Exception, SystemExit) as error:
            found["reason"] = reason_of(error)
    return found


def reason_of(error: BaseException) -> str:
    """Return an error in one line; of the errors of fake tensors, with what they mean."""
    text = " ".join(str(error).split())[:200]
    if type(error).__name__ in VALUES_READ:
        return f"the code reads the value of a tensor, as .item() does, and a trace has none ({text})"
    return f"{type(error).__name__}: {text}"


def trace(cell: Cell, workload: Workload, model: nn.Module, load: Load) -> TracedPeak:
    """Return the peak of the second step, when the optimizer has its state.

    ``cell``: of ``single``, or of ``fsdp`` at its number of devices. ``model``: as the workload built it, on any
    device; its parameters and buffers are replaced. Raises whatever the workload raises on fake tensors.
    """
    sharded = cell.traits.shards_parameters
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with fake_group(cell.devices) if sharded else nullcontext():
        ranks = _first_rank(cell)
        precision = Precision(cell.precision, ranks.devices[0].type)
        context = WrapContext(ranks.devices, cell.strategy_options, default_units, precision, cell.nodes)
        strategy = WithMesh(Fsdp().mesh(context)) if sharded else Unmoved()
        with mode:
            built = Built(workload, faked(model, mode, torch.device("cpu")))
            training = Training(_with_defaults_of_device(cell), built, SEED, ranks, strategy)
            return _peak(training, load, partial(tree_map_only, Tensor, mode.from_tensor), sharded=sharded)


def _peak(training: Training, load: Load, fake: Callable[[object], object], *, sharded: bool) -> TracedPeak:
    def step(batches: Iterator[object]) -> None:
        training.step(batches if len(load.micro_batches) > 1 else next(batches), load.share)

    step(map(fake, load.micro_batches))
    tracker: MemTracker
    if sharded:
        tracker = FSDPMemTracker(training.model, training.optimizer)
    else:
        tracker = MemTracker()
        tracker.track_external(training.model, training.optimizer)
    peak: TracedPeak = {"peak_bytes": 0, "without_gradients_bytes": 0}

    def look() -> None:
        for tensors in tracker.get_tracker_snapshot().values():
            total = tensors[TOTAL]
            gradients = sum(tensors.get(kind, 0) for kind in GRADIENTS)
            peak["peak_bytes"] = max(peak["peak_bytes"], total)
            peak["without_gradients_bytes"] = max(peak["without_gradients_bytes"], total - gradients)

    def tracked() -> Iterator[object]:
        for batch in load.micro_batches:
            faked = fake(batch)
            tensors = _tensors(faked)  # until they are deleted
            if isinstance(tracker, FSDPMemTracker):
                tracker.track_inputs(tuple(tensors))
            else:
                tracker.track_external(*tensors)
            yield faked

    with tracker, AfterEachOperator(look):
        step(tracked())
    return peak


def _with_defaults_of_device(cell: Cell) -> Cell:
    """Return the cell whose optimizer updates as torch's default is on its device: on CUDA all tensors at once."""
    options = cell.optimizer
    if cell.device != "cuda" or options.get("fused") or options.get("foreach") is not None:
        return cell
    found = find_class(torch.optim, torch.optim.Optimizer, options.get("name"), "optimizer.name")
    if "foreach" not in inspect.signature(found).parameters:
        return cell
    return replace(cell, optimizer={**options, "foreach": True})


def _first_rank(cell: Cell) -> Ranks:
    return Ranks(0, cell.devices, 0, 0, "", "", (torch.device("cpu"),))
