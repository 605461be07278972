"""What an equivalence check compares: a gradient, and updates from the same start on the same batches, as sketches."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from harness.plan.cell import Cell
from harness.plan.trial import SkipReason, SkipTrial
from harness.train.loader import Share, batches, endless_shares
from harness.train.model import build_model
from harness.train.optimizers import scale_rate
from harness.train.phases import BACKWARD, Phase
from harness.train.precision import REDUCED
from harness.train.ranks import Ranks
from harness.train.training import Training
from harness.train.transfer import copier
from harness.train.workloads import SizedDataset, Workload, collate_of

STEPS = 2
"""Steps of the scaled update: the second is the first that uses the optimizer's state."""
RELATIVE_STEP = 1e-3
"""Norm of the first of these steps over that of the parameters: large against rounding, small against curvature."""
BUCKETS = 4096
"""Length of a sketch; the relative error of a difference's norm is sqrt(2 / BUCKETS) = 2 %."""
NORMS = (nn.modules.batchnorm._BatchNorm,)


@dataclass(frozen=True)
class Sketches:
    """What is compared, over all parameters: each quantity by its name in the table checks, as a sketch.

    gradient: of the first global batch, before clipping; missing under a strategy of the user's own, which may reduce
    gradients in its optimizer. first_update: one optimizer step at the recipe's learning rate. scaled_update: STEPS
    steps from the same start at a rate whose first step has RELATIVE_STEP of the parameters' norm, so that the result
    does not depend on whether the recipe's rate is stable. ``finite``: whether every number is.
    """

    quantities: dict[str, list[float]]
    parameters: int
    finite: bool


class Frozen:
    """A workload whose model is in eval mode: with batch statistics or dropout, a split batch trains differently.

    Normalisation uses the statistics of one small batch, the same on every rank: with those of a new model the
    activations of a deep net would explode.
    """

    def __init__(self, workload: Workload, batch: object) -> None:
        self._workload, self._batch = workload, batch
        self.unit = workload.unit

    def __getattr__(self, name: str) -> Any:
        return getattr(self._workload, name)

    def build_model(self) -> nn.Module:
        model = build_model(self._workload)
        norms = [module for module in model.modules() if isinstance(module, NORMS)]
        if norms:
            for module in norms:
                module.momentum = None  # a plain mean over batches
            with torch.no_grad():
                self._workload.loss(model, self._batch)
        model.eval()
        for part in model.modules():
            if isinstance(part, nn.RNNBase):  # cuDNN has no backward for one in eval mode
                part.train()
                part.dropout = 0.0
        return model


@dataclass(frozen=True)
class Check:
    """One cell's check on one rank: its workload, frozen, and its parts of the global batches."""

    cell: Cell
    workload: Frozen
    parts: Sequence[tuple[Share, object]]
    seed: int
    ranks: Ranks
    advance: Callable[[], None]


@dataclass(frozen=True)
class Steps:
    """Steps from the start: the gradient of the first and the update of all, flat, on the host of the first rank."""

    start: list[Tensor]
    gradient: list[Tensor]
    update: list[Tensor]
    parameters: int
    drew: bool

    @property
    def scale(self) -> float:
        """The factor on the learning rate at which one step has RELATIVE_STEP of the parameters' norm."""
        start, update = norm(self.start), norm(self.update)
        return RELATIVE_STEP * start / update if start > 0 and 0 < update < math.inf else 1.0


def measure_by_precision(
    cell: Cell, workload: Workload, dataset: SizedDataset, seed: int, ranks: Ranks, advance: Callable[[], None]
) -> dict[str, Sketches]:
    """Return the sketches in fp32, and in the cell's precision if that computes in 16 bits; raise SkipTrial."""
    precisions = dict.fromkeys(("fp32", cell.precision if cell.precision in REDUCED else "fp32"))
    return {
        name: measure_sketches(replace(cell, precision=name), workload, dataset, seed, ranks, advance)
        for name in precisions
    }


def measure_sketches(
    cell: Cell, workload: Workload, dataset: SizedDataset, seed: int, ranks: Ranks, advance: Callable[[], None]
) -> Sketches:
    """Return the cell's sketches; raise SkipTrial if the data is too small or steps draw at random."""
    check = _prepare(cell, workload, dataset, seed, ranks, advance)
    first = take_steps(check, 1)
    gc.collect()  # wrappers are in reference cycles: two models may not fit on the device
    # the same factor on every rank: copies that differ would take steps of different lengths
    scaled = take_steps(check, STEPS, ranks.broadcast(first.scale))
    if any(ranks.gather(first.drew or scaled.drew)):
        reason = "loss or model draw random numbers even when the model only evaluates: no two runs are alike"
        raise SkipTrial(SkipReason("random_evaluation", reason))
    vectors = {"first_update": first.update, "scaled_update": scaled.update}
    if first.gradient:
        vectors["gradient"] = first.gradient
    quantities = dict(zip(vectors, fold(list(vectors.values())), strict=True))
    finite = all(math.isfinite(value) for sketch in quantities.values() for value in sketch)
    return Sketches(quantities, first.parameters, ranks.broadcast(finite))


def _prepare(
    cell: Cell, workload: Workload, dataset: SizedDataset, seed: int, ranks: Ranks, advance: Callable[[], None]
) -> Check:
    samples = len(dataset)
    if cell.global_batch_size > samples:
        reason = f"the check's global batch {cell.global_batch_size} exceeds the {samples} training samples"
        raise SkipTrial(SkipReason("too_few_samples", reason))
    collate = collate_of(workload)

    def stream(rank: int, world_size: int) -> Iterator[tuple[Share, object]]:
        shares = endless_shares(samples, cell.global_batch_size, seed, rank, world_size)
        own = list(islice(shares, STEPS))
        return zip(own, batches(dataset, own, seed=seed, ranks=ranks, options={}, collate=collate), strict=True)

    _, whole = next(iter(stream(0, 1)))
    copy = copier(ranks.devices[0], {})
    parts = [(share, copy(batch)) for share, batch in stream(ranks.rank, ranks.world_size)]
    return Check(cell, Frozen(workload, whole), parts, seed, ranks, advance)


def take_steps(check: Check, steps: int, factor: float = 1.0) -> Steps:
    """Take the first steps of a new training, at the recipe's learning rate times ``factor``."""
    training = Training(check.cell, check.workload, check.seed, check.ranks)
    training.expect_few_steps()
    scale_rate(training.optimizer, factor)
    keep = check.ranks.first
    start = _flat(training.model.parameters(), keep=keep)
    gradient: list[Tensor] = []

    def mark(point: Phase) -> None:
        if steps == 1 and point == BACKWARD and not check.cell.own_traits:  # before it is clipped
            gradient.extend(_gradient(training, keep=keep))

    drew = False
    for share, batch in check.parts[:steps]:
        with drawing() as drawn:
            training.step(batch, share, mark)
        drew = drew or drawn()
        check.advance()
    end = _flat(training.model.parameters(), keep=keep)
    update = [after.sub_(before) for after, before in zip(end, start, strict=True)]
    return Steps(start, gradient, update, training.parameters, drew)


@contextmanager
def drawing() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns, after the block, whether the block drew from torch's generators."""
    before = _generators()
    after: list[list[Tensor]] = []
    try:
        yield lambda: any(not torch.equal(a, b) for a, b in zip(before, after[0], strict=True))
    finally:
        after.append(_generators())


def _generators() -> list[Tensor]:
    cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if cuda else [])]


def fold(vectors: Sequence[Sequence[Tensor]], buckets: int = BUCKETS) -> list[list[float]]:
    """Return a count sketch of each vector (Charikar et al. 2002), given in parts: every number is added, with a
    random sign, to one of ``buckets``. All vectors have the same parts.

    Linear, so that the norm of two sketches' difference estimates that of the difference. Bucket and sign depend
    on the position alone.
    """
    totals = [torch.zeros(buckets, dtype=torch.float64) for _ in vectors]
    generator = torch.Generator().manual_seed(20020708)
    for parts in zip(*vectors, strict=True):
        bucket = torch.randint(buckets, (parts[0].numel(),), generator=generator)
        sign = torch.randint(0, 2, (parts[0].numel(),), generator=generator, dtype=torch.float64) * 2 - 1
        for total, part in zip(totals, parts, strict=True):
            total.index_add_(0, bucket, part.double() * sign)
    return [[float(value) for value in total.tolist()] for total in totals]


def norm(vector: Sequence[Tensor]) -> float:
    """Return the Euclidean norm of a vector given in parts."""
    return math.sqrt(sum(float(part.double().square().sum()) for part in vector))


def _gradient(training: Training, *, keep: bool) -> list[Tensor]:
    """Return the gradient of a step before it is clipped, zero where a parameter has none."""
    scale = training.loss_scale()
    parameters = training.model.parameters()
    whole = _flat((torch.zeros_like(p) if p.grad is None else p.grad for p in parameters), keep=keep)
    return [part.div_(scale.scale) for part in whole] if scale else whole


def _flat(tensors: Iterable[Tensor], *, keep: bool) -> list[Tensor]:
    """Return each tensor whole and flat, on the host; none if not ``keep``. Collective if they are sharded."""
    whole = (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor for tensor in tensors)
    return [tensor.detach().cpu().flatten().clone() for tensor in whole if keep]
